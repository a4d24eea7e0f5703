"""Base of all configuration sections: unknown keys are errors, and value types have units."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

__all__ = [
    "PATTERNS",
    "Count",
    "Digest",
    "Fraction",
    "Integer",
    "Name",
    "Number",
    "Port",
    "Seconds",
    "Section",
    "tag",
]


def _not_boolean(value: Any) -> Any:
    """Refuses booleans: YAML's `yes` and `on` are booleans, which pydantic would read as 1."""
    if isinstance(value, bool):
        raise ValueError("should be a number, not true or false")
    return value


Integer = Annotated[int, BeforeValidator(_not_boolean)]
Number = Annotated[float, BeforeValidator(_not_boolean)]
Seconds = Annotated[Number, Field(gt=0)]
Count = Annotated[Integer, Field(gt=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Port = Annotated[Integer, Field(ge=0, le=65535)]  # 0: a free one
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$"
_SHA256 = r"^[0-9a-f]{64}$"
PATTERNS = {
    _NAME: "should begin with a letter or digit and hold only those and . _ : / @ + -",
    _SHA256: "should be a SHA-256: 64 hexadecimal digits, a to f in lower case",
}
# Name of a model, a pool, a backend or a key; it appears in metrics and logs.
Name = Annotated[str, StringConstraints(pattern=_NAME, max_length=200)]
Digest = Annotated[str, StringConstraints(pattern=_SHA256)]  # of a key


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )


def tag(section: type[Section]) -> str:
    """Labels a union's section in the place of a problem; the brackets set it apart from keys."""
    return f"<{section.__name__}>"
