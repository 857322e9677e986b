"""The coefficients that bimetal carries: they load, predict with intervals, and say what they rest on."""

from dataclasses import replace

import numpy as np
import pytest

from bimetal.catalog.hardware import find_gpu
from bimetal.catalog.planned_models import planned_model
from bimetal.errors import ConfigError, InfeasibleError
from bimetal.perf.calibration import (
    load_calibration,
    parse_calibration,
    published_calibration,
    save_calibration,
)
from bimetal.perf.estimate import estimate_serving
from bimetal.perf.hierarchy import PRIORS
from bimetal.perf.observations import Query
from bimetal.perf.point import BIMETAL, ServingPoint

POINT = ServingPoint(
    gpu=find_gpu("MI300X"),
    model=planned_model("Llama-3.1-70B"),
    engine="vllm-rocm",
    weight_format="float8",
    kv_bytes=1.0,
    tensor_parallel=8,
    input_tokens=128,
    output_tokens=2048,
    regime="static-batch",
    concurrency=16,
    setting="AMD-ROCm-vllm-docker",
    version="vLLM 0.8.5, ROCm 6.3.1",
)


def width(point):
    p = published_calibration().predict([Query(point, "tpot", includes_prefill=True)])[0]
    assert p.low < p.value < p.high
    return np.log(p.high / p.low)


def test_a_published_number_is_met():
    """AMD measured 10.31 ms for this very point."""
    p = published_calibration().predict([Query(POINT, "tpot", includes_prefill=True)])[0]
    assert p.value == pytest.approx(10.31e-3, rel=0.08)
    assert "measurements of MI300X" in p.rests_on


def test_intervals_widen_with_distance_from_what_was_measured():
    elsewhere = replace(POINT, setting="", version="")
    other_engine = replace(elsewhere, engine=BIMETAL)
    other_gpu = replace(other_engine, gpu=find_gpu("MI355X"))
    widths = [width(p) for p in (POINT, elsewhere, other_engine, other_gpu)]
    assert widths[0] < widths[1] < min(widths[2:])
    assert widths[-1] > 1.3 * widths[0]
    p = published_calibration().predict([Query(other_gpu, "tpot")])[0]
    assert "datasheet of MI355X" in p.rests_on


def test_plans_share_their_errors():
    """The same unknown engine on two GPUs: the ratio is surer than either."""
    calibration = published_calibration()
    points = [
        replace(POINT, engine=BIMETAL, setting="", version="", gpu=find_gpu(g)) for g in ("MI300X", "MI325X")
    ]

    def step(draw):
        from bimetal.perf.equations import decode_parts
        from bimetal.perf.work import count_work

        c = calibration.coefficients(points, draw)
        return np.log(decode_parts(count_work(points), c, np.full(2, 16.0), np.full(2, 1000.0)).step_s)

    logs = np.array([step(draw) for draw in range(len(calibration.draws))])
    assert (logs[:, 0] - logs[:, 1]).std() < 0.7 * logs[:, 0].std()
    assert np.array_equal(step(3), logs[3])  # a draw is the same for everyone who asks


def test_no_share_exceeds_one():
    calibration = published_calibration()
    points = [
        replace(POINT, gpu=find_gpu(g), engine=e)
        for g in ("B200", "H200", "A100")
        for e in ("vllm", "sglang")
    ]
    for draw in (None, 0, 1):
        for term, values in calibration.coefficients(points, draw).items():
            assert (values > 0).all()
            if PRIORS[term].is_share:
                assert (values < 1).all(), term


def test_the_files_survive_a_round_trip(tmp_path):
    calibration = published_calibration()
    save_calibration(calibration, tmp_path)
    again = load_calibration(tmp_path)
    queries = [Query(POINT, "tpot"), Query(replace(POINT, gpu=find_gpu("MI355X")), "rate")]
    for a, b in zip(calibration.predict(queries), again.predict(queries), strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-9)
        assert a.high == pytest.approx(b.high, rel=1e-6)


def test_broken_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="bimetal perf fit -o"):
        load_calibration(tmp_path)
    with pytest.raises(ConfigError, match="no coefficients file"):
        parse_calibration("{}", np.zeros((1, 1)), "x")
    with pytest.raises(ConfigError, match="no coefficients file"):
        parse_calibration("[", np.zeros((1, 1)), "x")
    with pytest.raises(ConfigError, match="of different fits"):
        parse_calibration(published_calibration().to_json(), np.zeros((4, 3)), "x")


def test_an_estimate_says_what_binds():
    closed = replace(POINT, regime="closed-loop")
    few = estimate_serving(
        replace(closed, concurrency=1, model=planned_model("Llama-3.1-405B")), published_calibration()
    )
    assert sum(few.shares.values()) == pytest.approx(1)
    long = estimate_serving(
        replace(closed, concurrency=64, input_tokens=60000, output_tokens=4000), published_calibration()
    )
    assert long.binds in ("kv cache", "prefill of others")
    assert few.binds in ("weights", "overhead")
    assert few.tpot_s.value < long.tpot_s.value


def test_weights_that_do_not_fit_are_an_error():
    with pytest.raises(InfeasibleError, match=r"Llama-3\.1-405B weighs .* raise tensor parallelism"):
        estimate_serving(
            replace(POINT, model=planned_model("Llama-3.1-405B"), tensor_parallel=1), published_calibration()
        )
