"""The base of all sections of a config, and a section that several others have."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

Options = dict[str, Any]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,  # run.name=7 is a name
        allow_inf_nan=False,
    )


class Reward(Section):
    name: str  # accuracy, format, code, judge, process, model; a URL; or the dotted path of a function
    weight: float = 1.0
    options: Options = {}
