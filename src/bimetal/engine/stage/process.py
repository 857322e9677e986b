"""A stage's process: listens, takes one driver, obeys it, and ends (or starts afresh) when the driver is gone.

    python -m bimetal.engine.stage.process --listen 127.0.0.1:29400

Prints `LISTENING host:port` once it can be connected to. The secret comes from BIMETAL_SECRET.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from bimetal.engine.link.tcp import Connection, Incoming, Listener, Outgoing, TcpIncoming, connect
from bimetal.engine.stage.loop import Inputs, MaskInbox, StageLoop
from bimetal.engine.stage.outbox import Outbox
from bimetal.engine.stage.session import StageSession
from bimetal.engine.wire.control import (
    AskStats,
    LoadStage,
    StageFailed,
    StageStarted,
    StartStage,
    decode_control,
    encode_control,
)
from bimetal.engine.wire.frame import MAX_CONTROL_BYTES, Header, Kind, pack_json
from bimetal.engine.wire.handshake import SECRET_VARIABLE, Hello
from bimetal.engine.wire.step import decode_step
from bimetal.errors import BimetalError, LinkError, StageError

_EDGE_TIMEOUT_S = 60.0
_SPIN_S = 0.002
"""A GPU's stage polls for its input this long before it sleeps: a core of its host is cheaper than its own idle time."""
_SWITCH_INTERVAL_S = 2e-5
"""A receiving thread must not wait for the interpreter longer than a hop takes."""
_INTERRUPTED = 130
"""What a shell gives for a process that Ctrl-C ended."""


@dataclass(frozen=True, slots=True)
class _Ended:
    why: str


class StageProcess:
    """Connections arrive in threads; everything that touches the model happens in `run`, on the main thread."""

    def __init__(self, address: str, secret: str, on_end: Callable[[], None]) -> None:
        """`on_end` is called, on the connection's thread, once the driver is gone."""
        self._secret = secret
        self._on_end = on_end
        self._commands: queue.SimpleQueue[tuple[Header, memoryview] | _Ended] = queue.SimpleQueue()
        self._driver: Connection | None = None
        self._driver_lock = threading.Lock()
        self._masks = MaskInbox()
        self._edges: dict[str, queue.SimpleQueue[Connection]] = {
            kind: queue.SimpleQueue() for kind in ("hidden", "ids")
        }
        self._session: StageSession | None = None
        self._loop: StageLoop | None = None
        self._listener = Listener(address, secret, self._on_connect, self._on_refused)

    @property
    def address(self) -> str:
        return self._listener.address

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    # -- connections, each in a thread of its own -------------------------------------------------------------------

    def _on_refused(self, name: str, error: LinkError) -> None:
        print(f"stage: refused {name}: {error}", file=sys.stderr, flush=True)

    def _on_connect(self, hello: Hello, connection: Connection) -> None:
        if hello.role == "driver":
            self._serve_driver(connection)
        elif hello.role.startswith("edge:") and hello.role.split(":")[1] in self._edges:
            self._edges[hello.role.split(":")[1]].put(connection)
        elif hello.role == "probe":
            self._serve_probe(connection)
        else:
            connection.send_frame(
                encode_control(StageFailed(f"a stage takes no connections of role {hello.role!r}"))
            )
            connection.close()

    def _serve_driver(self, connection: Connection) -> None:
        with self._driver_lock:
            busy = self._driver is not None
            if not busy:
                self._driver = connection
        if busy:
            connection.send_frame(
                encode_control(StageFailed("this stage already has a driver: stop that one first"))
            )
            connection.close()
            return
        error = connection.receive_forever(self._on_driver_frame)
        self._commands.put(_Ended(str(error)))
        self._on_end()

    def _on_driver_frame(self, header: Header, payload: memoryview) -> None:
        if header.kind is Kind.MASK:
            self._masks.put(header, payload)
        else:
            self._commands.put((header, payload))

    def _serve_probe(self, connection: Connection) -> None:
        """For `bimetal doctor`: what this node is, without loading anything."""
        from bimetal.engine.stage.probe import probe

        try:
            header, payload = connection.receive()
            if header.kind is Kind.PROBE:
                connection.send_frame(pack_json(Kind.PROBE, probe(bytes(payload))))
        except LinkError as error:
            self._on_refused(connection.peer, error)
        finally:
            connection.close()

    # -- commands, on the main thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """Obey until the driver is gone."""
        while True:
            try:
                command = self._next_command()
                if isinstance(command, _Ended):
                    # Threads that still wait hold this object, and would hold the weights.
                    self._session = self._loop = None
                    return
                self._obey(*command)
            except Exception as error:
                self._fail(error)

    def _next_command(self) -> tuple[Header, memoryview] | _Ended:
        """Wait for it; results that reach host memory meanwhile leave."""
        while self._loop is not None and self._loop.outbox.send_ready():
            with contextlib.suppress(queue.Empty):
                return self._commands.get_nowait()
        return self._commands.get()

    def _obey(self, header: Header, payload: memoryview) -> None:
        if header.kind is Kind.STEP:
            if self._loop is None:
                raise StageError("a STEP came before START")
            self._loop.run(header, decode_step(payload))
        elif header.kind is Kind.LOAD:
            self._load(decode_control(LoadStage, payload))
        elif header.kind is Kind.START:
            self._start(decode_control(StartStage, payload))
        elif header.kind is Kind.STATS:
            self._send_stats(decode_control(AskStats, payload))
        elif header.kind is Kind.STOP:
            self._on_end()
        else:
            raise StageError(f"a driver sends no {header.kind.name} frames")

    def _load(self, load: LoadStage) -> None:
        driver = self._driver
        assert driver is not None
        last_percent = -1

        def report(done: int, total: int) -> None:
            nonlocal last_percent
            percent = done * 100 // max(total, 1)
            if percent != last_percent:
                last_percent = percent
                document = {"stage": load.index, "done_bytes": done, "total_bytes": total}
                driver.send_frame(pack_json(Kind.LOADING, document))

        self._session = StageSession(load, report)
        driver.send_frame(encode_control(self._session.loaded))

    def _start(self, start: StartStage) -> None:
        if self._session is None:
            raise StageError("START came before LOAD")
        session = self._session
        self._loop, times = session.start(
            start.epoch, start.num_kv_blocks, lambda: self._join_edges(start, session)
        )
        assert self._driver is not None
        self._driver.send_frame(encode_control(StageStarted(times)))

    def _join_edges(self, start: StartStage, session: StageSession) -> tuple[Inputs, Outbox]:
        """Open the outgoing edges, take the incoming ones that other stages opened."""
        connections: dict[str, Connection] = {}
        for edge in start.outgoing:
            role = f"edge:{edge.kind}:{session.load.index}:{edge.target}"
            connections[edge.kind] = connect(edge.address, self._secret, role, _EDGE_TIMEOUT_S)
        incoming: dict[str, Incoming] = {}
        for kind in start.incoming:
            try:
                connection = self._edges[kind].get(timeout=_EDGE_TIMEOUT_S)
            except queue.Empty:
                raise StageError(
                    f"no stage opened edge {kind!r} within {_EDGE_TIMEOUT_S:.0f} s: is its node up?"
                ) from None
            incoming[kind] = _receiving_end(connection, kind, start, session)
        # After the incoming ones: a sending end may wait for what the receiving end, another stage's, tells it.
        outgoing = {kind: _sending_end(c, kind, start) for kind, c in connections.items()}
        outbox = Outbox(outgoing.get("hidden"), outgoing.get("ids"), self._driver, self._fail)
        return Inputs(incoming.get("hidden"), incoming.get("ids"), self._masks), outbox

    def _send_stats(self, ask: AskStats) -> None:
        assert self._driver is not None
        if self._loop is None or self._session is None:
            raise StageError("STATS came before START")
        stats = self._session.watch.switch(ask, self._loop.take_stats())
        self._driver.send_frame(encode_control(stats))

    def _fail(self, error: BaseException) -> None:
        """Tell the driver; it decides what becomes of the requests. One that is gone needs no word of it."""
        detail = "".join(traceback.format_exception(error))
        message = str(error) if isinstance(error, BimetalError) else f"{type(error).__name__}: {error}"
        if self._driver is not None:
            try:
                self._driver.send_frame(encode_control(StageFailed(message, detail[-4000:])))
            except LinkError:
                self._on_end()
                return
        trace = "" if isinstance(error, BimetalError) else f"\n{detail}"  # that says where our mistake is
        print(f"stage: {message}{trace}", file=sys.stderr, flush=True)


def _receiving_end(connection: Connection, kind: str, start: StartStage, session: StageSession) -> Incoming:
    spin_s = _SPIN_S if session.device.is_gpu else 0.0
    if kind == "hidden" and start.link == "nixl":
        from bimetal.engine.link.nixl import NixlIncoming

        return NixlIncoming(connection, session.largest_hidden_bytes, spin_s)
    return TcpIncoming(connection, spin_s, max(session.largest_hidden_bytes, MAX_CONTROL_BYTES))


def _sending_end(connection: Connection, kind: str, start: StartStage) -> Outgoing:
    if kind == "hidden" and start.link == "nixl":
        from bimetal.engine.link.nixl import NixlOutgoing

        return NixlOutgoing(connection)
    return connection


def _start_afresh() -> None:
    """Wait for the next driver in a new image of this process: nothing of the last one is left on the device."""
    os.execv(sys.executable, [sys.executable, "-m", "bimetal.engine.stage.process", *sys.argv[1:]])


def main() -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    parser = argparse.ArgumentParser(prog="bimetal stage")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="serve one driver, then end (stage.child)"
    )
    options = parser.parse_args()
    secret = os.environ.get(SECRET_VARIABLE)
    if not secret:
        sys.exit(f"bimetal stage: set {SECRET_VARIABLE} to the secret that the driver uses")
    try:
        # Whatever the main thread is doing when the driver goes, nobody waits for it any more.
        on_end = (lambda: os._exit(0)) if options.exit_with_parent else _start_afresh
        process = StageProcess(options.listen, secret, on_end)
    except BimetalError as error:
        sys.exit(f"bimetal stage: {error}")
    print(f"LISTENING {process.address}", flush=True)
    if options.exit_with_parent:
        os.dup2(2, 1)  # the driver reads no further, and a full pipe would hold up whoever prints
    try:
        process.run()
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
