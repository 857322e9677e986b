"""The life of one server process: port, driver child, progress bars, signals, and an orderly end.

The driver is started with a command line that is given; it connects back over a unix-domain socket in a private
folder. Whatever happens to either, nothing is left running five seconds later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from bimetal.engine.wire.api import Ready
from bimetal.engine.wire.handshake import SECRET_VARIABLE, new_secret
from bimetal.errors import BimetalError, ConfigError, EngineError
from bimetal.gateway.app import create_app
from bimetal.gateway.engine_client import EngineClient
from bimetal.gateway.gateway import Gateway, GatewaySettings
from bimetal.gateway.loading import LoadingBars

STAGES_SECRET_VARIABLE = f"{SECRET_VARIABLE}_STAGES"
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""Longer than most clients and proxies keep an idle connection, so that they are the ones to close it."""
# Together with the second that answers get after a failure, these stay below five seconds.
_DRAIN_S = 1
_DRIVER_STOPS_S = 2.0
_DRIVER_ENDS_S = 0.5
_STATUS_S = 1.0
_SAY_WHY_S = 0.5
"""A dead engine's server still answers for this long, so that clients and probes hear why."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    log_level: str = "warning"


EngineCommand = Callable[[str], Sequence[str]]
"""The driver's command line, given the address where it finds the gateway."""


def run_server(settings: ServerSettings, engine_command: EngineCommand) -> None:
    """Serve until SIGINT or SIGTERM; EngineError if the engine ends before that."""
    asyncio.run(_Life(settings, engine_command).run())


def bind(host: str, port: int) -> socket.socket:
    """ConfigError if the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small pieces at once only on sockets that say they are TCP, and accepted ones inherit this; without
    # it every streamed token may wait 40 ms for the client's acknowledgement of the one before.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}: choose another --host or --port"
        ) from error
    return sock


def driver_environment(environment: Mapping[str, str], secret: str) -> dict[str, str]:
    """The driver gets a secret of its own; the user's, which stages on other hosts share, goes along."""
    child = dict(environment)
    stages_secret = child.pop(SECRET_VARIABLE, None)
    if stages_secret is not None:
        child[STAGES_SECRET_VARIABLE] = stages_secret
    child[SECRET_VARIABLE] = secret
    return child


def _ended_with(status: int) -> str:
    if status < 0:  # which leaves it no time for a message
        return f"its driver was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"its driver ended with status {status}; its own message is above"


class _UvicornServer(uvicorn.Server):
    """Signals are handled around it, since the engine has to stop as well."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Life:
    def __init__(self, settings: ServerSettings, engine_command: EngineCommand) -> None:
        self._settings = settings
        self._engine_command = engine_command
        self._secret = new_secret()
        self._bars = LoadingBars()
        self._client = EngineClient(
            self._secret,
            on_loading=self._bars.update,
            on_ready=self._on_ready,
            on_failure=lambda _: self._ended.set(),
            why_lost=self._why_lost,
        )
        self._gateway = Gateway(settings.gateway, self._client)
        self._ended = asyncio.Event()
        self._stop_asked = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""

    async def run(self) -> None:
        settings = self._settings
        sock = bind(settings.host, settings.port)
        host, port = sock.getsockname()[:2]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server = _UvicornServer(
            uvicorn.Config(
                create_app(self._gateway),
                log_level=settings.log_level,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_DRAIN_S,
            )
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, server)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        with tempfile.TemporaryDirectory(prefix="bimetal-") as folder:
            try:
                await self._start_driver(Path(folder) / "engine.sock")
                await self._ended.wait()
                await self._say_why()
            finally:
                self._bars.close()
                server.should_exit = True
                await serving
                await self._stop_driver()
                self._gateway.close()
                sock.close()
        if not self._stop_asked:
            raise EngineError(self._client.failure or "the engine ended")

    async def _start_driver(self, path: Path) -> None:
        await self._client.listen(str(path))
        command = list(self._engine_command(f"unix:{path}"))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                env=driver_environment(os.environ, self._secret),
                start_new_session=True,  # Ctrl-C comes here, and the driver is then stopped in order
            )
        except OSError as error:
            raise EngineError(f"cannot start the engine's driver {command[0]!r}: {error.strerror}") from error
        self._spawn(self._watch_driver(self._process))

    async def _watch_driver(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        # What it said before it ended may still be on its way through the socket.
        await asyncio.sleep(0.1)
        self._client.fail(_ended_with(status))

    async def _why_lost(self) -> str:
        """A driver whose connection ends is about to end itself; its status says more."""
        assert self._process is not None, "a driver connects after it was started"
        try:
            return _ended_with(await asyncio.wait_for(self._process.wait(), _STATUS_S))
        except TimeoutError:
            return "its driver closed the connection but did not end"

    def _on_ready(self, ready: Ready) -> None:
        self._spawn(self._open(ready))

    async def _open(self, ready: Ready) -> None:
        try:
            await self._gateway.load_text(ready)
        except BimetalError as error:
            self._client.fail(str(error))
            return
        except Exception as error:
            self._client.fail(f"{ready.model_path}: its tokenizer or chat template cannot be read: {error!r}")
            return
        self._bars.close()
        names = ", ".join(self._gateway.served_names)
        print(f"bimetal: serving {names} on {self._url} (context {ready.max_model_len} tokens)", flush=True)

    def _on_signal(self, server: uvicorn.Server) -> None:
        if self._stop_asked:
            # Asked twice: no more waiting for anybody.
            server.force_exit = True
            self._kill_driver()
            return
        self._stop_asked = True
        self._client.fail("the server is shutting down")
        self._ended.set()

    async def _say_why(self) -> None:
        if not self._stop_asked:
            await asyncio.sleep(_SAY_WHY_S)

    async def _stop_driver(self) -> None:
        await self._client.close()
        process = self._process
        if process is None:
            return
        for wait_s, end in ((_DRIVER_STOPS_S, process.terminate), (_DRIVER_ENDS_S, self._kill_driver)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), wait_s)
                return
            with contextlib.suppress(ProcessLookupError):
                end()
        await process.wait()

    def _kill_driver(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
