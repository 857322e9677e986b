"""What each link takes to carry a message between two processes of this machine.

    python benchmarks/links.py --links tcp nixl --sizes 64 65536 131072 262144 1048576 16777216

One way: half a round trip, median, from `send` to the payload in memory of the receiver's. Rate: messages sent one after
another without waiting for the other side, payload bytes over wall time. Payloads come in pieces of at most 1 MiB, as the
engine's outbox gives them. The best of --repeats counts, for a machine that does other things too. Two processes: each end polls as a GPU's stage does (--spin-s 0: sleeps as a CPU's does).
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import statistics
import sys
import time
from multiprocessing.connection import Connection as Pipe

import numpy as np

from bimetal.engine.link import nixl
from bimetal.engine.link.tcp import Connection, Incoming, Listener, Outgoing, TcpIncoming, connect
from bimetal.engine.wire.frame import Header, Kind

SECRET = "a benchmark's secret"
PIECE_BYTES = 1 << 20
"""The outbox's; importing that would import torch into every process."""


class Side:
    """One process's ends of two edges, there and back."""

    def __init__(self, pipe: Pipe, link: str, largest_bytes: int, spin_s: float, inline_bytes: int) -> None:
        nixl.INLINE_BYTES = inline_bytes
        sys.setswitchinterval(1e-4)  # as a stage's process does
        accepted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        listener = Listener("127.0.0.1:0", SECRET, lambda _hello, c: accepted.put(c), lambda _n, _e: None)
        pipe.send(listener.address)
        outgoing = connect(pipe.recv(), SECRET, "edge:hidden:0:1")
        incoming = accepted.get()
        self.incoming: Incoming
        self.outgoing: Outgoing
        if link == "tcp":
            self.incoming, self.outgoing = TcpIncoming(incoming, spin_s), outgoing
        else:
            self.incoming = nixl.NixlIncoming(incoming, largest_bytes, spin_s)
            self.outgoing = nixl.NixlOutgoing(outgoing)
        self.source = np.random.default_rng(0).integers(0, 256, largest_bytes, dtype=np.uint8).data
        self.target = memoryview(bytearray(largest_bytes))

    def send(self, size: int) -> None:
        parts = (self.source[i : min(i + PIECE_BYTES, size)] for i in range(0, size, PIECE_BYTES))
        self.outgoing.send(Header(Kind.HIDDEN, size), parts)

    def receive(self) -> None:
        self.incoming.next(lambda header: self.target[: header.num_bytes])


def rounds_of(size: int) -> int:
    return max(min(400, (256 << 20) // size), 10)


def other_side(pipe: Pipe, link: str, sizes: list[int], spin_s: float, inline_bytes: int) -> None:
    side = Side(pipe, link, max(sizes), spin_s, inline_bytes)
    for size in sizes:
        for _ in range(rounds_of(size)):
            side.receive()
            side.send(size)
        for _ in range(rounds_of(size)):
            side.receive()
        side.send(1)
    pipe.recv()


def measure(link: str, sizes: list[int], spin_s: float, inline_bytes: int) -> dict[int, tuple[float, float]]:
    """{size: (one way in seconds, bytes a second)}"""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=other_side, args=(other, link, sizes, spin_s, inline_bytes), daemon=True)
    process.start()
    side = Side(pipe, link, max(sizes), spin_s, inline_bytes)
    found = {}
    for size in sizes:
        rounds = rounds_of(size)
        times_s = []
        for _ in range(rounds):
            began = time.perf_counter()
            side.send(size)
            side.receive()
            times_s.append((time.perf_counter() - began) / 2)
        began = time.perf_counter()
        for _ in range(rounds):
            side.send(size)
        side.receive()
        rate = rounds * size / (time.perf_counter() - began)
        found[size] = statistics.median(times_s), rate
    pipe.send("done")
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", default=["tcp", "nixl"], choices=["tcp", "nixl"])
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[64, 64 << 10, 1 << 20, 16 << 20], help="bytes"
    )
    parser.add_argument(
        "--spin-s", type=float, default=0.002, help="seconds that a receiver polls before it sleeps"
    )
    parser.add_argument(
        "--inline-bytes",
        type=int,
        default=nixl.INLINE_BYTES,
        help="largest payload that link nixl sends beside NIXL",
    )
    parser.add_argument("--repeats", type=int, default=3, help="of all, the links in turn; the best counts")
    options = parser.parse_args()
    print("| bytes | " + " | ".join(f"{link}, one way | {link}, rate" for link in options.links) + " |")
    print("| --- |" + " --- | --- |" * len(options.links))
    columns: list[dict[int, tuple[float, float]]] = [{} for _ in options.links]
    for _ in range(options.repeats):
        for link, column in zip(options.links, columns, strict=True):
            for size, (one_way_s, rate) in measure(
                link, options.sizes, options.spin_s, options.inline_bytes
            ).items():
                least, most = column.get(size, (one_way_s, rate))
                column[size] = min(least, one_way_s), max(most, rate)
    for size in options.sizes:
        cells = [f"{c[size][0] * 1e6:,.0f} µs | {c[size][1] / 1e9:.2f} GB/s" for c in columns]
        print(f"| {size:,} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
