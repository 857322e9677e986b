"""The engine's own scheduler on modelled step times: what the simulator, which decides round by round, is held to.

Steps go through the stages one by one, each stage runs them in order, and nothing is approximated but the step times.
"""

from __future__ import annotations

import heapq

import numpy as np

from bimetal.engine.driver.scheduler import Issued, Scheduler, SchedulerLimits
from bimetal.engine.wire.api import Generate, SamplingParams
from bimetal.engine.wire.step import Sampled
from bimetal.simulate.pipeline import measured_step_time
from bimetal.simulate.shapes import ReplicaShape
from bimetal.simulate.trace import Trace

BLOCK_TOKENS = 16


def _times_s(shape: ReplicaShape, issued: Issued) -> list[float]:
    """Of each stage."""
    step = issued.step
    sizes = np.diff(step.query_starts)
    is_decode = np.arange(len(sizes)) < step.num_decodes
    contexts = step.context_lens[: len(sizes)]
    decode_context = float(contexts[is_decode].sum())
    chunks, ends = sizes[~is_decode], contexts[~is_decode]
    pairs = float((chunks * (ends - chunks / 2)).sum())
    num_prompts = step.num_logit_rows - step.num_decodes
    return [
        clock.step_s(step.num_decodes, decode_context, float(chunks.sum()), pairs, max(num_prompts, 0))
        for clock in shape.clocks
    ]


def run_dry(trace: Trace, shape: ReplicaShape) -> tuple[np.ndarray, np.ndarray]:
    """(first token, done) in seconds of the trace, request by request."""
    num_stages = len(shape.clocks)
    hop_s = shape.hop_latency_s / num_stages if num_stages > 1 else 0.0
    limits = SchedulerLimits(
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        max_model_len=int((trace.input_tokens + trace.output_tokens).max()) + 1,
        num_blocks=shape.kv_tokens // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        num_stages=num_stages,
        enable_prefix_caching=False,
    )
    stage_times = [measured_step_time(clock, shape.max_num_seqs) for clock in shape.clocks]
    scheduler = Scheduler(limits, stage_times, hop_s)
    first, done = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
    free_s = [0.0] * num_stages
    ids_at_s: dict[int, float] = {}
    events: list[tuple[float, int, int, int]] = [
        (float(at), 0, i, 0) for i, at in enumerate(trace.arrival_s)
    ]  # (when, kind, which, rows)
    heapq.heapify(events)
    while events:
        now, kind, which, rows = heapq.heappop(events)
        if kind == 0:
            sampling = SamplingParams(
                max_tokens=int(trace.output_tokens[which]), temperature=0.0, ignore_eos=True
            )
            scheduler.add(Generate(str(which), (1,) * int(trace.input_tokens[which]), sampling), 0)
        else:
            sampled = Sampled(np.zeros(rows, np.int32), None, None, None, None) if rows else None
            for output in scheduler.apply(which, sampled).outputs:
                i = int(output.request_id)
                first[i] = now if np.isnan(first[i]) else first[i]
                done[i] = now
        if events and events[0][0] == now:
            continue  # the driver takes in all that is there before it issues
        while (issued := scheduler.schedule()) is not None:
            at_s = now
            if issued.step.ids_lag and num_stages > 1:
                at_s = max(at_s, ids_at_s[issued.number - issued.step.ids_lag])
            for i, step_s in enumerate(_times_s(shape, issued)):
                if i:
                    at_s += hop_s + issued.step.num_tokens * shape.hop_token_s / (num_stages - 1)
                at_s = free_s[i] = max(at_s, free_s[i]) + step_s
            ids_at_s[issued.number] = at_s + hop_s
            heapq.heappush(events, (at_s, 1, issued.number, issued.step.num_logit_rows))
    return first, done
