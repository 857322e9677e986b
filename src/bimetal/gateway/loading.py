"""One progress bar a stage while weights load; plain lines where stderr is no terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from bimetal.engine.wire.api import Loading
from bimetal.units import format_bytes


class LoadingBars:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._tasks: dict[int, TaskID] = {}
        self._progress: Progress | None = None
        self._announced: set[int] = set()
        self._closed = False

    def update(self, loading: Loading) -> None:
        if self._closed:
            return
        if not self._console.is_terminal:
            self._print_once_done(loading)
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("stage {task.fields[stage]}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=self._console,
            )
            self._progress.start()
        if loading.stage not in self._tasks:
            self._tasks[loading.stage] = self._progress.add_task("load", stage=loading.stage)
        self._progress.update(
            self._tasks[loading.stage], completed=loading.done_bytes, total=loading.total_bytes
        )

    def close(self) -> None:
        self._closed = True
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print_once_done(self, loading: Loading) -> None:
        if loading.done_bytes >= loading.total_bytes and loading.stage not in self._announced:
            self._announced.add(loading.stage)
            self._console.print(f"bimetal: stage {loading.stage} loaded {format_bytes(loading.total_bytes)}")
