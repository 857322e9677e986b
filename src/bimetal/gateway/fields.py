"""Building blocks of the request models: strict types, bounds, and fields that this server declines.

Strict: "5" is no integer and true is no number. What a bound says here, /openapi.json says too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
)
from pydantic_core import CoreSchema, core_schema

MAX_INT = 2**31 - 1
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_DEADLINE_S = 86_400.0


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


def _integral(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is as good an integer as 5."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


INTEGRAL = BeforeValidator(_integral)
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Deadline = Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)]

Ignored = Annotated[Any, Field(description="Accepted; changes nothing here.")]
"""Fields of OpenAI's API that do not bear on the answer of a self-hosted model."""


@dataclass(frozen=True, slots=True)
class Declined:
    """Marks a field that would change the answer and is not supported: null and `neutral` pass, all else is a 400."""

    why: str
    neutral: tuple[Any, ...] = ()

    def check(self, value: Any) -> Any:
        # 0 == False, so the types have to agree as well.
        if value is None or any(type(value) is type(one) and value == one for one in self.neutral):
            return value
        raise ValueError(f"not supported: {self.why}: remove it")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, *self.neutral], "description": f"Not supported: {self.why}."}
