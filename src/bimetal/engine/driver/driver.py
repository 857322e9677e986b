"""The driver: one replica's stages, scheduler and grammars joined. Torch-free, and no stage itself.

`start` brings the stages up; `submit` and `abort` may be called from any thread; `poll`, on one thread, waits for
something to happen, keeps the stages fed and returns the outputs. `serve` (driver_process) and `bench` both drive this.
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bimetal.catalog.models import ModelSpec, load_model_spec
from bimetal.engine.driver.generation_config import read_eos_token_ids
from bimetal.engine.driver.grammar import Grammars
from bimetal.engine.driver.scheduler import Applied, MaskDue, Scheduler, SchedulerLimits
from bimetal.engine.driver.stages import FromStage, Stages, device_of
from bimetal.engine.wire.api import Abort, EngineStats, Generate, Loading, Output, Ready
from bimetal.engine.wire.control import AskStats, LoadStage, StageStats
from bimetal.engine.wire.frame import Kind
from bimetal.engine.wire.options import EngineOptions
from bimetal.engine.wire.step import Sampled, decode_sampled
from bimetal.errors import ConfigError, RequestError, StageError
from bimetal.plan import Stage, check_stages, parse_plan
from bimetal.policy.step_times import fit_step_time

_CPU_BLOCK_TOKENS = 16
_GPU_BLOCK_TOKENS = 64
_CPU_BATCHED_TOKENS = 256
_GPU_BATCHED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class Driver:
    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.plan = parse_plan(options.plan, "plan")
        if len(self.plan.replicas) != 1:
            raise ConfigError(
                f"the plan has {len(self.plan.replicas)} replicas: a driver runs one; start one for each"
            )
        self.replica = self.plan.replicas[0]
        self.spec: ModelSpec = load_model_spec(self.plan.model)
        check_stages(self.replica.stages, self.spec.num_layers, "plan")
        on_gpu = any(stage.gpu != "cpu" for stage in self.replica.stages)
        self.dtype = options.dtype or self.plan.dtype
        if self.dtype == "float8" == self.spec.weight_dtype:
            self.dtype = self.spec.dtype  # a plan names what weights are stored in
        self.max_num_seqs = options.max_num_seqs or self.plan.max_num_seqs
        self.max_model_len = options.max_model_len or min(self.plan.max_model_len, self.spec.max_position)
        self.block_tokens = options.block_tokens or (_GPU_BLOCK_TOKENS if on_gpu else _CPU_BLOCK_TOKENS)
        self.max_num_batched_tokens = options.max_num_batched_tokens or max(
            _GPU_BATCHED_TOKENS if on_gpu else _CPU_BATCHED_TOKENS, self.max_num_seqs
        )
        if self.max_model_len > self.spec.max_position:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but {self.spec.name} was trained for {self.spec.max_position} "
                "positions: lower --max-model-len"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs {self.max_num_seqs}: "
                "a step must hold one token of every running request"
            )
        self._events: queue.SimpleQueue[FromStage | Generate | Abort | _Stop] = queue.SimpleQueue()
        self._stages = Stages(self.replica, self._events, options.link)
        self._seeds = random.Random(options.seed)
        self._scheduler: Scheduler | None = None
        self._grammars: Grammars | None = None
        self.interrupted = False
        self._stage_stats: dict[int, StageStats] = {}
        self._stats_due = [0] * len(self.replica.stages)
        """Answers that each stage owes."""
        self._heard_at_s: float | None = None
        """When the last step came back, or the first of those in flight went out; None: nothing is in flight."""

    @property
    def scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "start() first"
        return self._scheduler

    @property
    def hop_s(self) -> float:
        """Measured at the start: what one boundary adds to a step of one row."""
        return self._stages.hop_s

    @property
    def decode_step_s(self) -> list[dict[int, float]]:
        """Of each stage by number of sequences, measured at the start."""
        return self._stages.decode_step_s

    # -- start and stop ---------------------------------------------------------------------------------------------

    def start(self, report: Callable[[Loading], None] = lambda _: None) -> Ready:
        num_blocks = self._stages.start(
            self._load_message, lambda stage, done, total: report(Loading(stage, done, total))
        )
        eos = read_eos_token_ids(Path(self.plan.model).expanduser(), self.spec.eos_token_ids)
        limits = SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_blocks=num_blocks,
            block_tokens=self.block_tokens,
            num_stages=len(self._stages),
            eos_token_ids=eos,
            enable_prefix_caching=self.options.enable_prefix_caching,
            revision=self._stages.loaded[0].fingerprint.get("weights", ""),
            num_micro_batches=self.options.num_micro_batches or self.replica.num_micro_batches,
        )
        times = [fit_step_time(table) for table in self._stages.decode_step_s]
        self._scheduler = Scheduler(limits, times, self._stages.hop_s, first_step=self._stages.first_step)
        self._grammars = Grammars(Path(self.plan.model).expanduser(), self.spec.vocab_size, eos)
        return Ready(
            model=self.spec.name,
            model_path=self.plan.model,
            vocab_size=self.spec.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            num_kv_blocks=num_blocks,
            kv_block_tokens=self.block_tokens,
            eos_token_ids=eos,
            stages=tuple(self._describe(i) for i in range(len(self._stages))),
        )

    def _load_message(self, index: int, stage: Stage) -> LoadStage:
        options = self.options
        return LoadStage(
            index=index,
            num_stages=len(self.replica.stages),
            model=stage.model_path or self.plan.model,
            start_layer=stage.start_layer,
            end_layer=stage.end_layer,
            device=device_of(stage),
            dtype=self.dtype,
            load_format=options.load_format,
            seed=options.seed,
            block_tokens=self.block_tokens,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            gpu_memory_utilization=options.gpu_memory_utilization,
            kv_cache_bytes=options.kv_cache_bytes,
            enforce_eager=options.enforce_eager,
            num_threads=stage.num_threads,
            kernels=options.kernels,
        )

    def _describe(self, index: int) -> dict[str, object]:
        stage, loaded = self.replica.stages[index], self._stages.loaded[index]
        return {
            "node": stage.node,
            "gpu": stage.gpu,
            "start_layer": stage.start_layer,
            "end_layer": stage.end_layer,
            "weight_bytes": loaded.weight_bytes,
            "load_s": loaded.load_s,
            "device": loaded.device,
            "decode_step_s": {str(n): s for n, s in self._stages.decode_step_s[index].items()},
            "hop_s": self._stages.hop_s,
        }

    def stop(self) -> None:
        self._stages.stop()

    # -- requests, from any thread ----------------------------------------------------------------------------------

    def submit(self, request: Generate) -> None:
        self._events.put(request)

    def abort(self, request_ids: tuple[str, ...]) -> None:
        self._events.put(Abort(request_ids))

    def interrupt(self) -> None:
        """Make `poll` return None, or a `start` under way raise StageError; from any thread."""
        self.interrupted = True
        self._events.put(_Stop())
        if self._scheduler is None:
            self._stages.cancel_start()

    # -- the loop ---------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float | None = None) -> list[Output] | None:
        """Wait for the next event, take in all that are there, keep the stages fed. None: interrupted.

        StageError if a stage is gone: requests in flight are lost unless the caller submits them again.
        """
        outputs: list[Output] = []
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            self._take(self.scheduler.expire(time.monotonic()), outputs)
            self._check_progress()
            return outputs
        while True:
            if isinstance(event, _Stop):
                return None
            self._handle(event, outputs)
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
        self._take(self.scheduler.expire(time.monotonic()), outputs)
        self._issue()
        self._check_progress()
        return outputs

    def _check_progress(self) -> None:
        """StageError if steps are due and none has come back for too long: a stage that hangs closes no connection."""
        outstanding, now_s = self.scheduler.outstanding, time.monotonic()
        if not outstanding:
            self._heard_at_s = None
        elif self._heard_at_s is None:
            self._heard_at_s = now_s
        elif now_s - self._heard_at_s > self.options.step_timeout_s:
            nodes = ", ".join(stage.node for stage in self.replica.stages)
            raise StageError(
                f"step {next(iter(outstanding))} did not come back within {self.options.step_timeout_s:g} s: a stage hangs "
                f"(nodes {nodes}): look at its device there; where steps may take that long, raise --step-timeout-s"
            )

    def _handle(self, event: FromStage | Generate | Abort, outputs: list[Output]) -> None:
        if isinstance(event, FromStage):
            self._stages.check(event)
            assert event.header is not None
            if event.header.kind is Kind.SAMPLED and event.header.epoch == self._stages.epoch:
                sampled = decode_sampled(event.payload) if event.header.num_bytes else None
                self._heard_at_s = time.monotonic()
                self._apply(event.header.step, sampled, outputs)
                self._issue()
            elif event.header.kind is Kind.STATS:
                self._stats_due[event.index] -= 1
                if not self._stats_due[event.index]:
                    self._stage_stats[event.index] = self._stages.read_stats(event)
        elif isinstance(event, Generate):
            self._add(event, outputs)
        else:
            self._take(self.scheduler.abort(event.request_ids), outputs)

    def _add(self, request: Generate, outputs: list[Output]) -> None:
        try:
            if request.sampling.seed is None:
                seed = self._seeds.getrandbits(63)
            else:
                seed = request.sampling.seed % 2**63
            assert self._grammars is not None
            grammar = request.sampling.grammar
            matcher = self._grammars.matcher(grammar) if grammar is not None else None
            self.scheduler.add(request, seed, matcher, time.monotonic())
        except RequestError as error:
            outputs.append(Output(request.request_id, finish_reason="error", message=str(error)))

    def _apply(self, number: int, sampled: Sampled | None, outputs: list[Output]) -> None:
        if number in self.scheduler.outstanding:
            self._take(self.scheduler.apply(number, sampled), outputs)

    def _take(self, applied: Applied, outputs: list[Output]) -> None:
        outputs += applied.outputs
        for due in applied.masks:
            self._send_mask(due)

    def _send_mask(self, due: MaskDue) -> None:
        self._stages.send_mask(due.step, due.row, due.sequence.matcher.mask())

    def _issue(self) -> None:
        scheduler = self.scheduler
        while (issued := scheduler.schedule()) is not None:
            self._stages.send_step(issued.number, issued.step)
            for due in scheduler.masks_ready(issued):
                self._send_mask(due)

    # -- statistics -------------------------------------------------------------------------------------------------

    def ask_stage_stats(self, ask: AskStats | None = None) -> None:
        """Stages answer with what they did since they were last asked, and watch what `ask` names. Of several questions
        only the last one's answers count."""
        self._stage_stats.clear()
        self._stats_due = [due + 1 for due in self._stats_due]
        self._stages.ask_stats(ask or AskStats())

    @property
    def stage_stats(self) -> list[StageStats] | None:
        """The answers, once all are there."""
        if len(self._stage_stats) < len(self._stages):
            return None
        return [self._stage_stats[i] for i in range(len(self._stages))]

    def stats(self, stage_busy_ratio: tuple[float, ...] = ()) -> EngineStats:
        scheduler = self.scheduler
        counters = scheduler.counters
        return EngineStats(
            num_running=scheduler.table.num_running,
            num_waiting=len(scheduler.waiting),
            kv_used_ratio=scheduler.pool.used_ratio,
            num_preemptions=counters.num_preemptions,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prefix_query_tokens=counters.prefix_query_tokens,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            num_steps=counters.num_steps,
            num_micro_batches=scheduler.num_micro_batches,
            stage_busy_ratio=stage_busy_ratio,
        )
