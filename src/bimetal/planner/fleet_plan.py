"""`plan_fleet`: one replica of the model over all GPUs of a fleet file, as a Plan.

Owns the translation between the fleet, the stage times of `perf` and the search of `split`, and the words for a
fleet that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from bimetal.catalog.fleet import Fleet, Node
from bimetal.catalog.hardware import GpuSpec
from bimetal.catalog.models import ModelSpec
from bimetal.errors import ConfigError, InfeasibleError
from bimetal.perf.calibration import Calibration
from bimetal.perf.step_time import ACTIVATION_BYTES, StageShape, decode_step, decode_steps
from bimetal.plan import Plan, Replica, Stage, StagePrediction
from bimetal.planner.split import Costs, Split, best_split, least_overflow, round_s, worst_overflow
from bimetal.policy.batching import max_num_micro_batches
from bimetal.units import DTYPE_BYTES, format_bytes

Ranges = Sequence[tuple[int, int]]
ID_BYTES = 8
USED_FIELDS = ("memory_bytes", "memory_bytes_per_s", "bf16_flops_per_s", "fp8_flops_per_s", "fp4_flops_per_s")


@dataclass(frozen=True)
class Slot:
    """A place for a stage: `tensor_parallel` GPUs of one node."""

    node: Node
    device: GpuSpec
    index: int
    """Among the node's stages."""

    @property
    def tensor_parallel(self) -> int:
        return self.node.tensor_parallel

    @property
    def device_indices(self) -> tuple[int, ...]:
        start = self.index * self.tensor_parallel
        return tuple(range(start, start + self.tensor_parallel))


def plan_fleet(fleet: Fleet, calibration: Calibration | None = None) -> Plan:
    """The split with the highest decode throughput; InfeasibleError names the stage and the bytes missing."""
    chain = Chain(fleet, calibration)
    split = chain.best()
    spec, limits = chain.model, fleet.limits
    n, k = limits.planned_concurrency, split.num_micro_batches
    stages = tuple(
        chain.stage(i, start, end, n / k) for i, (start, end) in enumerate(pairwise(split.boundaries))
    )
    tokens_per_s = n / split.round_s
    return Plan(
        model=fleet.model,
        replicas=(Replica("replica-0", stages),),
        dtype=chain.dtype,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        predicted_output_tokens_per_s=round(tokens_per_s, 3),
        reasons=tuple(_reasons(chain, split, spec, tokens_per_s)),
    )


def _reasons(chain: Chain, split: Split, spec: ModelSpec, tokens_per_s: float) -> Iterator[str]:
    limits = chain.fleet.limits
    yield (
        f"{limits.planned_concurrency} sequences at {limits.planned_context} tokens of context, "
        f"{split.num_micro_batches} micro-batch(es): a round takes {split.round_s * 1e3:.2f} ms"
    )
    if len(chain.slots) > 1:
        even = chain.evaluate(tuple(round(x) for x in np.linspace(0, spec.num_layers, len(chain.slots) + 1)))
        if even is None:
            yield "an even split of the layers would not fit"
        elif even.boundaries != split.boundaries:
            rate = limits.planned_concurrency / even.round_s
            yield f"an even split of the layers would reach {rate:.0f} tok/s, this one {tokens_per_s:.0f}"
    for slot in {slot.device.name: slot for slot in chain.slots}.values():
        used = [*USED_FIELDS, *(["scaleup_bytes_per_s"] if slot.tensor_parallel > 1 else [])]
        if doubtful := slot.device.unverified_of(*used):
            yield f"rests on unverified figures of {slot.device.name}: {', '.join(doubtful)}"


class LayerClasses:
    """Ranges of layers that weigh and cost the same: as many layers of each kind, and the same ends of the model."""

    def __init__(self, model: ModelSpec) -> None:
        last = model.num_layers
        kinds = [(model.has_experts(i), model.sliding_window(i)) for i in range(last)]
        order = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
        before = np.zeros((last + 1, len(order)), dtype=np.int64)
        for i, kind in enumerate(kinds):
            before[i + 1] = before[i]
            before[i + 1, order[kind]] += 1
        known: dict[tuple[object, ...], int] = {}
        self.examples: list[tuple[int, int]] = []
        self.index = np.full((last + 1, last + 1), -1)
        """[start, end] to a position in `examples`; -1 where end <= start."""
        for start in range(last):
            for end in range(start + 1, last + 1):
                key = (*(before[end] - before[start]), start == 0, end == last)
                if key not in known:
                    known[key] = len(self.examples)
                    self.examples.append((start, end))
                self.index[start, end] = known[key]


class Chain:
    """A fleet's slots in order, with the time and the bytes of any layers on any of them."""

    def __init__(self, fleet: Fleet, calibration: Calibration | None = None) -> None:
        self.fleet = fleet
        self._calibration = calibration
        self.model = fleet.model_spec
        self.dtype = fleet.weight_dtype
        self.slots = [Slot(node, node.device, i) for node in fleet.nodes for i in range(node.num_stages)]
        if len(self.slots) > self.model.num_layers:
            raise InfeasibleError(
                f"{len(self.slots)} stages for {self.model.num_layers} layers of {self.model.name}: every stage needs "
                "a layer, so raise tensor_parallel or leave nodes out"
            )
        for slot in self.slots:
            _check_heads(slot, self.model)
        self._classes = LayerClasses(self.model)

    def shape(self, stage: int, start: int, end: int) -> StageShape:
        slot = self.slots[stage]
        widened = slot.device.is_cpu and self.dtype == "float8"  # a CPU stage keeps no 8-bit weights
        wide = "float32" if self.model.dtype == "float32" else "bfloat16"
        dtype = wide if widened else self.dtype
        return StageShape(self.model, start, end, slot.device, slot.tensor_parallel, dtype)

    def room_bytes(self, stage: int) -> float:
        """What weights and KV cache may fill on the stage's whole group."""
        slot = self.slots[stage]
        return slot.device.memory_bytes * slot.tensor_parallel * self.fleet.limits.memory_utilization

    @cached_property
    def _weight_bytes(self) -> Costs:
        return self._table(lambda i, ranges: [self.shape(i, a, b).weight_bytes for a, b in ranges])

    @cached_property
    def _kv_bytes_per_token(self) -> Costs:
        return self._table(lambda i, ranges: [self.shape(i, a, b).kv_bytes_per_token for a, b in ranges])

    def missing_for(self, kv_tokens: int) -> Costs:
        """[stage, start, end]: bytes that the weights and so many tokens of KV cache lack; inf where end <= start."""
        room = np.array([self.room_bytes(i) for i in range(len(self.slots))])
        missing: Costs = self._weight_bytes + self._kv_bytes_per_token * kv_tokens - room[:, None, None]
        return missing

    @cached_property
    def missing(self) -> Costs:
        """For the KV cache that the limits ask for."""
        return self.missing_for(self.fleet.limits.kv_tokens)

    def costs(self, num_micro_batches: int) -> Costs:
        """[stage, start, end] in seconds for one micro-batch; inf where it does not fit."""
        limits = self.fleet.limits
        size = limits.planned_concurrency / num_micro_batches

        def seconds(stage: int, ranges: Ranges) -> list[float]:
            shapes = [self.shape(stage, start, end) for start, end in ranges]
            return [
                step.step_s for step in decode_steps(shapes, size, limits.planned_context, self._calibration)
            ]

        return np.where(self.missing <= 0, self._table(seconds), np.inf)

    def wires(self, num_micro_batches: int) -> tuple[list[float], float]:
        """Seconds that each wire carries one micro-batch, and all hops together, the ids' way back included."""
        size = self.fleet.limits.planned_concurrency / num_micro_batches
        payload = size * self.model.hidden_size * max(ACTIVATION_BYTES, DTYPE_BYTES[self.dtype])
        names = [slot.node.name for slot in self.slots]
        links = [self.fleet.link_between(a, b) for a, b in pairwise(names)]
        if not links:
            return [], 0.0
        busy = [payload / link.bandwidth_bytes_per_s for link in links]
        back = self.fleet.link_between(names[-1], names[0]).transfer_s(size * ID_BYTES)
        return busy, sum(link.transfer_s(payload) for link in links) + back

    @property
    def _most_micro_batches(self) -> int:
        """As the engine will choose from."""
        return min(self.fleet.limits.planned_concurrency, max_num_micro_batches(len(self.slots)))

    def best(self) -> Split:
        """The optimum, or InfeasibleError."""
        split = best_split(self.costs, self.wires, self._most_micro_batches)
        if split is None:
            raise self._infeasible()
        return split

    def evaluate(self, boundaries: tuple[int, ...]) -> Split | None:
        """Given boundaries with the best number of micro-batches; None: they do not fit."""
        ranges = list(enumerate(pairwise(boundaries)))
        if any(end <= start or self.missing[i, start, end] > 0 for i, (start, end) in ranges):
            return None
        n, context = self.fleet.limits.planned_concurrency, self.fleet.limits.planned_context
        splits = []
        for k in range(1, self._most_micro_batches + 1):
            times = [
                decode_step(self.shape(i, a, b), n / k, context, self._calibration).step_s
                for i, (a, b) in ranges
            ]
            splits.append(Split(boundaries, k, round_s(times, k, *self.wires(k))))
        return min(splits, key=lambda split: split.round_s)

    def stage(self, i: int, start: int, end: int, micro_batch: float) -> Stage:
        slot, shape = self.slots[i], self.shape(i, start, end)
        estimate = decode_step(shape, micro_batch, self.fleet.limits.planned_context, self._calibration)
        left = self.room_bytes(i) - shape.weight_bytes
        return Stage(
            node=slot.node.name,
            gpu=slot.device.name,
            start_layer=start,
            end_layer=end,
            device_indices=slot.device_indices,
            address=slot.node.stage_address(slot.index),
            python=slot.node.python,
            model_path=slot.node.model_path,
            num_threads=slot.node.num_threads,
            prediction=StagePrediction(
                weight_bytes=shape.weight_bytes,
                kv_capacity_tokens=int(left // shape.kv_bytes_per_token),
                step_s=estimate.step_s,
                binds=estimate.binds,
            ),
        )

    def _table(self, values_of: Callable[[int, Ranges], Sequence[float]]) -> Costs:
        """[stage, start, end] of the values of ranges on a stage, reckoned once per node and class of ranges."""
        by_node: dict[str, Costs] = {}
        for stage, slot in enumerate(self.slots):
            if slot.node.name not in by_node:
                values = values_of(stage, self._classes.examples)
                by_node[slot.node.name] = np.array([*values, np.inf])[self._classes.index]
        return np.stack([by_node[slot.node.name] for slot in self.slots])

    def _infeasible(self) -> InfeasibleError:
        boundaries = least_overflow(self.missing)
        ranges = list(pairwise(boundaries))
        lacking = [float(self.missing[i, start, end]) for i, (start, end) in enumerate(ranges)]
        worst = int(np.argmax(lacking))
        start, end = ranges[worst]
        slot, shape, limits = self.slots[worst], self.shape(worst, start, end), self.fleet.limits
        needed = shape.weight_bytes + shape.kv_bytes_per_token * limits.kv_tokens
        message = (
            f"stage {worst} ({slot.node.name}, {slot.tensor_parallel} x {slot.device.name}) lacks "
            f"{format_bytes(lacking[worst])} in the best split: layers [{start}, {end}) need "
            f"{format_bytes(shape.weight_bytes)} of weights and "
            f"{format_bytes(needed - shape.weight_bytes)} of KV cache for {limits.kv_tokens} tokens, "
            f"and {format_bytes(self.room_bytes(worst))} are usable"
        )
        return InfeasibleError(f"{message}: {self._remedy()}")

    def _remedy(self) -> str:
        """The most sequences for which some split fits, or, if the weights alone do not, the memory to add."""
        limits = self.fleet.limits

        def fits(num_seqs: int) -> bool:
            kv_tokens = max(num_seqs * limits.planned_context, limits.max_model_len)
            missing = self.missing_for(kv_tokens)
            return worst_overflow(missing, least_overflow(missing)) <= 0

        if fits(1):
            low, high = 1, limits.max_num_seqs  # low fits, high does not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            return f"lower max_num_seqs to at most {low}, or mean_context, or add a node"
        weights = self.shape(0, 0, self.model.num_layers).weight_bytes
        room = sum(self.room_bytes(i) for i in range(len(self.slots)))
        narrower = "dtype float8" if DTYPE_BYTES[self.dtype] > 1 else "a smaller model"
        return (
            f"the model weighs {format_bytes(weights)}, all stages together have {format_bytes(room)}, and one "
            f"sequence of {limits.max_model_len} tokens must fit: add GPUs, or use {narrower}"
        )


def _check_heads(slot: Slot, model: ModelSpec) -> None:
    ranks = slot.tensor_parallel
    kv_fits = model.num_kv_heads % ranks == 0 or ranks % model.num_kv_heads == 0
    if model.num_heads % ranks or not kv_fits:
        raise ConfigError(
            f"node {slot.node.name}: tensor_parallel {ranks} does not divide the {model.num_heads} heads and "
            f"{model.num_kv_heads} key/value heads of {model.name}: use a power of two up to {model.num_kv_heads}"
        )
