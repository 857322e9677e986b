"""`bimetal serve` with the scripted driver in place of the engine's: the whole server, as a process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bimetal.errors import BimetalError
from bimetal.gateway.gateway import GatewaySettings
from bimetal.gateway.server import ServerSettings, run_server

DRIVER = Path(__file__).with_name("scripted_driver.py")


def main() -> None:
    options = json.loads(sys.argv[1])
    gateway = GatewaySettings(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in options["gateway"].items()}
    )
    command = options.get("command") or [
        sys.executable,
        str(DRIVER),
        "--script",
        json.dumps(options["script"]),
    ]
    try:
        run_server(
            ServerSettings(port=options["port"], gateway=gateway),
            lambda address: [*command, "--connect", address],
        )
    except BimetalError as error:
        sys.exit(f"bimetal: {error}")


if __name__ == "__main__":
    main()
