"""What all sections of the configuration share: no unknown keys, and values with their units."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

__all__ = ["Count", "Digest", "Fraction", "Name", "Seconds", "Section"]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# Of a model, a pool, a backend or a key: it appears in metrics and logs.
Name = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$", max_length=200)
]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]  # SHA-256 of a key


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
