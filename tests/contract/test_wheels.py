"""What is read out of a wheel: re-exports, inherited members, dataclass fields, branches; nothing of it is executed."""

from __future__ import annotations

from zipfile import ZipFile

import pytest
from wheels import Missing, Wheel

FILES = {
    "engine/__init__.py": """
        from typing import TYPE_CHECKING
        from .core import Config as Settings, make
        from . import core
        from engine import late
        from .star import *
        raise RuntimeError("imported")
    """,
    "engine/core.py": """
        from dataclasses import dataclass, field
        from typing import ClassVar
        import torch
        try:
            from .missing import fast
            def quick(a, *, b=1): ...
        except ImportError:
            quick = None

        @dataclass
        class Base:
            one: int
            two: int = 2
            hidden: int = field(init=False)
            count: ClassVar[int] = 0

        @dataclass
        class Config(Base):
            three: list = field(default_factory=list)

            def close(self, now): ...
            @staticmethod
            def plain(x): ...
            @classmethod
            def of(cls, x) -> "Config": ...
            @property
            def parent(self) -> Base: ...

        class Layer(torch.nn.Module):
            def __init__(self, size, *args, **options):
                self.config = Config(1)
                self.other: Base = options["other"]

        def make(x, /, y, *rest, z, w=3) -> Config: ...
    """,
    "engine/late.py": "def later(): ...",
    "engine/star.py": "def shining(light): ...",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Wheel:
    path = tmp_path_factory.mktemp("wheels") / "engine-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as file:
        for name, text in FILES.items():
            lines = text.splitlines()
            file.writestr(name, "\n".join(line.removeprefix("        ") for line in lines))
    return Wheel(path)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("engine.Settings", "(one, two=..., three=...)"),
        ("engine.make", "(x, /, y, *rest, z, w=...)"),
        ("engine.make()", ": engine.core.Config"),
        ("engine.make().close", "(now)"),
        ("engine.Settings.close", "(self, now)"),
        ("engine.Settings().plain", "(x)"),
        ("engine.Settings.of", "(x)"),
        ("engine.Settings.of().parent.two", ""),
        ("engine.core.Layer", "(size, *args, **options)"),
        ("engine.core.Layer().config.close", "(now)"),
        ("engine.core.Layer().other", ": engine.core.Base"),
        ("engine.core.Layer().register_buffer", ""),  # torch.nn.Module's
        ("engine.core.quick", "(a, *, b=...)"),
        ("engine.late.later", "()"),
        ("engine.shining", "(light)"),
    ],
)
def test_read(wheel, path, text):
    assert wheel.signatures(path)[path] == text


@pytest.mark.parametrize(
    "path",
    [
        "engine.Base",
        "engine.Settings().open",
        "engine.core.Layer().weights",
        "engine.core.fast",
        "engine.gone.x",
    ],
)
def test_what_is_missing(wheel, path):
    with pytest.raises(Missing):
        wheel.signatures(path)
