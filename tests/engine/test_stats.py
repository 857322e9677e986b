"""What the driver asks its stages for on the way, while steps flow."""

from __future__ import annotations

from pathlib import Path
from threading import Timer

import pytest
from tests.engine.checkpoints import make_checkpoint
from tests.engine.serving import greedy_params, run_all, threaded_engine

from bimetal.engine.wire.api import Generate
from bimetal.errors import StageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def test_of_two_questions_the_last_ones_answers_count(folder: Path) -> None:
    """Asked again before the first answers were there, the first ones used to be taken for the last."""
    with threaded_engine(folder, (0, 2, 4)) as driver:
        run_all(driver, [Generate("it", (3, 4), greedy_params(5))])
        ask, stages = driver._stages.ask_stats, driver._stages
        driver.ask_stage_stats()
        stages.ask_stats = lambda wanted: Timer(0.1, ask, (wanted,)).start()  # type: ignore[method-assign]
        driver.ask_stage_stats()
        stages.ask_stats = ask  # type: ignore[method-assign]
        while (stats := driver.stage_stats) is None:
            driver.poll(0.1)
        assert [s.num_steps for s in stats] == [0, 0]
        run_all(driver, [Generate("again", (3, 4), greedy_params(5))])
        driver.ask_stage_stats()
        while (stats := driver.stage_stats) is None:
            driver.poll(0.1)
        assert [s.num_steps for s in stats] == [5, 5]


def test_asked_for_in_vain_they_name_the_stage(folder: Path) -> None:
    with threaded_engine(folder, (0, 2, 4)) as driver:
        driver._stages._connections[1].close()
        with pytest.raises(StageError, match="stage 1 on node 'node1' is gone"):
            driver.ask_stage_stats()
