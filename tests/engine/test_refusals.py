"""The stage's port takes only peers that know the secret and speak this version; the engine serves on whatever comes."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.checkpoints import make_checkpoint
from tests.engine.serving import SECRET, greedy_params, plan_document, run_all, threaded_engine, tokens_of

from bimetal.engine.driver.driver import Driver
from bimetal.engine.link.tcp import Connection, connect
from bimetal.engine.wire.api import Generate
from bimetal.engine.wire.frame import (
    HEADER_BYTES,
    MAX_HELLO_BYTES,
    WIRE_VERSION,
    Header,
    Kind,
    pack_json,
    unpack_json,
)
from bimetal.engine.wire.options import EngineOptions
from bimetal.errors import LinkError, StageError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, str]]:
    folder: Path = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    with threaded_engine(folder, (0, 2, 4)) as driver:
        yield driver, str(driver.replica.stages[1].address)


@pytest.fixture(autouse=True)
def _serves_on(engine: tuple[Driver, str]) -> Iterator[None]:
    """After each test the engine gives the tokens that it gave before."""
    driver, _address = engine
    before = _generate(driver, "before")
    yield
    assert _generate(driver, "after") == before


def _generate(driver: Driver, name: str) -> list[int]:
    outputs = run_all(driver, [Generate(name, (3, 4, 5), greedy_params(6))])
    return tokens_of(outputs[name])


def _dial(address: str) -> Connection:
    host, port = address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), timeout=10)
    return Connection(sock, address)


def _refusal(connection: Connection) -> str:
    """The reason that the stage gives before it closes."""
    header, payload = connection.receive(MAX_HELLO_BYTES)
    assert header.kind is Kind.REFUSED
    with pytest.raises(LinkError, match="closed the connection"):
        connection.receive_header()
    return str(unpack_json(payload)["why"])


def test_a_wrong_secret_is_refused(engine: tuple[Driver, str]) -> None:
    with pytest.raises(LinkError, match="secret differs: set the same BIMETAL_SECRET"):
        connect(engine[1], SECRET + "x", "driver")


def test_a_wrong_version_is_refused(engine: tuple[Driver, str]) -> None:
    connection = _dial(engine[1])
    connection.receive(MAX_HELLO_BYTES)  # the challenge
    frame = bytearray(pack_json(Kind.HELLO, {"version": WIRE_VERSION + 1}))
    frame[4] = WIRE_VERSION + 1
    connection.send_frame(bytes(frame))
    assert f"version {WIRE_VERSION + 1}" in _refusal(connection)


def test_a_truncated_message_is_refused(engine: tuple[Driver, str]) -> None:
    connection = _dial(engine[1])
    connection.receive(MAX_HELLO_BYTES)
    connection.send_frame(Header(Kind.HELLO, 100).pack() + b"{")
    connection._socket.shutdown(socket.SHUT_WR)
    assert "inside a message" in _refusal(connection)


def test_a_megabyte_of_random_bytes_is_refused(engine: tuple[Driver, str]) -> None:
    connection = _dial(engine[1])
    connection.receive(MAX_HELLO_BYTES)
    try:
        connection.send_frame(random.Random(5).randbytes(1 << 20))
    except LinkError:
        return  # closed on us in the middle, which is fine
    try:
        header, payload = connection.receive(MAX_HELLO_BYTES)
    except LinkError:
        return  # reset: unread bytes were thrown away with the socket
    assert header.kind is Kind.REFUSED
    assert "does not speak bimetal's wire" in unpack_json(payload)["why"]


def test_a_huge_hello_is_refused_before_it_is_read(engine: tuple[Driver, str]) -> None:
    connection = _dial(engine[1])
    connection.receive(MAX_HELLO_BYTES)
    connection.send_frame(Header(Kind.HELLO, 1 << 40).pack())
    assert f"the limit here is {MAX_HELLO_BYTES}" in _refusal(connection)


@pytest.mark.parametrize(
    "hello",
    [
        {"role": "driver", "nonce": "n", "mac": "\u00e9"},
        {"role": "\ud800", "nonce": "n", "mac": "\udfff"},
        {"role": "driver", "nonce": "n", "mac": 5},
        {"role": ["driver"]},
    ],
)
def test_a_hello_of_odd_characters_is_refused(engine: tuple[Driver, str], hello: dict[str, object]) -> None:
    connection = _dial(engine[1])
    connection.receive(MAX_HELLO_BYTES)
    connection.send_frame(pack_json(Kind.HELLO, {"version": WIRE_VERSION, **hello}))
    assert "secret differs" in (why := _refusal(connection)) or "without role" in why


def test_a_hello_nested_without_end_is_refused(engine: tuple[Driver, str]) -> None:
    connection = _dial(engine[1])
    connection.receive(MAX_HELLO_BYTES)
    connection.send_frame(Header(Kind.HELLO, MAX_HELLO_BYTES).pack() + b"[" * MAX_HELLO_BYTES)
    assert "not JSON" in _refusal(connection)


def test_a_listener_outlives_a_shortage_of_files(engine: tuple[Driver, str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [socket.socket() for _ in range(8)]
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    highest = max(spare)
    for number in spare:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest - 1, hard))
    try:
        host, port = engine[1].rsplit(":", 1)
        for sock in waiting:
            sock.connect((host, int(port)))
        time.sleep(0.3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for sock in waiting:
            sock.close()
    connect(engine[1], SECRET, "probe").close()


def test_a_host_that_is_gone_without_a_word_is_missed_soon(engine: tuple[Driver, str]) -> None:
    connection = connect(engine[1], SECRET, "probe")
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    idle_s, interval_s, probes, unacknowledged_ms = (
        connection._socket.getsockopt(socket.IPPROTO_TCP, option) for option in options
    )
    connection.close()
    assert idle_s + interval_s * probes <= 30
    assert unacknowledged_ms <= 30_000


def test_a_second_driver_is_refused(engine: tuple[Driver, str]) -> None:
    connection = connect(engine[1], SECRET, "driver")
    header, payload = connection.receive()
    assert header.kind is Kind.FAILED
    assert "already has a driver" in unpack_json(payload)["message"]


def test_a_second_engine_says_why_it_has_no_stage(engine: tuple[Driver, str]) -> None:
    """Not that the stage is gone: its word came before its connection ended."""
    document = plan_document(engine[0].plan.model, (0, 4), [engine[1]])
    second = Driver(EngineOptions(plan=document))
    with pytest.raises(StageError, match="stage 0 on node 'node0': this stage already has a driver"):
        second.start()
    second.stop()


def test_an_unknown_role_is_refused(engine: tuple[Driver, str]) -> None:
    connection = connect(engine[1], SECRET, "tourist")
    header, payload = connection.receive()
    assert header.kind is Kind.FAILED
    assert "tourist" in unpack_json(payload)["message"]


def test_silence_is_no_connection(engine: tuple[Driver, str]) -> None:
    """A peer that connects and says nothing holds a thread for a few seconds at most, and nobody else up."""
    idle = [_dial(engine[1]) for _ in range(20)]
    connect(engine[1], SECRET, "probe").close()
    for connection in idle:
        connection.close()


def test_nobody_there_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LinkError, match=f"nothing answers at 127.0.0.1:{port}"):
        connect(f"127.0.0.1:{port}", os.environ.get("BIMETAL_SECRET", "s"), "driver", timeout_s=0.3)
    assert HEADER_BYTES == 32
