"""The curve of capped GPUs against the rows it comes from, and against a reader's own arithmetic."""

from dataclasses import replace
from math import log

import pytest

from bimetal.catalog.demand import LOWEST_POWER_RATIO
from bimetal.errors import ConfigError
from bimetal.perf.measurements import published
from bimetal.perf.power import (
    COMPUTE_TERMS,
    MEMORY_TERMS,
    PUBLISHED_CAP_RATIO,
    fit_power_curve,
    load_power_curve,
    published_power_curve,
    save_power_curve,
    twins,
)


@pytest.fixture(scope="module")
def rows():
    return published().measurements


def test_the_carried_curve_is_the_fit_of_the_carried_rows(rows, tmp_path):
    carried = published_power_curve()
    found = fit_power_curve(rows, carried.date)
    assert found == carried
    assert sum(row.power_capped for row in rows) == found.compute.num_pairs + found.num_without_twin == 36
    save_power_curve(found, tmp_path / "curve.json")
    assert load_power_curve((tmp_path / "curve.json").read_text()) == carried


def test_it_predicts_every_row_at_half_of_tdp(rows):
    """Splitwise's rows: TTFT 1.3 times as long, TPOT as it was."""
    curve = published_power_curve()
    pairs, _ = twins(rows)
    for capped, free in pairs:
        assert curve.compute_rate(0.5) == pytest.approx(free.ttft_s / capped.ttft_s, rel=2e-4)
        assert curve.memory_rate(0.5) == pytest.approx(free.tpot_s / capped.tpot_s, rel=2e-4)
    assert curve.compute.exponent == pytest.approx(log(1.3) / log(2), rel=1e-3)
    assert 1 / 3 <= curve.compute.exponent <= 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_group_left_out_is_predicted_from_the_others(rows, ranks):
    kept = [r for r in rows if not r.power_capped or r.point.tensor_parallel != ranks]
    left_out = [pair for pair in twins(rows)[0] if pair[0].point.tensor_parallel == ranks]
    curve = fit_power_curve(kept, "today")
    assert len(left_out) >= 3
    for capped, free in left_out:
        assert curve.compute_rate(PUBLISHED_CAP_RATIO) == pytest.approx(free.ttft_s / capped.ttft_s, rel=1e-3)


def test_noise_in_the_rows_shows_in_the_errors(rows):
    capped = [r for r in rows if r.power_capped]
    doubled = [replace(r, ttft_s=r.ttft_s * 1.5) if r is capped[0] else r for r in rows]
    found = fit_power_curve(doubled, "today")
    assert found.compute.worst_error > 0.3
    assert found.compute.median_error < 0.05


def test_the_curve_by_hand():
    curve = published_power_curve()
    assert curve.compute_rate(1.0) == curve.memory_rate(1.0) == 1.0
    assert curve.compute_rate(500 / 700) == pytest.approx(0.8804, abs=1e-4)  # (5/7)^0.3785
    assert curve.compute_rate(0.75) > curve.compute_rate(0.6)
    clocks = dict.fromkeys((*COMPUTE_TERMS, *MEMORY_TERMS, "fixed_s", "bias"), 1.0)
    slowed = curve.slowed(clocks, 0.5)
    assert {name for name, value in slowed.items() if value > 1} == set(COMPUTE_TERMS)
    assert slowed["prompt_token_s"] == pytest.approx(1.3, rel=1e-3)


def test_nothing_is_claimed_beyond_the_rows(rows):
    curve = published_power_curve()
    assert curve.lowest_ratio == LOWEST_POWER_RATIO
    for ratio in (0.49, 1.01):
        with pytest.raises(ValueError, match="cap ratio"):
            curve.compute_rate(ratio)
    with pytest.raises(ConfigError, match="no uncapped row"):
        fit_power_curve([r for r in rows if r.power_capped], "today")
