"""What /metrics shows, in Prometheus' text format: names start with bimetal_ and end with their unit.

Counts and histograms of requests are kept here; the engine's gauges are read from its last report when scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bimetal.engine.wire.api import EngineStats

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60, 120)
_TPOT_BUCKETS_S = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 0.8, 2)
_E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine as the gateway sees it at one moment."""

    num_running: int
    num_waiting: int
    ready: bool
    stats: EngineStats | None


class Metrics:
    def __init__(self, view: Callable[[], EngineView]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(view))
        self.http_requests = Counter(
            "bimetal_http_requests",
            "HTTP requests answered, by endpoint and status.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.finished = Counter(
            "bimetal_sequences_finished",
            "Sequences that ended, by reason: stop, length, abort, deadline, error.",
            ["reason"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "bimetal_prompt_tokens", "Prompt tokens of answered requests.", registry=self.registry
        )
        self.cached_tokens = Counter(
            "bimetal_prompt_cached_tokens",
            "Prompt tokens whose KV cache was found, not computed.",
            registry=self.registry,
        )
        self.output_tokens = Counter("bimetal_output_tokens", "Tokens generated.", registry=self.registry)
        self.ttft = Histogram(
            "bimetal_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.tpot = Histogram(
            "bimetal_time_per_output_token_seconds",
            "Of one sequence: (last token - first token) / (output tokens - 1).",
            buckets=_TPOT_BUCKETS_S,
            registry=self.registry,
        )
        self.itl = Histogram(
            "bimetal_inter_token_latency_seconds",
            "One gap between two outputs of a sequence.",
            buckets=_TPOT_BUCKETS_S,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "bimetal_request_duration_seconds",
            "From a request's arrival to the end of its answer.",
            buckets=_E2E_BUCKETS_S,
            registry=self.registry,
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, view: Callable[[], EngineView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield _gauge("bimetal_ready", "1 once every stage serves.", float(view.ready))
        yield _gauge("bimetal_sequences_running", "Sequences being computed.", view.num_running)
        yield _gauge("bimetal_sequences_waiting", "Sequences in the queue.", view.num_waiting)
        stats = view.stats
        if stats is None:
            return
        yield _gauge("bimetal_kv_cache_used_ratio", "Share of KV blocks in use.", stats.kv_used_ratio)
        yield _gauge(
            "bimetal_micro_batches", "Micro-batches in flight over the stages.", stats.num_micro_batches
        )
        yield _counter(
            "bimetal_prefix_cache_hit_tokens",
            "Prompt tokens found in the prefix cache.",
            stats.prefix_hit_tokens,
        )
        yield _counter(
            "bimetal_prefix_cache_query_tokens",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_query_tokens,
        )
        yield _counter(
            "bimetal_preemptions", "Sequences put back for lack of KV blocks.", stats.num_preemptions
        )
        yield _counter("bimetal_steps", "Steps of the engine.", stats.num_steps)
        busy = GaugeMetricFamily(
            "bimetal_stage_busy_ratio", "Share of the last second that a stage computed.", labels=["stage"]
        )
        for stage, ratio in enumerate(stats.stage_busy_ratio):
            busy.add_metric([str(stage)], ratio)
        yield busy


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
