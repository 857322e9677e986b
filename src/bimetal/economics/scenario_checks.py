"""What the parts of a scenario file must be to one another, beyond each field's own range.

Every complaint is a `ConfigError` with file, line and field, the value given and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bimetal.catalog.document import Document, Location
from bimetal.economics.quantity import Quantity
from bimetal.economics.scenario_file import GpuFields, ScenarioFile
from bimetal.units import WEEKS_PER_YEAR


def check_file(document: Document, file: ScenarioFile) -> None:
    """Names that would hide one another, discounts that leave less than nothing, correlations that cannot be."""
    _check_unique(document, ("fleets",), [fleet.name for fleet in file.fleets])
    for gpu, fields in file.gpus.items():
        where = ("gpus", gpu, "discounts")
        _check_unique(document, where, [discount.name for discount in fields.discounts])
        _check_discounts(document, where, fields)
    stated = file.workload.input_tokens_per_output_token.central
    if file.serving is not None and "input_tokens_per_output_token" in file.workload.model_fields_set:
        served = file.serving.input_tokens / file.serving.output_tokens
        if not math.isclose(stated, served, rel_tol=0.01):
            raise document.error(
                ("workload", "input_tokens_per_output_token"),
                f"is {stated:g}, and serving has {served:g} (input_tokens / output_tokens): give one of them",
            )
    seen: set[frozenset[str]] = set()
    for i, (a, b, rho) in enumerate(file.correlations):
        if not -1 < rho < 1:
            raise document.error(("correlations", i), f"must be above -1 and below 1, got {rho:g}")
        if a == b or frozenset((a, b)) in seen:
            raise document.error(
                ("correlations", i), f"{a!r} and {b!r}: tie two different inputs, each pair once"
            )
        seen.add(frozenset((a, b)))


def _check_unique(document: Document, where: Location, names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise document.error(
                (*where, i, "name"), f"{name!r} is taken: inputs go by this name, give another"
            )


def _check_discounts(document: Document, where: Location, fields: GpuFields) -> None:
    """Discounts off the list price add up; more than all of it would be a gift."""
    for on in ("price", "on-demand", "reserved"):
        left = 1.0
        for d in (d for d in fields.discounts if d.applies_to == on):
            most = float(d.ratio.quantile(np.array([1.0]))[0])
            left -= most if d.base == "list" else most * left
        if left < 0 and not math.isclose(left, 0, abs_tol=1e-9):
            raise document.error(
                where, f"may take {1 - left:.0%} off the {on}: at most 100%, check each base"
            )


def check_delivery(document: Document, gpu: str, years: int, lead_time_weeks: Quantity) -> None:
    """GPUs that come after their years have ended would be paid, sold as new and never work."""
    longest = float(lead_time_weeks.quantile(np.array([1.0]))[0])
    if longest >= years * WEEKS_PER_YEAR:
        raise document.error(
            ("gpus", gpu, "lead_time_weeks"),
            f"may reach {longest:.4g} weeks, and a group of {gpu} is there for {years} year(s), "
            f"{years * WEEKS_PER_YEAR:.4g} weeks: give less, or the group more years",
        )
