"""The library against a second reckoning, on scenarios that nobody would choose."""

from pathlib import Path

import pytest
import yaml
from tests.economics.plain_arithmetic import odd_scenario, reckon

from bimetal.catalog.document import Document
from bimetal.economics.binding import bind
from bimetal.economics.scenario import parse_scenario
from bimetal.economics.tco import price_fleet
from bimetal.economics.uncertainty import central_values


@pytest.mark.parametrize("seed", range(60))
def test_every_figure_as_reckoned_by_hand(seed):
    given = odd_scenario(seed)
    scenario = parse_scenario(Document(yaml.safe_dump(given), "odd.yaml"), Path("."))
    fleets = bind(scenario, central_values(scenario.quantities))
    for fleet, expected in zip(fleets, reckon(given), strict=True):
        tco = price_fleet(fleet)
        found = {key: float(getattr(tco, key).sum()) for key in expected}
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-6), (seed, fleet.name)
