"""`Measurement`: a published row as a serving point with what was measured, or the reason why it cannot be used.

Owns the columns of measured.csv, the names that publishers give to GPUs, models, engines and loads, and every value that
had to be filled in, each with its reason. Does not know how a time is predicted.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np

from bimetal.catalog.hardware import GpuSpec, find_gpu
from bimetal.catalog.models import ModelSpec
from bimetal.catalog.planned_models import planned_model
from bimetal.errors import ConfigError
from bimetal.perf.equations import places
from bimetal.perf.point import Regime, ServingPoint, WeightFormat
from bimetal.perf.work import count_work
from bimetal.units import MS_PER_S

REQUIRED = ("gpu", "model", "isl", "osl", "load", "engine")
GROUP_KEY = "gpu, model, weight format, tensor parallelism, lengths"

_MODELS = {
    "llama-3.x-70b": "Llama-3.1-70B",
    "llama-2-70b": "Llama-2-70B",
    "llama-2-7b": "Llama-2-7B",
    "deepseek-r1": "DeepSeek-R1",
}
_ENGINES = {
    "trtllm": "tensorrt-llm",
    "tensorrt-llm": "tensorrt-llm",
    "vllm": "vllm",
    "vllm (rocm fork)": "vllm-rocm",
    "vllm (early 2024)": "vllm-2024",
    "sglang": "sglang",
    "sglang+nixl": "sglang",
}
_FORMATS: dict[str, WeightFormat] = {
    "fp16": "bfloat16",
    "bf16": "bfloat16",
    "fp8": "float8",
    "fp4": "float4",
    "mxfp4": "mxfp4",
}
_REGIMES: dict[str, Regime] = {
    "closed-loop": "closed-loop",
    "pd-disagg": "closed-loop",
    "static-batch": "static-batch",
    "bs1": "static-batch",
    "offline": "offline",
    "mlperf-offline": "offline",
    "max-throughput": "offline",
    "mlperf-server": "server",
    "poisson": "server",
    "mlperf-interactive": "interactive",
}
_MEAN_INPUT_TOKENS = {
    "openorca/": 400.0,
    "openorca": 294.0,
    "longbench": 9428.0,
    "mlperf long": 9428.0,
    "cnn": 778.0,
}
"""Mean prompt of the MLPerf data sets, where the file gives a name instead of a length."""
_TAGGED_RANKS = re.compile(r"_tp(\d+)(?:_0)?_ep(\d+)")
_LARGEST_NODE = 8
MOST_GPUS = 100_000
_UNIFORM_MEAN_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times in seconds; None: not measured."""

    row: str
    point: ServingPoint
    num_gpus: int
    tpot_s: float | None
    ttft_s: float | None
    output_tokens_per_s: float | None
    """Of all GPUs of the row."""
    tpot_includes_prefill: bool
    throughput_is_derived: bool
    disaggregated: bool
    power_capped: bool
    filled_in: tuple[str, ...]
    """What the row does not say and why it was taken to be so."""

    @property
    def group(self) -> tuple[object, ...]:
        """Rows of one group are left out together: the same shape under any engine and version."""
        p = self.point
        return (
            *(p.gpu.name, p.model.name, p.weight_format, p.tensor_parallel),
            *(p.input_tokens, p.output_tokens),
        )

    @property
    def replicas(self) -> float:
        return max(1.0, self.num_gpus / self.point.tensor_parallel)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that is not used, and why."""

    row: str
    gpu: str
    model: str
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class MeasurementSet:
    """A file, sorted out."""

    measurements: tuple[Measurement, ...]
    refusals: tuple[Refusal, ...]
    num_duplicates: int


def published() -> MeasurementSet:
    """The rows that bimetal carries."""
    return parse_rows(csv.DictReader(_published_lines()))


def _published_lines() -> list[str]:
    text = (resources.files("bimetal.catalog") / "data" / "measured.csv").read_text(encoding="utf-8")
    return text.splitlines()


def read_measurements(path: Path) -> MeasurementSet:
    """A CSV file with the columns of measured.csv; ConfigError names what is missing."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give a CSV file of measurements") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not text (byte {error.start}): give a CSV file of measurements"
        ) from error
    reader = csv.DictReader(lines)
    missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"{path}: lacks the column(s) {', '.join(missing)}: use the columns of measured.csv"
        )
    _check_spelling(path, reader.fieldnames or ())
    return parse_rows({name: value or "" for name, value in row.items() if name} for row in reader)


def _check_spelling(path: Path, names: Sequence[str]) -> None:
    """Columns of the user's own are left alone; one that is nearly a known one is a mistake that would go unseen."""
    known = next(csv.reader(_published_lines()))
    for name in names:
        near = [] if name in known else difflib.get_close_matches(name, set(known) - set(names), 1, 0.7)
        if near:
            raise ConfigError(
                f"{path}: column {name!r} is not known: did you mean {near[0]}? One of your own needs another name"
            )


def parse_rows(rows: Iterable[Mapping[str, str]]) -> MeasurementSet:
    """Every measurement once: rows that differ only in where they were found are duplicates."""
    measurements, refusals = [], []
    seen: set[tuple[object, ...]] = set()
    duplicates = 0
    for number, row in enumerate(rows, start=1):
        name = row.get("row_id") or f"#{number}"
        try:
            m = _parse(name, row)
        except (ConfigError, ValueError) as error:
            refusals.append(
                Refusal(
                    name, row.get("gpu") or "", row.get("model") or "", row.get("engine") or "", str(error)
                )
            )
            continue
        content = (*m.group, m.point.engine, m.point.concurrency, row["load"], m.tpot_s, m.ttft_s)
        content = (*content, m.output_tokens_per_s, m.power_capped)
        if content in seen:
            duplicates += 1
            continue
        seen.add(content)
        if "exactly 2x" in (row.get("notes") or ""):
            refusals.append(
                Refusal(
                    name,
                    row["gpu"],
                    row["model"],
                    row["engine"],
                    "a multiple of another row, not a measurement",
                )
            )
            continue
        if m.tpot_s is not None and m.tpot_s < least_tpot_s(m.point):
            reason = "faster than its weights and 8-bit cache can be read at the datasheet's bandwidth"
            refusals.append(Refusal(name, row["gpu"], row["model"], row["engine"], reason))
            continue
        measurements.append(m)
    return MeasurementSet(tuple(measurements), tuple(refusals), duplicates)


def _parse(name: str, row: Mapping[str, str]) -> Measurement:
    filled: list[str] = []
    load = row["load"] or ""
    notes = row.get("notes") or ""
    gpu = _gpu(row["gpu"])
    model = _model(row.get("model_canonical") or row["model"])
    tensor_parallel, num_gpus = _ranks(row, gpu, model, filled)
    weight_format = _format(row, model, filled)
    regime = _regime(load)
    concurrency = _number(row, "concurrency_or_batch")
    if regime in ("closed-loop", "static-batch") and not concurrency:
        raise ConfigError("closed loop or batch without its concurrency")
    tpot = _number(row, "tpot_ms_p50") or _number(row, "tpot_ms_mean")
    ttft = _number(row, "ttft_ms_p50") or _number(row, "ttft_ms_mean")
    output_tokens_per_s = _number(row, "out_tok_s") or None
    includes_prefill = "incl. prefill" in notes
    length_ratio = _UNIFORM_MEAN_RATIO if "U[0.8,1.0]" in load else 1.0
    output_tokens = _positive(row, "osl") * length_ratio
    if tpot is None and regime == "static-batch" and (end_to_end := _number(row, "e2e_s")):
        tpot, includes_prefill = end_to_end / output_tokens * MS_PER_S, True
    if tpot is None and ttft is None and output_tokens_per_s is None:
        raise ConfigError("nothing measured that can be predicted: no TPOT, TTFT or output tok/s")
    engine = _engine(row["engine"] or "", gpu)
    point = ServingPoint(
        gpu=gpu,
        model=model,
        engine=engine,
        weight_format=weight_format,
        kv_bytes=_kv_bytes(row, engine, weight_format, filled),
        tensor_parallel=tensor_parallel,
        input_tokens=_input_tokens(row["isl"], filled) * length_ratio,
        output_tokens=output_tokens,
        regime=regime,
        concurrency=concurrency,
        max_num_seqs=_max_num_seqs(engine, row.get("source_group") or "", filled),
        arrivals_per_s=_number(row, "qps") if load.startswith("poisson") else None,
        setting=row.get("source_group") or "",
        version=_version(row, notes),
    )
    return Measurement(
        row=name,
        point=point,
        num_gpus=num_gpus,
        tpot_s=tpot / MS_PER_S if tpot else None,
        ttft_s=ttft / MS_PER_S if ttft else None,
        output_tokens_per_s=output_tokens_per_s,
        tpot_includes_prefill=includes_prefill,
        throughput_is_derived="derived" in notes.lower() or "decode only" in notes,
        disaggregated="PD-disagg" in load,
        power_capped="power-capped" in row["gpu"],
        filled_in=tuple(filled),
    )


def _gpu(name: str) -> GpuSpec:
    return find_gpu(name.split("(")[0].strip())


def _model(name: str) -> ModelSpec:
    return planned_model(_MODELS.get(name.lower(), name))


def _engine(name: str, gpu: GpuSpec) -> str:
    family = _ENGINES.get(name.strip().lower())
    if family is None:
        raise ConfigError(f"engine {name or 'not given'!r} is not known: use one of {', '.join(_ENGINES)}")
    return f"{family}-rocm" if gpu.vendor == "AMD" and not family.endswith("rocm") else family


def _version(row: Mapping[str, str], notes: str) -> str:
    """An MLPerf round is one version: its entries are tuned alike. Meta's own FP8 checkpoint is slow on some engines."""
    setting, version = row.get("source_group") or "", row.get("engine_version") or ""
    return ("" if setting.startswith("MLPerf") else version) + (" meta" if "FP8-meta" in notes else "")


def _regime(load: str) -> Regime:
    text = load.lower()
    for beginning, regime in _REGIMES.items():
        if text.startswith(beginning):
            return regime
    raise ConfigError(f"load {load!r} is not one that is modelled: use one of {', '.join(_REGIMES)}")


def _format(row: Mapping[str, str], model: ModelSpec, filled: list[str]) -> WeightFormat:
    given = (row.get("weight_dtype") or "").lower()
    if model.family == "gpt_oss":
        if given != "mxfp4":
            filled.append("gpt-oss is published in mxfp4 only, whatever the row calls it")
        return "mxfp4"
    if not given:
        for tag in ("fp8", "fp4"):
            if tag in row["model"].lower():
                filled.append(f"no dtype: the checkpoint's name says {tag}")
                return _FORMATS[tag]
        filled.append("no dtype: the checkpoint of that name holds 16-bit weights")
        return "bfloat16"
    if given not in _FORMATS:
        raise ConfigError(f"weight_dtype {given!r} is not known: use one of {', '.join(_FORMATS)}")
    return "float4" if given == "mxfp4" else _FORMATS[given]


def _kv_bytes(row: Mapping[str, str], engine: str, weights: WeightFormat, filled: list[str]) -> float:
    given = (row.get("kv_dtype") or "").lower()
    if given:
        return 1.0 if "8" in given else 2.0
    narrow = engine == "tensorrt-llm" and weights in ("float8", "float4")
    filled.append(f"no kv_dtype: {engine} caches {8 if narrow else 16} bits with such weights by default")
    return 1.0 if narrow else 2.0


def _max_num_seqs(engine: str, setting: str, filled: list[str]) -> float:
    """The engine's own limit on sequences decoded together, unless who measured raised it."""
    if engine.startswith("vllm") and setting in ("dstack", "Oracle-OCI", "GPUStack-lab", "GitHub-issues"):
        filled.append("vllm decodes at most 256 sequences together by default")
        return 256.0
    if engine == "tensorrt-llm" and not setting.startswith("MLPerf"):
        filled.append("tensorrt-llm decodes at most 2,048 sequences together by default")
        return 2048.0
    return 4096.0


def _ranks(row: Mapping[str, str], gpu: GpuSpec, model: ModelSpec, filled: list[str]) -> tuple[int, int]:
    """(tensor parallel, GPUs). A source's tag `tp4_ep4` names four GPUs, where some rows multiplied the two."""
    num_gpus = _whole(row, "n_gpus") or 1
    tagged = _TAGGED_RANKS.search(row.get("source") or "")
    if tagged:
        ranks = int(tagged[1])
        if ranks != (_whole(row, "tp") or ranks):
            filled.append(f"the source's tag says {ranks} GPUs")
        return ranks, ranks
    given = _whole(row, "tp")
    if given:
        return given, num_gpus
    weights = model.num_params  # bytes at 8 bits
    ranks = 1
    while ranks < min(num_gpus, _LARGEST_NODE) and weights * 1.3 > ranks * gpu.memory_bytes:
        ranks *= 2
    filled.append(f"no tp: {ranks} is the fewest GPUs with room for 8-bit weights and a third more")
    return ranks, num_gpus


def _input_tokens(text: str, filled: list[str]) -> float:
    try:
        value = float(text)
    except ValueError:
        for name, mean in _MEAN_INPUT_TOKENS.items():
            if text.lower().startswith(name):
                filled.append(f"isl {text!r}: the data set's mean prompt has {mean:.0f} tokens")
                return mean
        raise ConfigError(f"isl {text!r} is neither a number nor a known data set") from None
    if not value > 0:
        raise ConfigError(f"isl {text!r} must be positive")
    return value


def _number(row: Mapping[str, str], column: str) -> float | None:
    text = (row.get(column) or "").strip()
    if not text or text.lower() == "nan":
        return None
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{column} {text!r} is not a number") from None
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{column} {text!r} must be finite and not negative")
    return value


def _whole(row: Mapping[str, str], column: str) -> int:
    """0: not given."""
    value = _number(row, column) or 0.0
    if value % 1 or value > MOST_GPUS:
        raise ConfigError(f"{column} {row[column]!r} must be a whole number of GPUs, at most {MOST_GPUS}")
    return int(value)


def _positive(row: Mapping[str, str], column: str) -> float:
    value = _number(row, column)
    if not value:
        raise ConfigError(f"{column} {row.get(column)!r} must be positive")
    return value


def least_tpot_s(point: ServingPoint) -> float:
    """No engine is faster: weights once, experts as if every second token chose what another did, an 8-bit cache."""
    n = point.concurrency or 1.0
    work = count_work([replace(point, kv_bytes=1.0, concurrency=n)])
    context = np.array([point.input_tokens + point.output_tokens / 2])
    resident = np.minimum(n, places(work, context))
    experts = work.expert_bytes * (1 - (1 - work.expert_chance) ** (1 + (resident - 1) / 2))
    cache = resident * (
        work.kv_full_bytes * context + work.kv_windowed_bytes * np.minimum(context, work.window)
    )
    return float(((work.dense_bytes + work.head_bytes + experts + cache) / work.bytes_per_s)[0])


def per_replica(m: Measurement) -> Measurement:
    """The same with the throughput of one replica."""
    if m.output_tokens_per_s is None:
        return m
    return replace(m, output_tokens_per_s=m.output_tokens_per_s / m.replicas)
