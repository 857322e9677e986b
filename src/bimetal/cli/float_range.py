"""`FloatRange`: a number within limits; NaN, which is neither below nor above any, is not one."""

from __future__ import annotations

import math
from typing import Any

import click


class FloatRange(click.FloatRange):
    """As click's."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number in the range {self._describe_range()}.", param, ctx)
        return number
