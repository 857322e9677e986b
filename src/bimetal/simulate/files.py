"""A simulation as parquet and as a picture. Needs pyarrow and matplotlib, which are imported only here."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bimetal.simulate.run import Simulation

TIMELINE_BINS = 120


def write_requests(run: Simulation, path: Path) -> None:
    """One row a request."""
    import pyarrow
    import pyarrow.parquet

    trace = run.trace
    index = np.zeros(len(trace), dtype=np.int64) if trace.class_index is None else trace.class_index
    table = pyarrow.table(
        {
            "arrival_s": trace.arrival_s,
            "input_tokens": trace.input_tokens,
            "output_tokens": trace.output_tokens,
            "request_class": np.array(trace.classes)[index],
            "replica": run.replica,
            "ttft_s": run.ttft_s,
            "tpot_s": run.tpot_s,
            "done_s": run.done_s,
        }
    )
    pyarrow.parquet.write_table(table, path)


def write_timeline(run: Simulation, path: Path) -> None:
    """Requests in the system, TTFT and TPOT over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    edges = np.linspace(0, run.makespan_s, TIMELINE_BINS + 1)
    arrivals, ends = np.sort(run.trace.arrival_s), np.sort(run.done_s)
    inside = np.searchsorted(arrivals, edges, side="right") - np.searchsorted(ends, edges, side="right")
    figure, (top, middle, bottom) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 7))
    top.step(edges, inside, where="post", color="tab:gray")
    top.set_ylabel("requests in system")
    middle.plot(run.trace.arrival_s, run.ttft_s, ".", markersize=2, color="tab:blue")
    middle.set_ylabel("TTFT, s")
    bottom.plot(run.trace.arrival_s, run.tpot_s, ".", markersize=2, color="tab:red")
    bottom.set_ylabel("TPOT, s")
    bottom.set_xlabel("arrival, s")
    for axes in (top, middle, bottom):
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
