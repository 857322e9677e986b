"""`Traffic`: a class of requests as the planner sees it: rate, moments of its lengths, limits, and requests to replay.

Owns the reading of traces into those figures. Does not know who serves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bimetal.catalog.demand import Demand, DemandClass
from bimetal.errors import ConfigError
from bimetal.simulate.trace import Floats, Trace, load_trace, poisson_trace
from bimetal.units import S_PER_HOUR

SYNTHETIC_REQUESTS = 20_000
"""So many that their mean length is within a percent of what was asked for."""
MOST_TOO_LONG = 0.01
WINDOWS = 20
SHORT_QUANTILE = 0.05
"""Answers so short that one prompt of another request shows in their mean time per token."""


@dataclass(frozen=True)
class Traffic:
    """Tokens, seconds and requests per second of the peak hour (interactive) or of the time to the deadline (batch)."""

    name: str
    model: str
    rate_per_s: float
    input_tokens: float
    input_square: float
    """Mean of the squares: attention over a prompt grows with it, and queues with its spread."""
    input_p99_tokens: float
    output_tokens: float
    short_output_tokens: float
    context_tokens: float
    """Of a sequence that is being decoded, on average over time: long answers are seen longer."""
    peak_input_ratio: float
    """Prompt tokens per second in the busiest of `WINDOWS` equal parts of the trace, over their mean; 1 without a trace."""
    peak_output_ratio: float
    """The same of answers' tokens."""
    ttft_s: float
    """Limits of the 99th percentile; infinite for batch work."""
    tpot_s: float
    n_plus_one: bool
    trace: Trace
    """Requests to replay, in their own time."""
    from_trace: bool
    """Given by a file; otherwise independent arrivals, of which any stretch of time is like any other."""

    @property
    def input_cv2(self) -> float:
        """Squared coefficient of variation of prompts' lengths."""
        return self.input_square / self.input_tokens**2 - 1

    @property
    def is_batch(self) -> bool:
        return not np.isfinite(self.tpot_s)

    @property
    def output_tokens_per_s(self) -> float:
        return self.rate_per_s * self.output_tokens


def read_traffic(demand: Demand, folder: Path) -> tuple[Traffic, ...]:
    """Every class that sends requests; traces are looked for from `folder`."""
    found = []
    for i, entry in enumerate(demand.demand):
        if entry.kind != "fine-tuning":
            trace = _requests(entry, folder, demand.seed + i)
            if entry.trace is not None:
                _check_lengths(entry, demand, trace, folder / entry.trace)
            found.append(_traffic(entry, trace))
    return tuple(found)


def _check_lengths(entry: DemandClass, demand: Demand, trace: Trace, path: Path) -> None:
    """A few requests that are too long would be refused when served; a model that refuses more is the wrong one."""
    model = next(m for m in demand.models if m.name == entry.model).spec
    long = float(np.mean(trace.input_tokens + trace.output_tokens > model.max_position))
    if long > MOST_TOO_LONG:
        raise ConfigError(
            f"{path}: {long:.1%} of the requests are longer, with their answers, than the {model.max_position} positions of "
            f"{model.name}: take them out, or serve a model with more"
        )


def _requests(entry: DemandClass, folder: Path, seed: int) -> Trace:
    if entry.trace is not None:
        trace = load_trace(folder / entry.trace)
        if entry.kind == "batch":
            return evenly(trace, (entry.deadline_h or 1.0) * S_PER_HOUR)
        if trace.arrival_s[-1] <= 0:
            raise ConfigError(
                f"{folder / entry.trace}: {len(trace)} request(s) at one moment give no rate: give a longer trace"
            )
        return busiest_hour(trace.compressed(entry.compress))
    rate = entry.rate_per_s or (entry.requests or 0.0) / ((entry.deadline_h or 1.0) * S_PER_HOUR)
    return poisson_trace(
        SYNTHETIC_REQUESTS, rate, entry.input_tokens or 1.0, entry.output_tokens or 1.0, seed, entry.name
    )


def _traffic(entry: DemandClass, trace: Trace) -> Traffic:
    inputs, outputs = trace.input_tokens.astype(float), trace.output_tokens.astype(float)
    if entry.kind == "batch":
        number = len(trace) if entry.trace is not None else entry.requests or 0.0
        rate = number / ((entry.deadline_h or 1.0) * S_PER_HOUR)
    else:
        rate = entry.rate_per_s or (len(trace) - 1) / float(trace.arrival_s[-1])
    mean_output = float(outputs.mean())
    swings = entry.trace is not None and entry.kind == "interactive"
    return Traffic(
        name=entry.name,
        model=entry.model or "",
        rate_per_s=rate,
        input_tokens=float(inputs.mean()),
        input_square=float((inputs**2).mean()),
        input_p99_tokens=float(np.percentile(inputs, 99)),
        output_tokens=mean_output,
        short_output_tokens=max(2.0, float(np.quantile(outputs, SHORT_QUANTILE))),
        context_tokens=float((inputs * outputs).mean() + (outputs**2).mean() / 2) / mean_output,
        peak_input_ratio=_peak(trace, inputs) if swings else 1.0,
        peak_output_ratio=_peak(trace, outputs) if swings else 1.0,
        ttft_s=entry.ttft_p99_s or np.inf,
        tpot_s=entry.tpot_p99_s or np.inf,
        n_plus_one=entry.n_plus_one,
        trace=trace,
        from_trace=entry.trace is not None,
    )


def busiest_hour(trace: Trace) -> Trace:
    """The hour with the most requests, from its first; all of a shorter trace."""
    ends = np.searchsorted(trace.arrival_s, trace.arrival_s + S_PER_HOUR, side="right")
    start = int(np.argmax(ends - np.arange(len(trace))))
    chosen = slice(start, int(ends[start]))
    return Trace(
        trace.arrival_s[chosen] - trace.arrival_s[start],
        trace.input_tokens[chosen],
        trace.output_tokens[chosen],
    )


def evenly(trace: Trace, span_s: float) -> Trace:
    """The same requests at a constant rate over `span_s`: work with a deadline is spread, whenever it was asked for."""
    arrivals: Floats = np.arange(len(trace), dtype=np.float64) * (span_s / len(trace))
    return Trace(arrivals, trace.input_tokens, trace.output_tokens)


def _peak(trace: Trace, tokens: Floats) -> float:
    sums, _ = np.histogram(trace.arrival_s, bins=WINDOWS, weights=tokens)
    return max(1.0, float(sums.max() / sums.mean()))
