"""`StageTables`: step times and bytes of every range of layers of one model on every slot, and chains made of them.

Owns the translation from layers and links to `Machines`. Does not know which chains are worth making.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from bimetal.catalog.demand import Demand, ServedModel
from bimetal.catalog.links import SAME_HOST, LinkSpec
from bimetal.catalog.models import ModelSpec
from bimetal.perf.calibration import Calibration
from bimetal.perf.power import published_power_curve
from bimetal.perf.stage_clock import clock_columns
from bimetal.perf.step_time import ACTIVATION_BYTES, StageShape, coefficients_of
from bimetal.planner.fleet_plan import ID_BYTES, LayerClasses
from bimetal.planner.machines import CLOCK_FIELDS, Floats, Machines
from bimetal.planner.templates import Slot
from bimetal.units import DTYPE_BYTES

Boundaries = NDArray[np.int64]
"""[M, P + 1]: stage p of chain m holds layers [b[m, p], b[m, p + 1])."""


@dataclass(frozen=True)
class StageTables:
    """One model over the slots of a demand."""

    demand: Demand
    model: ServedModel
    slots: tuple[Slot, ...]
    calibration: Calibration

    @property
    def classes(self) -> LayerClasses:
        return _layer_classes(self.model.spec)

    @property
    def num_layers(self) -> int:
        return self.model.spec.num_layers

    def shapes(self, slot: Slot) -> list[StageShape]:
        spec, dtype = self.model.spec, self.model.dtype
        return [
            StageShape(spec, start, end, slot.gpu, slot.tensor_parallel, dtype)
            for start, end in self.classes.examples
        ]

    @cached_property
    def clocks(self) -> dict[str, Floats]:
        """Each field of `StageClock`, [slots, classes of ranges]."""
        rows = []
        for slot in self.slots:
            shapes = self.shapes(slot)
            one = coefficients_of(
                shapes[:1], self.calibration, slot.draw
            )  # which layers they are changes none
            same = {term: np.broadcast_to(value, (len(shapes),)) for term, value in one.items()}
            clocks = clock_columns(shapes, same)
            if slot.power_limit_w and slot.gpu.tdp_w:
                clocks = published_power_curve().slowed(clocks, slot.power_limit_w / slot.gpu.tdp_w)
            rows.append(clocks)
        return {name: np.array([row[name] for row in rows]) for name in CLOCK_FIELDS}

    @cached_property
    def weight_bytes(self) -> Floats:
        """[classes of ranges]."""
        return _range_params(self.model.spec) * DTYPE_BYTES[self.model.dtype]

    @cached_property
    def room_bytes(self) -> Floats:
        """[slots] for weights and KV cache."""
        share = self.demand.site.memory_utilization
        return np.array([slot.gpu.memory_bytes * slot.tensor_parallel * share for slot in self.slots])

    def kv_bytes(self, slot: NDArray[np.int64], num_layers: NDArray[np.int64]) -> Floats:
        """Of one token in so many layers on a slot; ranks that share a head hold it twice."""
        spec = self.model.spec
        one = StageShape(spec, 0, 1, self.slots[0].gpu, 1, self.model.dtype).kv_bytes_per_token
        copies = np.array([max(1, s.tensor_parallel // spec.num_kv_heads) for s in self.slots])
        held: Floats = np.maximum(num_layers, 1) * one * copies[slot].astype(float)
        return held

    def chains(self, slot: NDArray[np.int64], boundaries: Boundaries) -> Machines:
        """M chains of P stages: `slot` [M, P] indices of slots."""
        classes = self.classes.index[boundaries[:, :-1], boundaries[:, 1:]]
        clocks = {name: column[slot, classes] for name, column in self.clocks.items()}
        left = self.room_bytes[slot] - self.weight_bytes[classes]
        tokens = np.floor(left / self.kv_bytes(slot, np.diff(boundaries, axis=1))).min(axis=1)
        hops = self._hops(slot)
        depth = np.full(len(slot), slot.shape[1])
        return Machines(clocks, depth, *hops, tokens)

    def link(self, first: Slot, second: Slot) -> LinkSpec:
        """Between neighbours; each part of a node has its share of the node's link."""
        if first.stock == second.stock and first.tensor_parallel + second.tensor_parallel <= first.per_node:
            return SAME_HOST
        named = self.demand.link_between(first.gpu, second.gpu)
        share = min(first.node_ratio, second.node_ratio)
        return LinkSpec(named.name, named.bandwidth_bytes_per_s * share, named.latency_s, named.latency_p99_s)

    @cached_property
    def links(self) -> tuple[Floats, Floats, Floats]:
        """[slots, slots]: latency, its tail, bytes per second."""
        links = [[self.link(a, b) for b in self.slots] for a in self.slots]
        tail = [
            [np.inf if link.latency_p99_s is None else link.latency_p99_s for link in row] for row in links
        ]
        rate = [[link.bandwidth_bytes_per_s for link in row] for row in links]
        return np.array([[link.latency_s for link in row] for row in links]), np.array(tail), np.array(rate)

    @property
    def payload_bytes(self) -> float:
        """Of one token's hidden state."""
        return self.model.spec.hidden_size * max(ACTIVATION_BYTES, DTYPE_BYTES[self.model.dtype])

    def _hops(self, slot: NDArray[np.int64]) -> tuple[Floats, Floats, Floats, Floats]:
        """[M] latency of all hops and its tail, seconds per token of all, and of the slowest."""
        none = np.zeros(len(slot))
        if slot.shape[1] == 1:
            return none, none, none, none
        latency, tail, rate = self.links
        here, there = slot[:, :-1], slot[:, 1:]
        back = slot[:, -1], slot[:, 0]
        carried = self.payload_bytes / rate[here, there]
        return (
            latency[here, there].sum(axis=1) + latency[back],
            tail[here, there].sum(axis=1) + tail[back],
            carried.sum(axis=1) + ID_BYTES / rate[back],
            carried.max(axis=1),
        )


@lru_cache(maxsize=32)
def _layer_classes(model: ModelSpec) -> LayerClasses:
    return LayerClasses(model)


@lru_cache(maxsize=32)
def _range_params(model: ModelSpec) -> Floats:
    """[classes of ranges] weights, with the embedding and the head where they belong."""
    return np.array([float(model.stage_params(a, b)) for a, b in _layer_classes(model).examples])
