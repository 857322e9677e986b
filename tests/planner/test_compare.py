"""What a plan costs per token served, on draws where it serves everything, something and nothing."""

from pathlib import Path

import numpy as np
import pytest

from bimetal.catalog.demand import parse_demand
from bimetal.perf.calibration import published_calibration
from bimetal.planner.compare import DrawnPrices, draw_prices, servable_multiple
from bimetal.planner.decide import FleetPlanner

TEXT = """\
stock: [{gpu: H100, count: 8, price_usd_per_h: PRICE}]
models: [{name: Llama-3.1-8B}]
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-8B, rate_per_s: 10, input_tokens: 400, output_tokens: 100,
     ttft_p99_s: 1, tpot_p99_s: 0.06}
"""


@pytest.mark.parametrize("usd", [0.0, 2.0])
def test_who_serves_nothing_is_infinitely_dear_even_for_free(usd, monkeypatch):
    """Three draws: all of the demand, half of it, nothing. The solver calls nothing -0."""
    planner = FleetPlanner(
        parse_demand(TEXT.replace("PRICE", str(usd)), "d"), Path("."), published_calibration()
    )
    plan = planner.plan("best", simulate=False)
    chosen = plan.optimum.chosen
    enough = {key: 2 * rate for key, rate in chosen.served_per_s.items()}
    half = {key: 0.5 * planner.traffic[0].rate_per_s / sum(chosen.replicas.values()) for key in enough}
    nothing = dict.fromkeys(enough, 0.0)
    assert not np.signbit(servable_multiple(plan.problem, plan, nothing))
    monkeypatch.setattr("bimetal.planner.compare._drawn_rates", lambda *_: [enough, half, nothing])
    (prices,) = draw_prices(planner, [plan])
    full = plan.usd_per_million_tokens
    assert prices.usd_per_million_tokens == pytest.approx([full, 2 * full, np.inf])
    assert prices.cheaper_than(DrawnPrices("dear", np.full(3, 1e9))) == pytest.approx(2 / 3)
