"""The base class of config sections, and helpers of their checks."""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

if TYPE_CHECKING:
    from megarl.config.schema import Config as Config
else:  # schema.py imports the sections; their checks use its class only in annotations
    Config = Any

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
MULTILINE = "system_prompt stop separator phrases pattern template"  # fields that allow line breaks
Options = dict[str, Any]
AnySection = TypeVar("AnySection", bound=BaseModel)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, most: int = 1) -> str:
    """Returns a suggestion of up to `most` similar names, or `otherwise` if there are none."""
    near = get_close_matches(name, [*known], n=most)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def check_options(
    owner: str, options: Iterable[str], known: Collection[str], prefix: str = ""
) -> None:
    """Raises ValueError for an option that is not in `known`; the message names `owner`, and the
    option with `prefix`.
    """
    for name in options:
        if name not in known:
            remedy = did_you_mean(name, known, f"it takes {', '.join(known) or 'none'}; remove it")
            raise ValueError(f"{owner} has no option {prefix + name!r}; {remedy}")


def validate_options(section: type[AnySection], options: Options, owner: str) -> AnySection:
    """Returns the options of `owner` as a validated `section`; raises ValueError for an invalid
    one, with the value and the remedy.
    """
    check_options(owner, options, section.model_fields)
    try:
        return section.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(f"{owner} needs the option {key}; set it") from None
        where = f"option {key}={first['input']!r} is invalid" if key else "invalid options"
        raise ValueError(f"{owner}, {where}: {message_of(first)}") from None


def message_of(error: ErrorDetails) -> str:
    """Returns the message of a pydantic error, phrased as the end of a sentence."""
    text = error["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    return text.replace("a valid tuple", "a list")


def short(value: Any, most: int = 60) -> str:
    """Returns the repr of a value, cut to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def refuse(*problems: tuple[object, str], start: str = "") -> None:
    """Raises ValueError with `start` and the message of the first problem whose condition holds."""
    for is_wrong, message in problems:
        if is_wrong:
            raise ValueError(start + message)


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"it is not a regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]


def one_of(names: Iterable[str]) -> AfterValidator:
    """Returns a validator that accepts only `names`, for names that cannot be a Literal."""
    return AfterValidator(partial(_check_name, names=tuple(names)))


def _check_name(name: str, names: tuple[str, ...]) -> str:
    if name not in names:
        *others, last = map(repr, names)
        raise ValueError(f"it should be {', '.join(others)} or {last}")
    return name


def _refuse_misread(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    field = info.field_name or ""
    kind = str(cls.model_fields[field].annotation)
    is_line = (
        field not in MULTILINE.split() and not cls.model_fields[field].metadata
    )  # metadata, for example a pattern, restricts the text already
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, bool) and "bool" not in kind and "Any" not in kind:
            raise ValueError("it should be a number or text, not true or false")
        is_float = isinstance(item, float) and "float" not in kind
        is_id = type(item) is int and item is not value and "int" not in kind and "Any" not in kind
        if "str" in kind and (is_float or is_id):
            raise ValueError("it should be text; put it in quotes")
        if not isinstance(item, str) or "://" in item:  # URLs are checked where they are used
            continue
        if is_line and len(f"{item}.".splitlines()) > 1:
            raise ValueError("it should be text on one line")
    return value


# validator for classes of options: booleans are not numbers, 1.10 is not text, and names have no
# line breaks
not_misread = field_validator("*", mode="before")(classmethod(_refuse_misread))


class Section(BaseModel):
    """Base class of config sections: frozen, without unknown keys. A string below each field
    documents the field.
    """

    _not_misread = not_misread

    # numbers are accepted as text: run.name=7
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
