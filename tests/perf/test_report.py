"""The report's numbers are those of the rows that it is given."""

import pytest

from bimetal.perf.calibration import published_calibration
from bimetal.perf.measurements import MeasurementSet, Refusal
from bimetal.perf.report import accuracy_report
from bimetal.perf.scores import Scored, by, summarise


def scored(measured, predicted, target="tpot", gpu="MI300X", model="M", width=0.1):
    return Scored(
        row="1",
        target=target,
        gpu=gpu,
        vendor="AMD",
        model=model,
        engine="vllm-rocm",
        regime="closed-loop",
        shape="float8 tp8 1/1",
        measured=measured,
        predicted=predicted,
        low=predicted * (1 - width),
        high=predicted * (1 + width),
    )


def test_summaries():
    rows = [scored(1.0, 1.1), scored(1.0, 0.8), scored(1.0, 1.02)]
    s = summarise(rows)
    assert (s.num, s.median_error_ratio) == (3, pytest.approx(0.1))
    assert s.mean_error_ratio == pytest.approx(0.32 / 3)
    assert s.bias_ratio == pytest.approx(0.02)
    assert s.coverage_ratio == pytest.approx(2 / 3)
    assert s.median_width_ratio == pytest.approx(0.2)
    assert {k: len(v) for k, v in by(rows, lambda r: r.predicted > 1).items()} == {True: 2, False: 1}


def test_the_report_has_every_section_and_the_worst_first():
    shape = [scored(1, 1.05)] * 40 + [scored(1, 2.0, gpu="H100")] * 2
    shape += [scored(1, 1.2, target="ttft"), scored(100, 104, target="rate")]
    gpu = [scored(1, 1.3)] * 30 + [scored(1, 1.1, gpu="H100")] * 30 + [scored(1, 9, gpu="rare")]
    rows = MeasurementSet((), (Refusal("1", "g", "m", "e", "too odd"),), 7)
    text = accuracy_report(rows, published_calibration(), shape, shape, gpu, [scored(1, 1.4, model="D")])
    assert "**20.0%**" in text  # macro-average over the two GPUs with enough rows
    assert "1 x too odd" in text
    assert "7 repeat another row" in text
    tpot = text.split("## Time per output token")[1].split("##")[0]
    assert tpot.index("| H100 |") < tpot.index("| MI300X |") < tpot.index("**all**")
    assert "| tpot, MI300X | 1 | 40.0%" in text
    assert text.index("+100%") < text.index("+5%")
