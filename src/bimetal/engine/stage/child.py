"""A stage as a child of its driver. The end of its standard input, whose other end the driver holds, is its own: from the
first moment, while torch is still being imported, which takes seconds.

    python -m bimetal.engine.stage.child --exit-with-parent
"""

from __future__ import annotations

import os
import threading


def _exit_when_parent_does() -> None:
    # Unbuffered: a buffer's lock would be held while the interpreter ends.
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    threading.Thread(target=_exit_when_parent_does, daemon=True).start()
    from bimetal.engine.stage.process import main as run_stage

    run_stage()


if __name__ == "__main__":
    main()
