"""Stages that run as child processes of this machine."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

import bimetal
from bimetal.engine.wire.handshake import SECRET_VARIABLE
from bimetal.errors import StageError
from bimetal.plan import Stage

_START_TIMEOUT_S = 120.0


class StageChild:
    """One local stage process, listening on a port of its own choice."""

    def __init__(self, index: int, stage: Stage, secret: str) -> None:
        self.index = index
        environment = dict(os.environ)
        environment[SECRET_VARIABLE] = secret
        # The node's interpreter may be another than ours: it finds the same bimetal beside its own torch.
        package_root = str(Path(bimetal.__file__ or "").parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [package_root, environment.get("PYTHONPATH")])
        )
        if stage.num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(stage.num_threads)
        command = [stage.python or sys.executable, "-m", "bimetal.engine.stage.child", "--exit-with-parent"]
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,  # what was read ahead would be waited for in vain
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to the parent, which ends its children in order
            )
        except OSError as error:
            raise StageError(
                f"stage {index} cannot start {command[0]!r}: {error.strerror}: correct `python` of node {stage.node!r}"
            ) from error

    def wait_for_address(self) -> str:
        """host:port that the stage listens on."""
        assert self._process.stdout is not None
        line = b""
        deadline = time.monotonic() + _START_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.startswith(b"LISTENING"):
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise StageError(f"stage {self.index} did not start within {_START_TIMEOUT_S:.0f} s")
                line = self._process.stdout.readline()
                if not line:
                    raise StageError(
                        f"stage {self.index} ended with status {self._process.wait()} before it listened: "
                        "its own message is above; `bimetal doctor` checks interpreter and torch"
                    )
        return line.split()[1].decode()

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def ask_to_stop(self) -> None:
        """The end of its standard input is its end, unless it hangs."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def stop(self, timeout_s: float) -> None:
        """Ask, wait, then end it by signal."""
        self.ask_to_stop()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
