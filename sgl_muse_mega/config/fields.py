"""Field types that the configurations share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(gt=0)]
Window = Annotated[int, Field(gt=0, lt=2**31)]  # the kernels count positions in 32 bits
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]


class Validated(BaseModel):
    """Immutable, without coercion between types, and without fields nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
