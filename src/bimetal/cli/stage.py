"""`bimetal stage`: run one stage by hand on this host."""

from __future__ import annotations

import click


@click.command(name="stage")
@click.option(
    "--listen",
    required=True,
    metavar="HOST:PORT",
    help="Where the driver will reach this stage; unix:/path on one machine.",
)
def command(listen: str) -> None:
    """Wait for a driver, serve the layers it assigns, and wait again when it is gone.

    BIMETAL_SECRET must be the same here and at the driver. Example: BIMETAL_SECRET=... bimetal stage --listen 10.0.0.12:29400
    """
    import os
    import sys

    module = "bimetal.engine.stage.process"
    os.execv(sys.executable, [sys.executable, "-m", module, "--listen", listen])
