"""Stages as real processes: they die with their driver, their death is told, a hand-started one takes the next driver."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from tests.engine.checkpoints import make_checkpoint
from tests.engine.serving import SECRET, greedy_params, plan_document, run_all, tokens_of

from bimetal.engine.driver.children import StageChild
from bimetal.engine.driver.driver import Driver
from bimetal.engine.wire.api import Generate
from bimetal.engine.wire.handshake import SECRET_VARIABLE
from bimetal.engine.wire.options import EngineOptions
from bimetal.errors import StageError
from bimetal.plan import Stage

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def stage_children(pid: int) -> list[psutil.Process]:
    """Of the process itself: a server that other tests still use has stages of its own."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile, perhaps not yet waited for
            if "bimetal.engine.stage.child" in child.cmdline():
                found.append(child)
    return found


def _poll_for_ever(driver: Driver, timeout_s: float = 1.0) -> None:
    deadline_s = time.monotonic() + 60
    while driver.poll(timeout_s) is not None:
        assert time.monotonic() < deadline_s, "nobody noticed"


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> None:
    _gone, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive, f"still there after {seconds} s: {alive}"


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_dead_stage_is_named_and_nobody_is_left(folder: Path, dead: int) -> None:
    """Not its neighbour, who is often the first to say that something is wrong."""
    driver = Driver(EngineOptions(plan=plan_document(folder, (0, 1, 2, 4))))
    driver.start()
    children = stage_children(os.getpid())
    assert len(children) == 3
    driver.submit(Generate("it", (3, 4), greedy_params(200)))
    while not driver.poll(1.0):
        pass
    children[dead].kill()
    with pytest.raises(StageError, match=f"stage {dead} on node 'node{dead}' is gone"):
        _poll_for_ever(driver)
    driver.stop()
    wait_until_gone(children, 5)


def test_a_stage_that_hangs_is_noticed(folder: Path) -> None:
    """It closes no connection; whoever waits for its step is told."""
    driver = Driver(EngineOptions(plan=plan_document(folder, (0, 2, 4)), step_timeout_s=1.0))
    driver.start()
    stage_children(os.getpid())[1].suspend()
    driver.submit(Generate("it", (3, 4), greedy_params(200)))
    with pytest.raises(StageError, match=r"did not come back within 1 s.*node0, node1.*--step-timeout-s"):
        _poll_for_ever(driver, 0.25)
    driver.stop()


def test_stages_that_hang_are_ended_together(folder: Path) -> None:
    driver = Driver(EngineOptions(plan=plan_document(folder, (0, 1, 2, 4))))
    driver.start()
    children = stage_children(os.getpid())
    for child in children:
        child.suspend()
    began = time.monotonic()
    driver.stop()
    # The gateway waits two and a half seconds for its driver, then ends it as well.
    assert time.monotonic() - began < 2.0
    wait_until_gone(children, 1)


@pytest.mark.parametrize("after_s", [0.0, 0.5, 2.0])
def test_a_start_that_is_called_off_ends_at_once(folder: Path, after_s: float) -> None:
    """While stages import torch, load or time their steps: nobody waits until they are ready."""
    driver = Driver(EngineOptions(plan=plan_document(folder, (0, 2, 4))))
    timer = threading.Timer(after_s, driver.interrupt)
    timer.start()
    try:
        driver.start()
    except StageError:
        assert driver.interrupted
    children = stage_children(os.getpid())
    began = time.monotonic()
    timer.join()
    driver.stop()
    assert time.monotonic() - began < 2.5
    wait_until_gone(children, 1)


def test_a_stage_that_is_still_importing_goes_with_its_driver() -> None:
    for after_s in (0.2, 0.6):
        child = StageChild(0, Stage("node", "cpu", 0, 1), SECRET)
        time.sleep(after_s)
        began = time.monotonic()
        child.ask_to_stop()
        while child.status is None and time.monotonic() - began < 3:
            time.sleep(0.02)
        assert child.status == 0
        child.stop(0.0)


def test_what_else_a_stage_prints_holds_nobody_up(tmp_path: Path) -> None:
    """Before it listens, in one piece with its address; and after, when nobody reads it any more."""
    loud = tmp_path / "python"
    loud.write_text("#!/bin/sh\nprintf 'hello\\nLISTENING 127.0.0.1:7\\n'\nexec sleep 60\n")
    loud.chmod(0o755)
    child = StageChild(0, Stage("node", "cpu", 0, 1, python=str(loud)), SECRET)
    timer = threading.Timer(5, child.stop, (0.0,))
    timer.start()
    assert child.wait_for_address() == "127.0.0.1:7"
    timer.cancel()
    child.stop(0.0)
    child = StageChild(0, Stage("node", "cpu", 0, 1), SECRET)
    child.wait_for_address()
    files = Path(f"/proc/{child._process.pid}/fd")
    deadline_s = time.monotonic() + 5
    while (files / "1").readlink() != (files / "2").readlink():
        assert time.monotonic() < deadline_s
    child.stop(1.0)


def test_ctrl_c_ends_a_stage_without_a_traceback() -> None:
    command = [sys.executable, "-m", "bimetal.cli.main", "stage", "--listen", "127.0.0.1:0"]
    pipe = subprocess.PIPE
    stage = subprocess.Popen(
        command,
        env={**os.environ, SECRET_VARIABLE: SECRET},
        stdout=pipe,
        stderr=pipe,
        # Tests that run in the background inherit that it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert stage.stdout is not None
    assert stage.stdout.readline().startswith(b"LISTENING")
    time.sleep(0.1)
    stage.send_signal(signal.SIGINT)
    assert stage.communicate(timeout=5) == (b"", b"")
    assert stage.returncode == 130


def test_a_dead_driver_leaves_no_stage(folder: Path) -> None:
    script = (
        "import sys; from bimetal.engine.driver.driver import Driver; from bimetal.engine.wire.options import EngineOptions\n"
        "driver = Driver(EngineOptions.from_json(sys.argv[1])); driver.start(); print('up', flush=True); sys.stdin.read()"
    )
    options = EngineOptions(plan=plan_document(folder, (0, 2, 4))).to_json()
    parent = subprocess.Popen(
        [sys.executable, "-c", script, options], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    children = stage_children(parent.pid)
    assert len(children) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_gone(children, 5)


def test_hand_started_stages_serve_one_driver_after_another(folder: Path, tmp_path: Path) -> None:
    """At a unix socket, too, where the one that they listened at before is in the way."""
    environment = {**os.environ, SECRET_VARIABLE: SECRET}
    # Port 0 changes at every start, so take a free one that stays.
    with socket.create_server(("127.0.0.1", 0)) as server:
        addresses = [f"127.0.0.1:{server.getsockname()[1]}", f"unix:{tmp_path / 'stage'}"]
    command = [sys.executable, "-m", "bimetal.cli.main", "stage", "--listen"]
    stages = [
        subprocess.Popen([*command, address], env=environment, stdout=subprocess.PIPE)
        for address in addresses
    ]
    before = os.environ.get(SECRET_VARIABLE)
    os.environ[SECRET_VARIABLE] = SECRET
    try:
        answers = []
        for _ in range(2):
            for stage in stages:
                assert stage.stdout is not None
                assert stage.stdout.readline().startswith(b"LISTENING")
            driver = Driver(EngineOptions(plan=plan_document(folder, (0, 2, 4), addresses)))
            driver.start()
            answers.append(tokens_of(run_all(driver, [Generate("it", (3, 4), greedy_params(5))])["it"]))
            driver.stop()
        assert answers[0] == answers[1]
        assert len(answers[0]) == 5
        time.sleep(0.1)
        assert [stage.poll() for stage in stages] == [None, None]
    finally:
        if before is None:
            del os.environ[SECRET_VARIABLE]
        else:
            os.environ[SECRET_VARIABLE] = before
        for stage in stages:
            stage.kill()
            stage.wait()
