"""A small fleet, priced by hand."""

from dataclasses import replace

import numpy as np
import numpy_financial as npf
import pytest

from bimetal.economics.cash_flow import Conventions
from bimetal.economics.fleet import FleetInputs, Group, Site, Waiting
from bimetal.economics.tco import compare, price_fleet, returns, returns_on_difference

SITE = Site(
    colocated=False,
    usd_per_kwh=0.10,
    pue_ratio=1.25,
    cooling_usd_per_kw=0.0,
    usd_per_kw_month=0.0,
    network_ratio=0.10,
    installation_ratio=0.0,
    duty_ratio=0.0,
    vat_ratio=0.0,
    insurance_ratio=0.0,
)
GROUP = Group(
    gpu="H100-SXM-80GB",
    num_gpus=8,
    terms="buy",
    start_year=0,
    end_year=2,
    price_usd=25_000.0,
    server_usd=15_000.0,
    tdp_w=700.0,
    server_w=500.0,
    draw_ratio=0.5,
    power_cut_ratio=0.0,
    throughput_cost_ratio=0.0,
    output_tokens_per_s=1_000.0,
    support_ratio=0.05,
    failure_ratio=0.0,
    residual_3y_ratio=0.3,
    successor_drop_ratio=0.0,
    successor_year=None,
    rent_usd_per_h=2.0,
    lead_time_years=0.0,
    deposit_ratio=0.0,
)
FLEET = FleetInputs(
    name="eight",
    groups=(GROUP,),
    site=SITE,
    conventions=Conventions(2, 0.1),
    utilisation_ratio=0.6,
    demand_tokens_per_s=float("inf"),
    throughput_ratio=1.0,
    usd_per_million_tokens=0.0,
    stack_usd_per_year=10_000.0,
    qualification_usd=7_000.0,
    waiting=Waiting(),
)


def test_small_tco_by_hand():
    # Chips 200,000; servers 120,000; network 32,000; qualification 7,000: 359,000 today.
    # Power 8 x (350 + 500) W = 6.8 kW x 1.25 x 8760 h x 0.10 = 7,446; support 16,000; stack 10,000: 33,446 a year.
    # Resale 320,000 x 0.3^(2/3) = 143,404.95 at the end of year 2.
    tco = price_fleet(FLEET)
    resale = 320_000 * 0.3 ** (2 / 3)
    flows = [359_000, 33_446, 33_446 - resale]
    assert tco.yearly_usd() == pytest.approx(flows)
    assert float(tco.npv_usd) == pytest.approx(float(npf.npv(0.1, flows)))
    assert float(tco.npv_usd) == pytest.approx(
        359_000 + 33_446 / 1.1 + (33_446 - 143_404.95) / 1.21, abs=0.01
    )
    assert float(tco.annualised_usd) == pytest.approx(-float(npf.pmt(0.1, 2, float(tco.npv_usd))))
    tokens = 8 * 1_000 * 0.6 * 8760 * 3600
    assert tco.tokens == pytest.approx(np.full(2, tokens))
    per_million = float(tco.annualised_usd) / tokens * 1e6
    assert float(tco.usd_per_million_output_tokens) == pytest.approx(per_million)


def test_demand_caps_tokens_and_costs_stay():
    tco = price_fleet(replace(FLEET, demand_tokens_per_s=1_200.0))
    assert tco.tokens == pytest.approx(np.full(2, 1_200.0 * 8760 * 3600))
    assert float(tco.npv_usd) == pytest.approx(float(price_fleet(FLEET).npv_usd))


def test_rent_on_demand_is_paid_for_hours_in_use_and_demand_limits_them():
    rented = replace(FLEET, groups=(replace(GROUP, terms="on-demand"),))
    usd = next(line for line in price_fleet(rented).lines if "rent" in line.label).usd
    assert usd == pytest.approx(np.full(2, 8 * 2.0 * 8760 * 0.6))
    # 1,200 of 8,000 tokens a second: 15% of the hours.
    idle = price_fleet(replace(rented, demand_tokens_per_s=1_200.0))
    assert next(line for line in idle.lines if "rent" in line.label).usd == pytest.approx(
        np.full(2, 8 * 2.0 * 8760 * 0.15)
    )


def test_revenue_is_no_part_of_cost_per_token_and_gives_irr_and_payback():
    costs, earning = price_fleet(FLEET), price_fleet(replace(FLEET, usd_per_million_tokens=2.0))
    assert float(earning.npv_usd) == pytest.approx(float(costs.npv_usd))
    assert float(earning.usd_per_million_output_tokens) == pytest.approx(
        float(costs.usd_per_million_output_tokens)
    )
    earned = 2.0 * 8 * 1_000 * 0.6 * 8760 * 3600 / 1e6
    flows = [-359_000, earned - 33_446, earned - 33_446 + 320_000 * 0.3 ** (2 / 3)]
    assert float(earning.profit_usd) == pytest.approx(float(npf.npv(0.1, flows)))
    back = returns(earning)
    assert back.irr == pytest.approx(float(npf.irr(flows)), abs=2e-6)
    assert back.payback_years == pytest.approx(1 - (flows[0] + flows[1]) / flows[2])
    assert returns(costs).irr is None


def test_irr_counts_flows_when_they_fall_due():
    late = replace(GROUP, lead_time_years=0.4, deposit_ratio=0.5)
    fleet = replace(
        FLEET,
        groups=(late,),
        usd_per_million_tokens=2.5,
        conventions=Conventions(2, 0.1, flows="mid-year"),
    )
    rate = returns(price_fleet(fleet)).irr
    assert rate is not None
    at_irr = price_fleet(replace(fleet, conventions=Conventions(2, rate, flows="mid-year")))
    assert float(at_irr.profit_usd) == pytest.approx(0, abs=1.0)
    dearer = replace(FLEET, groups=(replace(GROUP, price_usd=26_000.0, draw_ratio=0.1, support_ratio=0.0),))
    assert returns_on_difference(price_fleet(FLEET), price_fleet(dearer)).irr > 0
    assert returns_on_difference(price_fleet(dearer), price_fleet(FLEET)).irr is None
    assert returns_on_difference(price_fleet(FLEET), price_fleet(FLEET)).irr is None


def test_a_replacement_saves_no_tax_before_it_is_bought():
    old, new = (
        replace(GROUP, end_year=1),
        replace(GROUP, start_year=1, price_usd=40_000.0, gpu="B200-SXM-180GB"),
    )
    fleet = replace(FLEET, groups=(old, new), conventions=Conventions(2, 0.1, tax_ratio=0.25))
    saved = next(x for x in price_fleet(fleet).lines if x.label == "8 x B200-SXM-180GB: chips: tax")
    assert saved.usd == pytest.approx([-320_000 * 0.25]) and saved.times_years.tolist() == [2.0]


def test_what_would_have_to_be_charged_is_taxed_too():
    conventions = Conventions(2, 0.1, tax_ratio=0.25)
    charge = float(price_fleet(replace(FLEET, conventions=conventions)).usd_per_million_output_tokens)
    earning = price_fleet(replace(FLEET, conventions=conventions, usd_per_million_tokens=charge))
    assert float(earning.profit_usd) == pytest.approx(0, abs=1e-6)


def test_colocation_replaces_own_power():
    site = replace(SITE, colocated=True, usd_per_kw_month=200.0, usd_per_kwh=0.0)
    labels = {line.label: line for line in price_fleet(replace(FLEET, site=site)).lines}
    assert not any("power" in label for label in labels)
    # 8 x 1,200 W = 9.6 kW x 200 x 12
    assert labels["8 x H100-SXM-80GB: colocation"].usd == pytest.approx(np.full(2, 23_040.0))


def test_late_group_earns_less_and_is_bridged_at_a_price():
    late = replace(FLEET, groups=(replace(GROUP, lead_time_years=0.5),))
    tco = price_fleet(late)
    assert tco.tokens[0] == pytest.approx(price_fleet(FLEET).tokens[0] / 2)
    bridged = price_fleet(replace(late, waiting=Waiting(cloud_usd_per_h=6.0, bridged_ratio=1.0)))
    assert bridged.tokens == pytest.approx(price_fleet(FLEET).tokens)
    cloud = next(line for line in bridged.lines if line.label == "cloud while waiting")
    assert cloud.usd == pytest.approx([8 * 6.0 * 4380, 0.0])


def test_deposit_is_paid_with_the_order_and_the_rest_on_delivery():
    tco = price_fleet(replace(FLEET, groups=(replace(GROUP, lead_time_years=0.5, deposit_ratio=0.2),)))
    chips = next(line for line in tco.lines if line.label.endswith("chips"))
    assert float(chips.npv_usd(0.1)) == pytest.approx(40_000 + 160_000 / 1.1**0.5)


def test_replacement_is_a_second_group():
    old, new = (
        replace(GROUP, end_year=1),
        replace(GROUP, gpu="B200-SXM-180GB", start_year=1, price_usd=40_000.0),
    )
    tco = price_fleet(replace(FLEET, groups=(old, new)))
    sold = next(line for line in tco.lines if line.label == "8 x H100-SXM-80GB: resale")
    assert sold.usd == pytest.approx([-320_000 * 0.3 ** (1 / 3)]) and sold.times_years.tolist() == [1.0]
    chips = next(line for line in tco.lines if line.label == "8 x B200-SXM-180GB: chips")
    assert chips.usd.sum() == pytest.approx(320_000) and chips.times_years.tolist() == [1.0, 1.0]


def test_tax_is_cash_and_depreciation_only_what_it_saves():
    before, after = (
        price_fleet(FLEET),
        price_fleet(replace(FLEET, conventions=Conventions(2, 0.1, tax_ratio=0.25))),
    )
    resale = 320_000 * 0.3 ** (2 / 3)
    shield = 0.25 * (359_000 / 2 + 33_446)
    expected = float(before.npv_usd) - shield * (1 / 1.1 + 1 / 1.21) + 0.25 * resale / 1.21
    assert float(after.npv_usd) == pytest.approx(expected)


def test_savings_on_chip_system_and_tco_differ():
    cheaper = replace(FLEET, groups=(replace(GROUP, price_usd=20_000.0),))
    c = compare(price_fleet(FLEET), price_fleet(cheaper))
    assert float(c.chip_ratio) == pytest.approx(0.2)
    assert float(c.system_ratio) == pytest.approx(8 * 5_000 * 1.1 / 359_000)
    assert 0 < float(c.tco_ratio) < float(c.system_ratio) < float(c.chip_ratio)
    assert float(c.per_token_ratio) == pytest.approx(float(c.tco_ratio))
