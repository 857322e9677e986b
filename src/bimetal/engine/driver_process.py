"""The driver as a process of its own, so that neither text nor HTTP ever waits for the scheduler, nor it for them.

    python -m bimetal.engine.driver_process --connect unix:/path --options JSON

Connects to the gateway, reports loading, then trades `wire.api` messages until either side goes away.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time

from bimetal.engine.driver.driver import Driver
from bimetal.engine.link.tcp import Connection, connect
from bimetal.engine.wire.api import Abort, Fatal, Generate, Outputs, decode, encode
from bimetal.engine.wire.frame import Header
from bimetal.engine.wire.handshake import SECRET_VARIABLE
from bimetal.engine.wire.options import EngineOptions
from bimetal.errors import BimetalError, LinkError

_POLL_S = 0.25
_SWITCH_INTERVAL_S = 2e-5
_STATS_INTERVAL_S = 1.0


def serve(driver: Driver, gateway: Connection) -> None:
    """Run until the gateway is gone; raises what stops the engine."""
    # From the start: a gateway that goes while weights load must not be waited for.
    threading.Thread(target=_receive, args=(driver, gateway), name="gateway", daemon=True).start()
    gateway.send_frame(encode(driver.start(lambda loading: gateway.send_frame(encode(loading)))))
    asked_s = time.monotonic()
    driver.ask_stage_stats()
    while True:
        outputs = driver.poll(_POLL_S)
        if outputs is None:
            return
        if outputs:
            gateway.send_frame(encode(Outputs(tuple(outputs))))
        now_s = time.monotonic()
        stage_stats = driver.stage_stats
        if now_s - asked_s >= _STATS_INTERVAL_S and stage_stats is not None:
            busy = tuple(min(s.busy_s / (now_s - asked_s), 1.0) for s in stage_stats)
            gateway.send_frame(encode(driver.stats(busy)))
            asked_s = now_s
            driver.ask_stage_stats()


def _receive(driver: Driver, gateway: Connection) -> None:
    def handle(header: Header, payload: memoryview) -> None:
        message = decode(header.kind, payload)
        if isinstance(message, Generate):
            driver.submit(message)
        elif isinstance(message, Abort):
            driver.abort(message.request_ids)

    gateway.receive_forever(handle)
    driver.interrupt()


def main() -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    parser = argparse.ArgumentParser(prog="bimetal.engine.driver_process")
    parser.add_argument("--connect", required=True, help="the gateway's address")
    parser.add_argument("--options", required=True, help="EngineOptions as JSON")
    arguments = parser.parse_args()
    secret = os.environ.pop(SECRET_VARIABLE, "")
    stage_secret = os.environ.pop(f"{SECRET_VARIABLE}_STAGES", "")
    if stage_secret:
        os.environ[SECRET_VARIABLE] = stage_secret
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the gateway's to handle: it closes the connection
    try:
        gateway = connect(arguments.connect, secret, "driver")
    except LinkError as error:
        sys.exit(f"bimetal driver: {error}")
    driver: Driver | None = None
    status = 0
    try:
        driver = Driver(EngineOptions.from_json(arguments.options))
        signal.signal(signal.SIGTERM, lambda *_: driver.interrupt() if driver else sys.exit(0))
        serve(driver, gateway)
    except BimetalError as error:
        if driver is None or not driver.interrupted:
            print(f"bimetal driver: {error}", file=sys.stderr, flush=True)
            with contextlib.suppress(LinkError):
                gateway.send_frame(encode(Fatal(str(error))))
            status = 1
    finally:
        if driver is not None:
            driver.stop()
        gateway.close()
    sys.exit(status)


if __name__ == "__main__":
    main()
