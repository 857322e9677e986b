"""Addresses, and who answers at them: listeners that come late, go, or left something behind."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bimetal.engine.bench import parse_workload
from bimetal.engine.link.address import parse_address
from bimetal.engine.link.tcp import Connection, Listener, TcpIncoming, connect
from bimetal.engine.stage import process
from bimetal.engine.wire.frame import MAX_CONTROL_BYTES, Header, Kind
from bimetal.errors import ConfigError, LinkError

SECRET = "a secret of the tests"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def listen(address: str, secret: str = SECRET) -> Listener:
    return Listener(address, secret, lambda _hello, connection: connection.close(), lambda *_: None)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The current one."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


@pytest.mark.parametrize(
    ("address", "family", "target"),
    [
        ("10.0.0.1:29400", socket.AF_INET, ("10.0.0.1", 29400)),
        (":80", socket.AF_INET, ("127.0.0.1", 80)),
        ("[::1]:80", socket.AF_INET6, ("::1", 80)),
        ("unix:/tmp/a:b", socket.AF_UNIX, "/tmp/a:b"),
    ],
)
def test_addresses(address: str, family: int, target: Any) -> None:
    assert parse_address(address) == (family, target)


@pytest.mark.parametrize(
    "address", ["", "host", "host:", "host:65536", "host:-1", "host:\u00b2", "host:" + "9" * 5000, "unix:"]
)
def test_what_is_no_address_says_so(address: str, folder: Path) -> None:
    """`unix:` used to make the current folder unreadable."""
    mode = folder.stat().st_mode
    with pytest.raises(LinkError, match="neither host:port nor unix:/path"):
        listen(address)
    assert folder.stat().st_mode == mode


@pytest.mark.parametrize("text", ["1:1:\u00b2", "1:1:" + "9" * 5000, "1:1:0", "1:1", "1:-1:1"])
def test_what_is_no_workload_says_so(text: str) -> None:
    with pytest.raises(ConfigError, match="not REQUESTS:INPUT:OUTPUT"):
        parse_workload(text)


def test_a_unix_socket_is_taken_over_from_a_listener_that_ended(tmp_path: Path) -> None:
    """A stage that starts afresh finds the one that it listened at before."""
    address = f"unix:{tmp_path / 'stage'}"
    listen(address).close()
    second = listen(address)
    connect(address, SECRET, "probe").close()
    with pytest.raises(LinkError, match=r"Address already in use: choose another address"):
        listen(address)
    connect(address, SECRET, "probe").close()
    assert (tmp_path / "stage").stat().st_mode & 0o777 == 0o600
    second.close()


def test_a_file_is_no_socket_and_stays(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("of value")
    with pytest.raises(LinkError, match="choose another address"):
        listen(f"unix:{tmp_path / 'notes'}")
    assert (tmp_path / "notes").read_text() == "of value"


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_stage_that_starts_afresh_is_waited_for(is_reset: bool) -> None:
    """It drops what it had accepted from the next driver."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    listeners: list[Listener] = []

    def start_afresh() -> None:
        for _ in range(2):
            accepted, _peer = server.accept()
            if is_reset:
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            accepted.close()
        server.close()
        time.sleep(0.1)
        listeners.append(listen(f"127.0.0.1:{port}"))

    thread = threading.Thread(target=start_afresh)
    thread.start()
    connect(f"127.0.0.1:{port}", SECRET, "driver").close()
    thread.join()
    listeners[0].close()


def test_who_always_hangs_up_is_named_in_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(LinkError, match=f"{address} closed the connection|lost {address}"):
            connect(address, SECRET, "driver", timeout_s=0.3)
        server.shutdown(socket.SHUT_RDWR)


def test_a_refusal_is_not_tried_again() -> None:
    listener = listen("127.0.0.1:0")
    began_s = time.monotonic()
    with pytest.raises(LinkError, match="secret differs"):
        connect(listener.address, "another", "driver")
    assert time.monotonic() - began_s < 2
    listener.close()


def test_a_secret_of_any_bytes_is_a_secret() -> None:
    secret = os.fsdecode(b"\xff\xfe")  # as an environment variable gives it
    listener = listen("127.0.0.1:0", secret)
    connect(listener.address, secret, "driver").close()
    with pytest.raises(LinkError, match="secret differs"):
        connect(listener.address, os.fsdecode(b"\xff\xfd"), "driver")
    listener.close()


def test_an_edge_takes_messages_as_large_as_its_largest_step() -> None:
    """32,768 rows of 8,192 values in bfloat16 are 512 MiB, more than any control message may have."""
    num_bytes = 2 * MAX_CONTROL_BYTES
    session = SimpleNamespace(largest_hidden_bytes=num_bytes, device=SimpleNamespace(is_gpu=False))
    ours, theirs = socket.socketpair()
    asked = []

    def allocate(header: Header) -> memoryview:
        asked.append(header.num_bytes)
        return memoryview(b"")  # as if all of it had come

    edge = process._receiving_end(Connection(ours, "peer"), "hidden", SimpleNamespace(link="tcp"), session)  # type: ignore[arg-type]
    assert isinstance(edge, TcpIncoming)
    for step in (1, 2):
        theirs.sendall(Header(Kind.HIDDEN, num_bytes, 1, step).pack())
    edge.poll(allocate)
    edge.next(allocate)
    assert asked == [num_bytes] * 2
    theirs.sendall(Header(Kind.HIDDEN, num_bytes + 1, 1, 3).pack())
    with pytest.raises(LinkError, match=f"the limit here is {num_bytes}"):
        edge.poll(allocate)
    ours.close()
    theirs.close()
