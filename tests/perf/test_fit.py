"""The fit recovers what made the data, borrows where it must, and never looks at what is held out."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("scipy")

from bimetal.catalog.hardware import find_gpu
from bimetal.catalog.planned_models import planned_model
from bimetal.perf.crossval import Held, gpu_folds, hold_out, shape_folds
from bimetal.perf.fit import FitProblem
from bimetal.perf.intervals import doubt_of, interval_scale, to_scored
from bimetal.perf.measurements import Measurement
from bimetal.perf.observations import Observation, Predictor, Query
from bimetal.perf.point import ServingPoint
from bimetal.perf.study import to_calibration


def point(gpu="H100", model="Llama-3.1-70B", ranks=2, inputs=1000.0, outputs=500.0, c=8.0):
    return ServingPoint(
        gpu=find_gpu(gpu),
        model=planned_model(model),
        engine="vllm",
        weight_format="float8",
        kv_bytes=2.0,
        tensor_parallel=ranks,
        input_tokens=inputs,
        output_tokens=outputs,
        regime="closed-loop",
        concurrency=c,
        setting="here",
    )


def measurement(p):
    return Measurement("1", p, p.tensor_parallel, None, None, None, False, False, False, False, ())


@pytest.fixture(scope="module")
def problem():
    """Numbers made by the equations with known effects and 3% noise."""
    points = [
        point(g, m, t, i, o, c)
        for g in ("H100", "H200", "MI300X")
        for m in ("Llama-3.1-70B", "Llama-3.1-8B")
        for t in (2, 4)
        for i, o in ((1000.0, 500.0), (4000.0, 500.0), (500.0, 2000.0))
        for c in (1.0, 8.0, 64.0)
    ]
    queries = [Query(p, t) for p in points for t in ("tpot", "ttft")]
    blank = FitProblem([Observation(measurement(q.point), q, 1.0) for q in queries])
    rng = np.random.default_rng(7)
    truth = blank.design.prior_means + rng.normal(0, 0.2, len(blank.design.effects))
    values = np.exp(Predictor(queries).log_predict(blank.sums(truth)) + rng.normal(0, 0.03, len(queries)))
    made = FitProblem(
        [Observation(measurement(q.point), q, float(v)) for q, v in zip(queries, values, strict=True)]
    )
    return made, made.fit(rounds=3)


def test_the_noise_is_found(problem):
    made, fit = problem
    errors = np.exp(made.predict(fit.effects) - made.log_values) - 1
    assert np.median(np.abs(errors[made.targets == "tpot"])) < 0.03
    assert 0.01 < fit.noise["tpot"] < 0.05


def test_shapes_left_out_are_predicted_and_covered(problem):
    made, fit = problem
    held = hold_out(made, shape_folds(made, 6), fit)
    assert len(held) == len(made.observations)
    tpot = [h for h in held if h.observation.query.target == "tpot"]
    assert np.median([abs(h.error_ratio) for h in tpot]) < 0.06
    scored = to_scored(held, interval_scale(held))
    assert np.mean([s.is_covered for s in scored]) == pytest.approx(0.9, abs=0.03)


def test_what_is_held_out_does_not_reach_its_own_prediction(problem):
    """Ruining one GPU's numbers changes nothing of what is predicted for it without them."""
    made, fit = problem
    folds = gpu_folds(made, least_rows=1)
    h100 = [o.query.point.gpu.name.startswith("H100") for o in made.observations]
    ruined = FitProblem(
        [
            replace(o, value=o.value * 5) if is_h100 else o
            for o, is_h100 in zip(made.observations, h100, strict=True)
        ]
    )
    fold = folds[h100.index(True)]
    only = [f if f == fold else -1 for f in folds]
    clean, dirty = hold_out(made, only, fit), hold_out(ruined, only, fit)
    assert [h.predicted for h in clean] == pytest.approx([h.predicted for h in dirty], rel=1e-9)


def test_a_fold_takes_whole_groups(problem):
    made, _ = problem
    fold_of_group = {}
    for o, fold in zip(made.observations, shape_folds(made), strict=True):
        assert fold_of_group.setdefault(o.measurement.group, fold) == fold
    assert len(set(fold_of_group.values())) == 20


def test_a_wrong_row_does_not_bend_the_rest(problem):
    made, fit = problem
    broken = list(made.observations)
    broken[0] = replace(broken[0], value=broken[0].value / 10)
    bent = FitProblem(broken).fit(rounds=3)
    change = np.abs(FitProblem(broken).predict(bent.effects) - made.predict(fit.effects))
    assert np.median(change) < 0.01


def test_draws_spread_as_the_posterior_does(problem):
    made, fit = problem
    calibration = to_calibration(made, fit, {}, "2026-01-01")
    covariance = np.linalg.inv(fit.precision_root.T @ fit.precision_root)
    spread = np.sqrt(np.trace(covariance))
    assert np.sqrt((calibration.draws.std(axis=0) ** 2).sum()) == pytest.approx(spread, rel=0.1)
    assert set(calibration.rows_of_gpu) == {"H100-SXM-80GB", "H200-SXM-141GB", "MI300X"}


def test_intervals_know_what_was_left_out(problem):
    """Also where one model is fitted apart: a GPU that was left out is predicted with less certainty than one that was
    not, and the rest learns nothing from what is apart."""
    made, fit = problem
    apart = np.array([o.query.point.model.name == "Llama-3.1-8B" for o in made.observations])
    main = made.fit(~apart, rounds=1, start=fit)
    extended = made.extend(main, np.ones(len(apart), bool), apart)
    assert np.array_equal(made.predict(main.effects)[~apart], made.predict(extended.effects)[~apart])
    error = np.abs(made.predict(extended.effects) - made.log_values)[apart]
    assert np.median(error) < np.median(np.abs(made.predict(main.effects) - made.log_values)[apart])
    by_shape = hold_out(made, shape_folds(made, 4), fit, apart=apart)
    by_gpu = hold_out(made, gpu_folds(made, least_rows=1), fit, apart=apart)
    widths = [
        np.median([h.half_width for h in held if h.observation.query.target == "tpot"])
        for held in (by_shape, by_gpu)
    ]
    assert widths[1] > 1.05 * widths[0]
    scale = interval_scale(by_shape)
    given = [
        np.median([s.width_ratio for s in scored if s.target == "tpot"])
        for scored in (to_scored(by_shape, scale), to_scored(by_gpu, scale, "gpu"))
    ]
    assert given[1] > 1.2 * given[0]


def test_a_pair_left_out_is_doubted_as_far_as_other_pairs_were_wrong(problem):
    """Each fold counts alike; a fold is scored with the doubt of the others, so that its own error cannot cover itself."""
    made, _ = problem
    tpot = [o for o in made.observations if o.query.target == "tpot"]
    shift = {"H100-SXM-80GB": 0.3, "H200-SXM-141GB": 0.2, "MI300X": 0.0}
    held = [
        Held(o, o.value * float(np.exp(shift[o.query.point.gpu.name])), half_width=0.1)
        for o in tpot
        for _ in range(3 if o.query.point.gpu.name == "MI300X" else 1)
    ]
    doubt = doubt_of(held, {}, "gpu")
    own = (0.1 / 1.645) ** 2
    assert doubt["tpot"] == pytest.approx(2.353 * np.sqrt((0.3**2 + 0.2**2 - 2 * own) / 3), abs=1e-3)
    assert doubt["ttft"] == 0.0
    scored = to_scored(held, {}, "gpu")
    half = {s.gpu: np.log(s.high / s.predicted) for s in scored}
    others = 2.920 * np.sqrt((0.2**2 - own) / 2)
    assert half["H100-SXM-80GB"] == pytest.approx(np.hypot(0.1, others), abs=2e-3)
    assert half["H100-SXM-80GB"] < half["H200-SXM-141GB"] < half["MI300X"]
    assert all(s.is_covered for s in scored)
    assert not any(s.is_covered for s in to_scored(held, {}) if s.gpu != "MI300X")


def test_the_doubt_reaches_predictions_and_draws(problem):
    """Wider for a model that no row has on this GPU, wider still for a new GPU; plans on one pair share the draw."""
    made, fit = problem
    calibration = to_calibration(made, fit, {}, "2026-01-01", {"pair": {"tpot": 0.4}, "gpu": {"tpot": 1.2}})
    points = [point(), point(model="Llama-2-70B"), point(gpu="B200")]
    widths = [np.log(p.high / p.low) / 2 for p in calibration.predict([Query(p, "tpot") for p in points])]
    assert widths[0] < 0.4 < widths[1] < 1.2 < widths[2]
    assert [calibration.unseen(p) for p in points] == ["", "pair", "gpu"]
    plain = replace(calibration, doubt={})
    other = replace(points[1], concurrency=1.0, tensor_parallel=4)
    ratios = [
        calibration.coefficients([points[1], other, points[0]], draw)["tpot_bias"]
        / plain.coefficients([points[1], other, points[0]], draw)["tpot_bias"]
        for draw in range(len(calibration.draws))
    ]
    assert np.log([r[0] for r in ratios]).std() == pytest.approx(0.4 / 1.645, rel=0.3)
    assert all(r[0] == pytest.approx(r[1]) and r[2] == pytest.approx(1.0) for r in ratios)
    assert "none with Llama-2-70B" in calibration.rests_on(points[1])
