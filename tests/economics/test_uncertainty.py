"""Draws are repeatable, shared and correlated as declared; break-evens are where results meet."""

import time
from pathlib import Path

import numpy as np
import pytest

from bimetal.economics.binding import bind
from bimetal.economics.quantity import parse_quantity
from bimetal.economics.scenario import load_scenario
from bimetal.economics.tco import compare, price_fleet
from bimetal.economics.uncertainty import (
    break_evens,
    central_values,
    draw_together,
    draw_values,
    spread,
    tornado,
)
from bimetal.errors import ConfigError

CASE_STUDY = Path(__file__).parents[2] / "examples" / "scenarios" / "case-study.yaml"


def quantity(**given):
    return parse_quantity(given, 0.0, 1e9)


def test_ten_thousand_draws_of_two_fleets_take_less_than_two_seconds():
    scenario = load_scenario(CASE_STUDY)
    start = time.perf_counter()
    baseline, mixed = (
        price_fleet(f) for f in bind(scenario, draw_values(scenario.quantities, num_draws=10_000))
    )
    difference = spread(compare(baseline, mixed).tco_usd)
    assert time.perf_counter() - start < 2.0
    assert baseline.npv_usd.shape == (10_000,)
    assert difference.p10 < difference.p50 < difference.p90


def test_shared_draws_make_the_difference_surer_than_its_parts():
    scenario = load_scenario(CASE_STUDY)
    baseline, mixed = (price_fleet(f) for f in bind(scenario, draw_values(scenario.quantities)))
    apart = np.hypot(baseline.npv_usd.std(), mixed.npv_usd.std())
    assert (baseline.npv_usd - mixed.npv_usd).std() < 0.8 * apart


def test_same_name_and_seed_give_the_same_draws_whatever_else_is_drawn():
    a, b = quantity(low=1, high=2), quantity(low=5, high=9)
    alone, together = draw_values({"x": a}), draw_values({"y": b, "x": a})
    assert np.array_equal(alone["x"], together["x"])
    assert not np.array_equal(alone["x"], draw_values({"x": a}, seed=1)["x"])


@pytest.mark.parametrize(
    ("given", "quantiles"),
    [
        ({"low": 10, "high": 20}, (11, 15, 19)),
        ({"mean": 100, "sd": 10}, (87.184, 100, 112.816)),
        ({"p10": 10, "p90": 40}, (10, 20, 40)),
        # Triangle 0, 10, 20: quantile(0.1) = sqrt(0.1 x 20 x 10)
        ({"low": 0, "mode": 10, "high": 20}, (4.4721, 10, 15.5279)),
    ],
)
def test_distributions_have_their_quantiles(given, quantiles):
    drawn = draw_values({"x": parse_quantity(given, 0, 1e9)})["x"]
    assert np.percentile(drawn, [10, 50, 90]) == pytest.approx(quantiles, rel=2e-3)


def test_correlation_is_as_declared():
    inputs = {name: quantity(mean=100, sd=5) for name in "abc"}
    v = draw_values(inputs, [("a", "b", 0.8)], num_draws=20_000)
    assert np.corrcoef(v["a"], v["b"])[0, 1] == pytest.approx(0.8, abs=0.02)
    assert np.corrcoef(v["a"], v["c"])[0, 1] == pytest.approx(0.0, abs=0.03)


def test_compared_scenarios_share_draws_though_only_one_declares_a_correlation():
    inputs = {name: quantity(mean=100, sd=5) for name in "ab"}
    one, other = draw_together([inputs, inputs], [("a", "b", 0.8)], num_draws=2_000)
    assert np.array_equal(one["a"], other["a"]) and np.array_equal(one["b"], other["b"])
    with pytest.raises(ConfigError, match="keep one"):
        draw_together([inputs, inputs], [("a", "b", 0.8), ("b", "a", 0.5)])


def test_extreme_shapes_keep_their_quantiles():
    tiny, huge = parse_quantity({"p10": 1e-250, "p90": 1e-200}, 0, 1e15), quantity(low=5, mode=5, high=5)
    assert tiny.central == pytest.approx(1e-225) and huge.central == 5.0 and not huge.is_uncertain
    falling, rising = quantity(low=0, mode=0, high=1), quantity(low=0, mode=1, high=1)
    assert falling.central == pytest.approx(1 - 0.5**0.5) and rising.central == pytest.approx(0.5**0.5)
    assert draw_values({"x": quantity(mean=100, sd=0)})["x"].tolist() == [100.0] * 10_000


def test_break_evens_are_all_of_them_and_only_they():
    assert break_evens(lambda x: (x - 1) * (x - 3), 0, 10) == pytest.approx((1.0, 3.0))
    assert break_evens(lambda x: x + 1, 0, 10) == ()
    assert break_evens(lambda x: x, 0, 10) == (0.0,)
    assert break_evens(lambda x: 10 - x, 0, 10) == (10.0,)
    # Equal from 2.00037 on, as where demand limits both fleets: the whole stretch, by its ends.
    assert break_evens(lambda x: np.minimum(x - 2.00037, 0), 0, 10) == pytest.approx((2.00037, 10.0))
    # Not defined below 5: no crossing there.
    assert break_evens(lambda x: np.where(x < 5, np.nan, 1.0), 0, 10) == ()


def test_impossible_or_unknown_correlations_are_refused():
    inputs = {name: quantity(mean=100, sd=5) for name in "abc"}
    with pytest.raises(ConfigError, match="positive definite"):
        draw_values(inputs, [("a", "b", 0.9), ("b", "c", 0.9), ("a", "c", -0.9)])
    with pytest.raises(ConfigError, match="'z' is not an uncertain input"):
        draw_values(inputs, [("a", "z", 0.5)])


def test_tornado_puts_the_widest_first():
    inputs = {"a": quantity(low=0, high=1), "b": quantity(low=0, high=10), "c": quantity(low=0, high=9)}
    swings = tornado([inputs], lambda v: 2 * v[0]["a"] + v[0]["b"])
    assert [s.name for s in swings] == ["b", "a"]
    assert swings[0].width == pytest.approx(8.0)


def test_break_even_price_is_where_the_fleets_cost_the_same_per_token():
    scenario = load_scenario(CASE_STUDY)
    centre = central_values(scenario.quantities)

    def difference(price):
        a, b = (price_fleet(f) for f in bind(scenario, {**centre, "gpus.MI300X.price_usd": price}))
        return np.asarray(a.usd_per_million_output_tokens - b.usd_per_million_output_tokens)

    (price,) = break_evens(difference, 0, 60_000)
    assert float(difference(price)) == pytest.approx(0, abs=1e-6)
    assert difference(price - 100) > 0 > difference(price + 100)
