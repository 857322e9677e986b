"""What an authenticated peer can say to a stage that makes no sense: the stage answers FAILED, and ends for no word of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest
from tests.engine.checkpoints import make_checkpoint
from tests.engine.serving import SECRET

from bimetal.engine.link.tcp import Connection, connect
from bimetal.engine.stage.process import StageProcess
from bimetal.engine.wire.control import LoadStage, StageFailed, StartStage, decode_control, encode_control
from bimetal.engine.wire.frame import Header, Kind, pack_json
from bimetal.engine.wire.step import Step, encode_step, idle_step
from bimetal.errors import LinkError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def stage() -> Iterator[tuple[StageProcess, Event]]:
    ended = Event()
    process = StageProcess("127.0.0.1:0", SECRET, ended.set)
    Thread(target=process.run, daemon=True).start()
    yield process, ended
    process.close()


def load_message(model: Path | str) -> LoadStage:
    return LoadStage(
        index=0,
        num_stages=1,
        model=str(model),
        start_layer=0,
        end_layer=4,
        device="cpu",
        dtype="float32",
        load_format="safetensors",
        seed=0,
        block_tokens=16,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        gpu_memory_utilization=0.9,
        kv_cache_bytes=None,
        enforce_eager=False,
        num_threads=1,
    )


def answer(driver: Connection, *passing: Kind) -> tuple[Header, memoryview]:
    """The next frame that is none of `passing`."""
    driver.set_timeout(20.0)
    while True:
        header, payload = driver.receive()
        if header.kind not in passing:
            return header, payload


def failure(driver: Connection) -> str:
    header, payload = answer(driver, Kind.LOADING)
    assert header.kind is Kind.FAILED
    return decode_control(StageFailed, payload).message


@pytest.fixture
def driver(stage: tuple[StageProcess, Event], folder: Path) -> Iterator[Connection]:
    """Of a started stage."""
    connection = connect(stage[0].address, SECRET, "driver")
    connection.send_frame(encode_control(load_message(folder)))
    assert answer(connection, Kind.LOADING)[0].kind is Kind.LOADED
    connection.send_frame(encode_control(StartStage(1, 8, (), ())))
    assert answer(connection)[0].kind is Kind.STARTED
    yield connection
    connection.close()


def run(driver: Connection, number: int, step: Step) -> tuple[Header, memoryview]:
    payload = encode_step(step).data.cast("B")
    driver.send(Header(Kind.STEP, len(payload), 1, number), (payload,))
    return answer(driver)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("token_ids", [10**6]),
        ("positions", [10**6]),
        ("slots", [10**6]),
        ("logit_rows", [7]),
        ("sequence_slots", [99]),
        ("context_lens", [-5]),
        ("query_starts", [0, 9]),
        ("logit_sequences", [3]),
    ],
)
def test_a_step_of_wrong_numbers_is_an_answer(driver: Connection, name: str, values: list[int]) -> None:
    """Whatever it is answered, the stage runs the next step."""
    step = replace(idle_step(1), **{name: np.array(values, np.int32)})
    run(driver, 1, step)
    header, _payload = run(driver, 2, idle_step(1))
    assert header.kind is Kind.SAMPLED


def test_a_load_of_wrong_numbers_is_an_answer(stage: tuple[StageProcess, Event], folder: Path) -> None:
    driver = connect(stage[0].address, SECRET, "driver")
    for change in ({"block_tokens": 0}, {"end_layer": 5}, {"dtype": "int4"}, {"device": "cuda:99"}):
        driver.send_frame(encode_control(replace(load_message(folder), **change)))
        assert failure(driver)
    driver.close()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_an_answer(
    stage: tuple[StageProcess, Event], tmp_path: Path, file: str
) -> None:
    folder = make_checkpoint("llama", tmp_path)
    (folder / file).write_bytes((folder / file).read_bytes()[:100])
    driver = connect(stage[0].address, SECRET, "driver")
    driver.send_frame(encode_control(load_message(folder)))
    assert failure(driver)
    driver.close()


@pytest.mark.parametrize("kind", [Kind.LOAD, Kind.START, Kind.STEP, Kind.STATS, Kind.HIDDEN, Kind.CHALLENGE])
def test_frames_out_of_place_are_answered(stage: tuple[StageProcess, Event], kind: Kind) -> None:
    driver = connect(stage[0].address, SECRET, "driver")
    for document in ({}, [], "x", None, {"num_kv_blocks": -1}):
        driver.send_frame(pack_json(kind, document))
        assert failure(driver)
    driver.close()


def test_a_stage_whose_driver_went_while_it_failed_takes_the_next(
    stage: tuple[StageProcess, Event],
) -> None:
    """It used to end with the process it ran in."""
    process, ended = stage
    driver = connect(process.address, SECRET, "driver")
    for _ in range(200):
        driver.send_frame(pack_json(Kind.STEP, {}))
    driver.close()
    assert ended.wait(10)


def test_a_result_that_cannot_leave_is_an_answer(stage: tuple[StageProcess, Event]) -> None:
    """A GPU's stage sends what is pending while it waits for a command: it used to end with a traceback."""
    process, ended = stage
    errors: list[Exception] = [LinkError("lost the next stage"), RuntimeError("a kernel failed")]

    class Outbox:
        def send_ready(self) -> bool:
            if errors:
                raise errors.pop(0)
            return False

    driver = connect(process.address, SECRET, "driver")
    driver.send_frame(pack_json(Kind.STATS, {}))
    assert "STATS came before START" in failure(driver)
    process._loop = SimpleNamespace(outbox=Outbox())  # type: ignore[assignment]
    driver.send_frame(pack_json(Kind.CHALLENGE, {}))
    assert {failure(driver) for _ in range(3)} == {
        "a driver sends no CHALLENGE frames",
        "lost the next stage",
        "RuntimeError: a kernel failed",
    }
    assert not ended.is_set()
    driver.close()
    assert ended.wait(10)
