"""Against figures worked out by hand, and against numpy-financial."""

import numpy as np
import numpy_financial as npf
import pytest

from bimetal.economics.cash_flow import Conventions, annuity_factor, discount, irr, npv, payback_years
from bimetal.economics.residual import declining_ratio, resale_usd, straight_line_ratio


def test_npv_by_hand():
    # -1000 + 500/1.1 + 500/1.21 + 500/1.331
    assert float(npv([-1000, 500, 500, 500], 0.1)) == pytest.approx(
        -1000 + 454.545455 + 413.223140 + 375.657400
    )


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.12, 0.3])
def test_npv_and_annuity_agree_with_numpy_financial(rate):
    flows = [-1000.0, 300.0, -20.0, 900.0, 55.5]
    assert float(npv(flows, rate)) == pytest.approx(float(npf.npv(rate, flows)), rel=1e-12)
    assert annuity_factor(rate, 7) == pytest.approx(-float(npf.pmt(rate, 7, 1.0)), rel=1e-12)


@pytest.mark.parametrize("flows", [[-100, 60, 60], [-100, 0, 0, 150], [100, -30, -90], [-50, 10, 10, 10]])
def test_irr_agrees_with_numpy_financial(flows):
    assert irr(flows) == pytest.approx(float(npf.irr(flows)), abs=2e-6)


def test_irr_is_none_where_it_is_not_defined():
    assert irr([1, 2, 3]) is None
    assert irr([-1, 3, -1]) is None


def test_npv_takes_draws():
    rates = np.array([0.0, 0.1])
    assert npv(np.array([-100.0, 110.0]), rates).tolist() == pytest.approx([10.0, 0.0])


def test_mid_year_flows_are_worth_half_a_year_more():
    end, mid = Conventions(3, 0.1), Conventions(3, 0.1, flows="mid-year")
    ratio = discount(0.1, mid.operating_times) / discount(0.1, end.operating_times)
    assert ratio == pytest.approx(np.full(3, 1.1**0.5))


def test_residuals_by_hand():
    assert straight_line_ratio(2, 5, 0.1) == pytest.approx(0.64)
    assert declining_ratio(2, 0.3) == pytest.approx(0.448140, abs=1e-6)
    assert resale_usd(40_000, 2, 0.3, 0.25, True) == pytest.approx(40_000 * 0.448140 * 0.75, abs=0.1)


def test_payback_by_hand():
    assert payback_years([-100, 30, 30, 80]) == pytest.approx(2.5)
