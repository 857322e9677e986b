"""`GpuSpec`: what one accelerator can do and costs, each figure with its source.

Read from `data/hardware.csv`. Knows datasheet figures, the fractions of them that people reached, and prices; knows
nothing of models or of time. A figure whose source says that nobody checked it is listed in `unverified`.
"""

from __future__ import annotations

import csv
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from types import MappingProxyType

from bimetal.errors import ConfigError
from bimetal.units import GIGA, KILO, TERA

CPU = "cpu"
DEFAULT_CPU_MEMORY_BYTES = 8 * GIGA
DEFAULT_CPU_BYTES_PER_S = 20 * GIGA
DEFAULT_CPU_FLOPS_PER_S = 50 * GIGA
"""What a process of one or two threads reached on a server core with AVX2; say better in the fleet file."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One accelerator model. Vendor figures are dense peaks; None: not published, or not supported."""

    name: str
    vendor: str
    memory_bytes: float
    memory_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    tdp_w: float | None = None
    all_in_w: float | None = None
    """Share of the server, network and cooling included."""
    scaleup_bytes_per_s: float | None = None
    """What one GPU can send to all its peers together, one direction."""
    scaleup_domain: int = 1
    """GPUs that reach each other at that rate."""
    scaleup_kind: str = ""
    bandwidth_achieved_ratio: float | None = None
    bf16_achieved_ratio: float | None = None
    fp8_achieved_ratio: float | None = None
    purchase_usd: tuple[float, float] | None = None
    own_usd_per_h: tuple[float, float] | None = None
    """Total cost of ownership: a hyperscaler's, a small cloud's."""
    rental_usd_per_h: float | None = None
    """On a three-year contract."""
    on_demand_usd_per_h: tuple[float, float] | None = None
    on_demand_median_usd_per_h: float | None = None
    """Where the source names one: offers crowd at the low end of their range."""
    lead_time_weeks: tuple[float, float] | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Field name to where its value comes from."""
    unverified: frozenset[str] = frozenset()
    notes: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.vendor == CPU

    @property
    def is_mesh(self) -> bool:
        """Peers are wired pairwise, so that a group of n uses n - 1 of the links; otherwise a switch joins them."""
        return "mesh" in self.scaleup_kind or "bridge" in self.scaleup_kind

    def flops_per_s(self, dtype: str) -> float:
        """Dense peak for weights of `dtype`; a format without its own units runs at the next wider one's rate."""
        by_width = {"float4": self.fp4_flops_per_s, "float8": self.fp8_flops_per_s}
        for narrow in ("float4", "float8")[("float4", "float8", dtype).index(dtype) :]:
            if by_width[narrow]:
                return float(by_width[narrow] or 0)
        return self.bf16_flops_per_s / (2 if dtype == "float32" and not self.is_cpu else 1)

    def unverified_of(self, *fields: str) -> tuple[str, ...]:
        """Those of `fields` whose figure nobody checked."""
        return tuple(name for name in fields if name in self.unverified)


# Column of the file, factor to base units, field.
_SCALARS = (
    ("mem_gb", GIGA, "memory_bytes"),
    ("mem_tb_s", TERA, "memory_bytes_per_s"),
    ("bf16_dense_tflops", TERA, "bf16_flops_per_s"),
    ("fp8_dense_tflops", TERA, "fp8_flops_per_s"),
    ("fp4_dense_tflops", TERA, "fp4_flops_per_s"),
    ("tdp_w", 1, "tdp_w"),
    ("all_in_kw_per_gpu", KILO, "all_in_w"),
    ("scaleup_gb_s_unidir_per_gpu", GIGA, "scaleup_bytes_per_s"),
    ("bw_achieved_frac", 1, "bandwidth_achieved_ratio"),
    ("bf16_achieved_frac", 1, "bf16_achieved_ratio"),
    ("fp8_achieved_frac", 1, "fp8_achieved_ratio"),
    ("rental_3yr_usd_h", 1, "rental_usd_per_h"),
    ("ondemand_median_usd_h", 1, "on_demand_median_usd_per_h"),
)
_RANGES = (
    ("purchase_usd_low", "purchase_usd_high", "purchase_usd"),
    ("tco_own_hyperscaler_usd_h", "tco_own_neocloud_usd_h", "own_usd_per_h"),
    ("ondemand_low_usd_h", "ondemand_high_usd_h", "on_demand_usd_per_h"),
    ("lead_time_weeks_low", "lead_time_weeks_high", "lead_time_weeks"),
)
_SOURCE_OF = {
    "spec_source": (
        *("memory_bytes", "memory_bytes_per_s", "bf16_flops_per_s", "fp8_flops_per_s", "fp4_flops_per_s"),
        *("tdp_w", "scaleup_bytes_per_s"),
    ),
    "achieved_source": ("bandwidth_achieved_ratio", "bf16_achieved_ratio", "fp8_achieved_ratio"),
    "purchase_source": ("purchase_usd",),
    "tco_source": ("own_usd_per_h", "rental_usd_per_h", "all_in_w"),
    "ondemand_source": ("on_demand_usd_per_h", "on_demand_median_usd_per_h"),
    "lead_source": ("lead_time_weeks",),
}
_DOUBT = re.compile(r"unverified|from memory|placeholder", re.IGNORECASE)
_NAMED_IN_DOUBT = {"tdp": "tdp_w", "link": "scaleup_bytes_per_s"}


def _doubtful(text: str, fields: tuple[str, ...]) -> set[str]:
    """The fields that a source says nobody checked: those it names, or all that it covers."""
    doubtful: set[str] = set()
    for clause in text.split(";"):
        if _DOUBT.search(clause):
            named = {name for word, name in _NAMED_IN_DOUBT.items() if word in clause.lower()}
            doubtful |= named & set(fields) or set(fields)
    return doubtful


def _parse_row(row: Mapping[str, str]) -> GpuSpec:
    values: dict[str, float] = {
        name: float(row[column]) * factor for column, factor, name in _SCALARS if row[column]
    }
    ranges = {
        name: (float(row[low] or row[high]), float(row[high] or row[low]))
        for low, high, name in _RANGES
        if row[low] or row[high]
    }
    present = {*values, *ranges}
    sources: dict[str, str] = {}
    unverified: set[str] = set()
    for column, fields in _SOURCE_OF.items():
        sources |= {name: row[column] for name in fields if name in present and row[column]}
        unverified |= _doubtful(row[column], fields) & present
    if _DOUBT.search(row["scaleup_kind"]):
        unverified.add("scaleup_bytes_per_s")
    return GpuSpec(
        name=row["gpu"],
        vendor=row["vendor"],
        scaleup_domain=int(row["scaleup_domain_gpus"] or 1),
        scaleup_kind=row["scaleup_kind"],
        sources=MappingProxyType(sources),
        unverified=frozenset(unverified),
        notes=row["notes"],
        **values,  # type: ignore[arg-type]
        **ranges,  # type: ignore[arg-type]
    )


@cache
def catalogue() -> Mapping[str, GpuSpec]:
    """Every accelerator of the catalogue by its full name, in the file's order."""
    text = (resources.files("bimetal.catalog") / "data" / "hardware.csv").read_text(encoding="utf-8")
    return MappingProxyType({row["gpu"]: _parse_row(row) for row in csv.DictReader(text.splitlines())})


def find_gpu(name: str) -> GpuSpec:
    """By full name, or by its beginning (`H100` is the catalogue's first H100, the SXM board); case does not matter.

    >>> find_gpu("mi300x").memory_bytes
    192000000000.0
    """
    wanted = name.strip().lower()
    for known, spec in catalogue().items():
        if wanted == known.lower():
            return spec
    for known, spec in catalogue().items():
        if wanted and re.match(re.escape(wanted) + r"[-\s]", known.lower()):
            return spec
    raise ConfigError(f"GPU {name!r} is not in the catalogue: {suggest(name, (*catalogue(), CPU))}")


def suggest(given: str, known: tuple[str, ...]) -> str:
    """The near misses if there are any, or all that is known."""
    folded = {name.lower(): name for name in known} | {name.split("-")[0].lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), folded, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(dict.fromkeys(folded[name] for name in near))}?"
    return f"use one of {', '.join(known)}"


def cpu_spec(
    memory_bytes: float | None = None,
    memory_bytes_per_s: float | None = None,
    flops_per_s: float | None = None,
) -> GpuSpec:
    """A group of CPU threads as a device; what is left out takes the documented default above."""
    given = {
        "memory_bytes": memory_bytes,
        "memory_bytes_per_s": memory_bytes_per_s,
        "bf16_flops_per_s": flops_per_s,
    }
    return GpuSpec(
        name=CPU,
        vendor=CPU,
        memory_bytes=memory_bytes or min(DEFAULT_CPU_MEMORY_BYTES, host_memory_bytes()),
        memory_bytes_per_s=memory_bytes_per_s or DEFAULT_CPU_BYTES_PER_S,
        bf16_flops_per_s=flops_per_s or DEFAULT_CPU_FLOPS_PER_S,
        bandwidth_achieved_ratio=1.0,
        bf16_achieved_ratio=1.0,
        sources=MappingProxyType(
            {name: "fleet file" if value else "default of bimetal" for name, value in given.items()}
        ),
        unverified=frozenset(name for name, value in given.items() if not value),
    )


def host_memory_bytes() -> float:
    """Physical memory of the machine that plans."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def override(
    spec: GpuSpec,
    *,
    memory_bytes: float | None = None,
    memory_bytes_per_s: float | None = None,
    flops_per_s: float | None = None,
) -> GpuSpec:
    """The spec with what a fleet file says better; the new figures' source is the fleet file."""
    changes = {
        name: value
        for name, value in (
            ("memory_bytes", memory_bytes),
            ("memory_bytes_per_s", memory_bytes_per_s),
            ("bf16_flops_per_s", flops_per_s),
        )
        if value
    }
    if not changes:
        return spec
    return replace(
        spec,
        sources=MappingProxyType({**spec.sources, **dict.fromkeys(changes, "fleet file")}),
        unverified=spec.unverified - set(changes),
        **changes,  # type: ignore[arg-type]
    )
