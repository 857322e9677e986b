"""Traces as rates and moments, and traces that are wrong."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from bimetal.catalog.demand import load_demand, parse_demand
from bimetal.errors import ConfigError
from bimetal.planner.traffic import busiest_hour, read_traffic
from bimetal.simulate.trace import Trace

EXAMPLE = Path(__file__).parents[2] / "examples" / "plans" / "azure-70b.yaml"
TEXT = """\
stock: [{gpu: H100, count: 8}]
models: [{name: Llama-3.1-8B}]
demand: [{name: chat, kind: interactive, model: Llama-3.1-8B, trace: t.csv, ttft_p99_s: 1, tpot_p99_s: 0.1}]
"""


def trace(tmp_path, lines, header="TIMESTAMP,ContextTokens,GeneratedTokens"):
    (tmp_path / "t.csv").write_text("\n".join([header, *lines]) + "\n")
    return read_traffic(parse_demand(TEXT, "d.yaml"), tmp_path)


def test_azures_hour_twenty_times_as_fast():
    (chat,) = read_traffic(load_demand(EXAMPLE), EXAMPLE.parent)
    assert len(chat.trace) == 19366
    assert chat.rate_per_s == pytest.approx(19365 / (3501.7 / 20), rel=1e-3)
    assert chat.peak_input_ratio > chat.peak_output_ratio > 1
    assert chat.context_tokens > chat.input_tokens  # long answers are seen longer


def test_moments_of_a_small_trace(tmp_path):
    (chat,) = trace(tmp_path, ["0,100,10", "1,300,30"])
    assert (chat.rate_per_s, chat.input_tokens, chat.output_tokens) == (1.0, 200.0, 20.0)
    assert chat.input_cv2 == pytest.approx(0.25)
    assert chat.context_tokens == pytest.approx((100 * 10 + 300 * 30) / 40 + (100 + 900) / 2 / 40)


def test_the_peak_hour_not_the_mean():
    arrivals = np.sort(np.concatenate([np.linspace(0, 36000, 100), np.linspace(18000, 19800, 900)]))
    hour = busiest_hour(Trace(arrivals, np.ones(1000, np.int64), np.ones(1000, np.int64)))
    assert 900 <= len(hour) <= 915
    assert hour.arrival_s[0] == 0
    assert hour.arrival_s[-1] <= 3600


def test_batch_work_is_spread_over_its_time_whatever_its_trace_says(tmp_path):
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "5,100,10\n" * 99 + "6,1,1\n"
    )
    text = TEXT.replace("interactive", "batch").replace("ttft_p99_s: 1, tpot_p99_s: 0.1", "deadline_h: 2")
    (batch,) = read_traffic(parse_demand(text, "d.yaml"), tmp_path)
    assert batch.rate_per_s == pytest.approx(100 / 7200)
    gaps = np.diff(batch.trace.arrival_s)
    assert gaps == pytest.approx(1 / batch.rate_per_s)


@pytest.mark.parametrize("number", [1, 50])
def test_batch_work_may_be_asked_for_all_at_once(tmp_path, number):
    """Its rate is that of its deadline."""
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "5,100,10\n" * number)
    text = TEXT.replace("interactive", "batch").replace("ttft_p99_s: 1, tpot_p99_s: 0.1", "deadline_h: 2")
    (batch,) = read_traffic(parse_demand(text, "d.yaml"), tmp_path)
    assert batch.rate_per_s == pytest.approx(number / 7200)
    assert len(batch.trace) == number


def test_a_trace_too_long_for_the_model_says_so(tmp_path):
    with pytest.raises(
        ConfigError, match=r"50.0% of the requests are longer.* 131072 positions of Llama-3.1-8B"
    ):
        trace(tmp_path, ["0,100,10", "1,900000,30"])


def test_a_packed_trace_reads_the_same(tmp_path):
    (plain,) = trace(tmp_path, ["0,100,10", "1,300,30"])
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress((tmp_path / "t.csv").read_bytes()))
    (packed,) = read_traffic(parse_demand(TEXT.replace("t.csv", "t.csv.gz"), "d.yaml"), tmp_path)
    assert packed.rate_per_s == plain.rate_per_s


@pytest.mark.parametrize(
    ("lines", "header", "match"),
    [
        (
            ["0,1,1", "5,1,1", "4,1,1"],
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "t.csv:4: TIMESTAMP '4' is earlier",
        ),
        (["0,1", "5,1"], "TIMESTAMP,ContextTokens", "has the columns TIMESTAMP, ContextTokens, but needs"),
        (
            ["0,1,-3", "1,1,1"],
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "t.csv:2: GeneratedTokens '-3' must be between",
        ),
        (["0,5,5"], "TIMESTAMP,ContextTokens,GeneratedTokens", "give no rate"),
    ],
)
def test_a_wrong_trace_says_where(tmp_path, lines, header, match):
    with pytest.raises(ConfigError, match=match):
        trace(tmp_path, lines, header)


def test_a_missing_trace(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_traffic(parse_demand(TEXT, "d.yaml"), tmp_path)
