"""Link nixl: what goes in comes out, a lost peer is an error, strangers learn nothing, tokens are those of link tcp."""

from __future__ import annotations

import itertools
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from threading import enumerate as enumerate_threads

import numpy as np
import pytest
from tests.engine.checkpoints import make_checkpoint
from tests.engine.serving import SECRET, greedy_params, run_all, threaded_engine, tokens_of

from bimetal.engine.link.nixl import (
    INLINE_BYTES,
    SLOT_BYTES,
    NixlIncoming,
    NixlOutgoing,
    RingShape,
    load_nixl,
)
from bimetal.engine.link.tcp import Connection, Listener, connect, fresh_memory
from bimetal.engine.wire.api import Generate
from bimetal.engine.wire.frame import Header, Kind
from bimetal.errors import ConfigError, LinkError


def _nixl_is_missing() -> str:
    try:
        load_nixl()
    except ConfigError as error:
        return str(error)
    return ""


MISSING = _nixl_is_missing()
needs_nixl = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@contextmanager
def connected() -> Iterator[tuple[Connection, Connection]]:
    """(sending, receiving) ends of an authenticated connection."""
    accepted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    listener = Listener("127.0.0.1:0", SECRET, lambda _hello, c: accepted.put(c), lambda _name, _error: None)
    sending = connect(listener.address, SECRET, "edge:hidden:0:1")
    receiving = accepted.get(timeout=10)
    try:
        yield sending, receiving
    finally:
        sending.close()
        receiving.close()
        listener.close()


@contextmanager
def edge(largest_bytes: int) -> Iterator[tuple[NixlOutgoing, NixlIncoming]]:
    with connected() as (sending, receiving):
        incoming = NixlIncoming(receiving, largest_bytes, 0.0)
        outgoing = NixlOutgoing(sending)
        yield outgoing, incoming
        outgoing.close()
        incoming.close()


def in_thread(work: Callable[[], None]) -> tuple[Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def receivers() -> set[Thread]:
    """Those of link nixl in this process."""
    return {thread for thread in enumerate_threads() if thread.name == "nixl-receiver"}


@pytest.mark.parametrize("largest_bytes", [0, 1, 4096, 4097, 3 << 20, 1 << 30])
def test_a_ring_is_bounded_and_has_slots_to_credit(largest_bytes: int) -> None:
    ring = RingShape.for_messages(largest_bytes)
    assert 8 <= ring.num_slots <= 64
    assert 4096 <= ring.slot_bytes <= SLOT_BYTES
    assert ring.num_slots * ring.slot_bytes >= min(2 * largest_bytes, 64 << 20)


@needs_nixl
@pytest.mark.parametrize("seed", range(3))
def test_messages_of_all_sizes_come_back_equal_and_in_order(seed: int) -> None:
    """Through a ring of 8 slots of 256 KiB: from nothing to several times the ring, in parts of any size."""
    largest = 256 << 10
    ring_bytes = 8 * largest
    rng = np.random.default_rng(seed)
    edges = [
        0,
        1,
        INLINE_BYTES,
        INLINE_BYTES + 1,
        largest,
        largest + 1,
        ring_bytes,
        ring_bytes + 1,
        3 * ring_bytes + 5,
    ]
    sizes = edges + [int(2**x) for x in rng.uniform(0, 22, 40)]
    rng.shuffle(sizes)
    messages = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    with edge(largest) as (outgoing, incoming):

        def send_all() -> None:
            parts_rng = np.random.default_rng(seed)
            for number, message in enumerate(messages):
                cuts = sorted(parts_rng.integers(0, len(message) + 1, 3).tolist())
                parts = [message[a:b].data for a, b in itertools.pairwise([0, *cuts, len(message)])]
                outgoing.send(Header(Kind.HIDDEN, len(message), 1, number), parts)

        thread, errors = in_thread(send_all)
        for number, message in enumerate(messages):
            if number % 10 == 9:
                time.sleep(0.02)  # the sender fills the ring and waits
            header, payload = incoming.next(fresh_memory)
            assert header.step == number
            assert np.array_equal(np.frombuffer(payload, np.uint8), message)
        thread.join(10)
        assert not thread.is_alive()
        assert not errors
        assert incoming.poll(fresh_memory) is None


@needs_nixl
def test_a_message_arrives_while_its_receiver_is_busy() -> None:
    """A stage that computes does not stop the one before it."""
    message = np.arange(4 << 20, dtype=np.uint32).view(np.uint8)[: 4 << 20]
    with edge(8 << 20) as (outgoing, incoming):
        thread, errors = in_thread(lambda: outgoing.send(Header(Kind.HIDDEN, len(message)), (message.data,)))
        thread.join(10)  # nobody asks for the message
        assert not thread.is_alive()
        assert not errors
        _header, payload = incoming.next(fresh_memory)
        assert np.array_equal(np.frombuffer(payload, np.uint8), message)


@needs_nixl
def test_a_receiver_that_goes_ends_a_sender_that_waits() -> None:
    message = bytes(16 << 20)
    with edge(256 << 10) as (outgoing, incoming):
        thread, errors = in_thread(lambda: outgoing.send(Header(Kind.HIDDEN, len(message)), (message,)))
        time.sleep(0.3)
        assert thread.is_alive()  # for a slot
        incoming.close()
        thread.join(5)
        assert not thread.is_alive()
        assert isinstance(errors[0], LinkError)


_SENDER = """
import sys
from bimetal.engine.link.nixl import NixlOutgoing
from bimetal.engine.link.tcp import connect
from bimetal.engine.wire.frame import Header, Kind

outgoing = NixlOutgoing(connect(sys.argv[1], sys.argv[2], "edge:hidden:0:1"))

def parts():
    yield bytes(1 << 20)
    print("half", flush=True)
    sys.stdin.read()

outgoing.send(Header(Kind.HIDDEN, 2 << 20), parts())
"""


@needs_nixl
def test_a_sender_killed_inside_a_message_is_an_error() -> None:
    accepted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    listener = Listener("127.0.0.1:0", SECRET, lambda _hello, c: accepted.put(c), lambda _name, _error: None)
    sender = subprocess.Popen(
        [sys.executable, "-c", _SENDER, listener.address, SECRET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        incoming = NixlIncoming(accepted.get(timeout=60), 2 << 20, 0.0)
        thread, errors = in_thread(lambda: incoming.next(fresh_memory) and None)
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"half\n"
        assert thread.is_alive()
        sender.kill()
        thread.join(5)
        assert not thread.is_alive()
        assert isinstance(errors[0], LinkError)
    finally:
        sender.kill()
        sender.wait()
        listener.close()


@needs_nixl
def test_a_peer_without_the_secret_is_refused_and_told_nothing() -> None:
    accepted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    refused: queue.SimpleQueue[LinkError] = queue.SimpleQueue()
    listener = Listener(
        "127.0.0.1:0", SECRET, lambda _hello, c: accepted.put(c), lambda _name, error: refused.put(error)
    )
    with pytest.raises(LinkError, match="secret"):
        NixlOutgoing(connect(listener.address, "another", "edge:hidden:0:1"))
    assert "secret" in str(refused.get(timeout=10))
    assert accepted.empty()
    listener.close()


@needs_nixl
def test_the_other_link_at_the_other_end_is_named() -> None:
    with connected() as (sending, receiving):
        receiving.send(Header(Kind.HIDDEN, 4), (b"rows",))
        with pytest.raises(LinkError, match="choose the same link"):
            NixlOutgoing(sending)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'bimetal\[nixl\]'"):
        load_nixl()


@needs_nixl
@pytest.mark.parametrize("boundaries", [(0, 2, 4), (0, 1, 3, 4)])
def test_tokens_are_those_of_link_tcp(
    boundaries: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bimetal.engine.link.nixl.INLINE_BYTES", 128
    )  # the tiny model's rows go through the ring
    folder = make_checkpoint("llama", tmp_path)
    rng = np.random.default_rng(0)
    requests = [
        Generate(str(i), tuple(rng.integers(3, 200, int(n)).tolist()), greedy_params(12))
        for i, n in enumerate(rng.integers(1, 90, 8))
    ]
    tokens = {}
    for link in ("tcp", "nixl"):
        before = receivers()
        with threaded_engine(folder, boundaries, link=link) as driver:
            outputs = run_all(driver, requests)
            assert len(receivers() - before) == (len(boundaries) - 2 if link == "nixl" else 0)
        tokens[link] = {name: tokens_of(output) for name, output in outputs.items()}
    assert tokens["nixl"] == tokens["tcp"]
    assert all(len(t) == 12 for t in tokens["nixl"].values())
