"""What a stage adds to the time of its own compute: from a neighbour's message to the next one's.

    python benchmarks/hop.py --model Llama-3.1-8B --device cuda:0 --layers 2 --rows 1 32 256

One stage in a process of its own; this process is its driver and both its neighbours, without a device, so that one GPU is
enough. As the first stage it gets ids and gives hidden states, as the last hidden states and gives ids, in between hidden
states both ways. `through`: from the send to the arrival of the result, one step at a time, median. `step`: a step's time when
all inputs are there beforehand, so that nothing but compute is left. `added` is the difference: two ways over the link,
both copies, all launches. A round of two stages and one micro-batch has the `added` of first and last, less the link's own
time for both messages, which `benchmarks/links.py` gives, since here both ends of each are counted twice.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import time
from dataclasses import dataclass

import numpy as np

from bimetal.catalog.models import load_model_spec
from bimetal.engine.driver.children import StageChild
from bimetal.engine.link.tcp import Connection, Listener, TcpIncoming, connect
from bimetal.engine.wire.control import (
    LoadStage,
    StageEdge,
    StageFailed,
    StartStage,
    decode_control,
    encode_control,
)
from bimetal.engine.wire.frame import Header, Kind
from bimetal.engine.wire.step import Step, encode_step, pool_reference
from bimetal.plan import Stage

SECRET = "a benchmark's secret"
EPOCH = 1
SPIN_S = 0.002
BLOCK_TOKENS = 64
CONTEXT = 256
"""Tokens of each sequence; every step writes the same place, so that all of them take the same time."""
WIDTH = CONTEXT // BLOCK_TOKENS + 1
ENCODING_BFLOAT16 = 2


@dataclass(frozen=True, slots=True)
class Place:
    name: str
    is_first: bool
    is_last: bool


PLACES = (Place("first", True, False), Place("middle", False, False), Place("last", False, True))


class Neighbours:
    """The stage and all that it talks to."""

    def __init__(self, place: Place, options: argparse.Namespace) -> None:
        spec = load_model_spec(options.model)
        self.place, self.hidden_size, self.number = place, spec.hidden_size, 0
        start = 0 if place.is_first else spec.num_layers - options.layers if place.is_last else 1
        self.accepted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        listener = Listener(
            "127.0.0.1:0", SECRET, lambda _hello, c: self.accepted.put(c), lambda _n, _e: None
        )
        self.child = StageChild(0, Stage("here", "cpu", start, start + options.layers), SECRET)
        address = self.child.wait_for_address()
        self.driver = connect(address, SECRET, "driver")
        load = LoadStage(
            index=1,
            num_stages=3,
            model=options.model,
            start_layer=start,
            end_layer=start + options.layers,
            device=options.device,
            dtype="bfloat16",
            load_format="dummy",
            seed=0,
            block_tokens=BLOCK_TOKENS,
            max_model_len=WIDTH * BLOCK_TOKENS,
            max_num_seqs=max(options.rows),
            max_num_batched_tokens=max(4096, *options.rows),
            gpu_memory_utilization=0.8,
            kv_cache_bytes=None,
            enforce_eager=False,
            num_threads=1,
        )
        self.driver.send_frame(encode_control(load))
        self._await(Kind.LOADED)
        out = "ids" if place.is_last else "hidden"
        into = "ids" if place.is_first else "hidden"
        self.driver.send_frame(
            encode_control(
                StartStage(EPOCH, WIDTH * max(options.rows), (StageEdge(out, 2, listener.address),), (into,))
            )
        )
        self.outgoing = connect(address, SECRET, f"edge:{into}:0:1")
        self._await(Kind.STARTED)
        self.incoming = TcpIncoming(self.accepted.get(timeout=60), SPIN_S)
        self.memory = memoryview(bytearray(max(options.rows) * spec.hidden_size * 2))

    def _await(self, kind: Kind) -> None:
        while True:
            header, payload = self.driver.receive()
            if header.kind is Kind.FAILED:
                raise SystemExit(decode_control(StageFailed, payload).message)
            if header.kind is kind:
                return

    def announce(self, num_rows: int, *, waits: bool = True) -> int:
        """The STEP message of a decode step; whether a first stage waits for ids of the step before."""
        self.number += 1
        rows = np.arange(num_rows, dtype=np.int32)
        tables = rows[:, None] * WIDTH + np.arange(WIDTH, dtype=np.int32)
        step = Step(
            token_ids=pool_reference(rows) if self.place.is_first and waits else rows,
            positions=np.full(num_rows, CONTEXT, np.int32),
            slots=(rows * WIDTH + WIDTH - 1) * BLOCK_TOKENS + CONTEXT % BLOCK_TOKENS,
            query_starts=np.arange(num_rows + 1, dtype=np.int32),
            context_lens=np.full(num_rows, CONTEXT + 1, np.int32),
            block_tables=tables,
            sequence_slots=rows,
            logit_rows=rows,
            logit_sequences=rows,
            targets=np.full(num_rows, -1, np.int32),
            num_decodes=num_rows,
            ids_lag=1 if self.place.is_first and waits else 0,
        )
        payload = encode_step(step).data.cast("B")
        self.driver.send(Header(Kind.STEP, len(payload), EPOCH, self.number), (payload,))
        return self.number

    def feed(self, number: int, payload: memoryview) -> None:
        if self.place.is_first:  # ids of the step before
            header = Header(Kind.IDS, len(payload), EPOCH, number - 1)
        else:
            header = Header(Kind.HIDDEN, len(payload), EPOCH, number, flags=ENCODING_BFLOAT16)
        self.outgoing.send(header, (payload,))

    def receive(self) -> None:
        self.incoming.next(lambda header: self.memory[: header.num_bytes])

    def take(self) -> None:
        self.receive()
        if self.place.is_last:
            self._await(Kind.SAMPLED)

    def message(self, num_rows: int) -> memoryview:
        if self.place.is_first:
            return np.arange(num_rows, dtype=np.int32).data.cast("B")
        return np.zeros(num_rows * self.hidden_size * 2, np.uint8).data

    def measure(self, num_rows: int, num_steps: int) -> tuple[float, float, float]:
        """(median seconds through the stage, their 90th percentile, seconds a step when inputs are there)."""
        payload = self.message(num_rows)
        through = []
        number = self.announce(num_rows, waits=False)  # whose ids the next one waits for
        if not self.place.is_first:
            self.feed(number, payload)
        self.take()
        for _ in range(num_steps):
            number = self.announce(num_rows)
            ready = time.perf_counter() + 1e-3
            while time.perf_counter() < ready:
                pass
            began = time.perf_counter()
            self.feed(number, payload)
            self.receive()
            through.append(time.perf_counter() - began)
            if self.place.is_last:
                self._await(Kind.SAMPLED)
        return (
            statistics.median(through),
            float(np.percentile(through, 90)),
            self._step_s(num_rows, num_steps),
        )

    def _step_s(self, num_rows: int, num_steps: int) -> float:
        """Seconds a step while the stage has inputs for the next."""
        payload = self.message(num_rows)
        ahead = [self.announce(num_rows, waits=False) for _ in range(num_steps)]
        fed = 2
        if not self.place.is_first:
            for number in ahead[:fed]:
                self.feed(number, payload)
        self.take()
        began = time.perf_counter()
        for i in range(1, num_steps):
            if fed < num_steps and not self.place.is_first:
                self.feed(ahead[fed], payload)
                fed += 1
            self.take()
            if i == num_steps - 2:
                ended = time.perf_counter()
        return (ended - began) / (num_steps - 2)

    def close(self) -> None:
        self.driver.close()
        self.child.ask_to_stop()
        self.child.stop(2.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="Llama-3.1-8B", help="a catalogue model, or a folder with a config.json"
    )
    parser.add_argument("--device", default="cuda:0", help="cpu or cuda:N")
    parser.add_argument("--layers", type=int, default=2, help="that the stage holds")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--places", nargs="+", default=[p.name for p in PLACES])
    options = parser.parse_args()
    print("| stage | rows | through, p50 | p90 | step | added |\n| --- | --- | --- | --- | --- | --- |")
    for place in PLACES:
        if place.name not in options.places:
            continue
        neighbours = Neighbours(place, options)
        try:
            for num_rows in options.rows:
                neighbours.measure(num_rows, 20)
                p50, p90, step = neighbours.measure(num_rows, options.steps)
                cells = " | ".join(f"{s * 1e6:,.0f} µs" for s in (p50, p90, step, p50 - step))
                print(f"| {place.name} | {num_rows} | {cells} |", flush=True)
        finally:
            neighbours.close()


if __name__ == "__main__":
    main()
