"""A driver without a model: a real process on the real wire that answers every prompt with the prompt's own tokens.

Some token ids of the prompt are orders instead (`Order`), so that a test can bring about, from outside, what is hard
to provoke with a real engine. It keeps deadlines, max_tokens and aborts as a driver must, and writes what it was told
to a log, one JSON document a line.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path

from bimetal.engine.link.tcp import Connection, connect
from bimetal.engine.wire.api import (
    Abort,
    EngineStats,
    Fatal,
    Generate,
    Loading,
    Output,
    Outputs,
    Ready,
    TokenLogprob,
    decode,
    encode,
)
from bimetal.engine.wire.handshake import SECRET_VARIABLE

EOS = 0


class Order(IntEnum):
    """Token ids that the tests' tokenizer keeps for special tokens."""

    DIE = 3
    """End at once, without a word."""
    FATAL = 4
    """Say why, then end."""
    ERROR = 5
    """This request fails, the others go on."""
    FOREVER = 6
    """Repeat the next token until something stops it."""
    NONSENSE = 7
    """Send a frame that is no message."""


@dataclass
class Script:
    model: str = "scripted"
    model_path: str = ""
    vocab_size: int = 512
    max_model_len: int = 1024
    max_num_seqs: int = 8
    load_s: float = 0.0
    token_s: float = 0.0
    """Between two tokens of a request."""
    num_cached_tokens: int = 0
    log_path: str = "/dev/null"
    ignore_end: bool = False
    """Stay when the gateway has gone, until killed."""


@dataclass
class Running:
    request: Generate
    arrived_s: float
    due_s: float
    num_output: int = 0
    replies: list[int] = field(default_factory=list)


class ScriptedDriver:
    def __init__(self, script: Script, gateway: Connection) -> None:
        self.script = script
        self.gateway = gateway
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.running: dict[str, Running] = {}
        self.waiting: list[Generate] = []
        self.log_path = Path(script.log_path)

    def send(self, message: object) -> None:
        self.gateway.send_frame(encode(message))

    def load(self) -> None:
        for part in range(5):
            for stage in range(2):
                self.send(Loading(stage, part * 25, 100))
            time.sleep(self.script.load_s / 5)
        script = self.script
        self.send(
            Ready(
                model=script.model,
                model_path=script.model_path,
                vocab_size=script.vocab_size,
                max_model_len=script.max_model_len,
                max_num_seqs=script.max_num_seqs,
                num_kv_blocks=100,
                kv_block_tokens=16,
                eos_token_ids=(EOS,),
                stages=(),
            )
        )

    def serve(self) -> None:
        threading.Thread(target=self.receive, daemon=True).start()
        next_stats_s = 0.0
        while True:
            self.admit()
            now_s = time.monotonic()
            if now_s >= next_stats_s:
                next_stats_s = now_s + 0.2
                self.send(
                    EngineStats(
                        len(self.running), len(self.waiting), 0.25, 1, 30, 40, 50, 60, 70, 2, (0.5, 0.75)
                    )
                )
            outputs = [
                output for running in list(self.running.values()) for output in self.step(running, now_s)
            ]
            if outputs:
                self.send(Outputs(tuple(outputs)))
            due_s = min([running.due_s for running in self.running.values()] + [next_stats_s])
            try:
                message = self.inbox.get(timeout=max(due_s - time.monotonic(), 0.0005))
            except queue.Empty:
                continue
            if message is None:
                if self.script.ignore_end:
                    time.sleep(600)
                return
            self.take(message)

    def receive(self) -> None:
        self.gateway.receive_forever(lambda header, payload: self.inbox.put(decode(header.kind, payload)))
        self.inbox.put(None)

    def take(self, message: object) -> None:
        document = {"kind": type(message).__name__, **asdict(message)}
        with self.log_path.open("a") as log:
            log.write(json.dumps(document) + "\n")
        if isinstance(message, Generate):
            self.waiting.append(message)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.running.pop(request_id, None)
            self.waiting = [one for one in self.waiting if one.request_id not in message.request_ids]

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.script.max_num_seqs:
            request, now_s = self.waiting.pop(0), time.monotonic()
            self.running[request.request_id] = Running(
                request, now_s, now_s + self.script.token_s, replies=list(request.prompt_token_ids)
            )

    def step(self, running: Running, now_s: float) -> list[Output]:
        request = running.request
        if request.deadline_s is not None and now_s - running.arrived_s > request.deadline_s:
            return [self.end(running, "deadline")]
        if now_s < running.due_s:
            return []
        running.due_s = now_s + self.script.token_s
        if not running.replies:
            return [self.end(running, "stop")]
        token = running.replies[0]
        if token == Order.DIE:
            os._exit(3)
        if token == Order.FATAL:
            self.send(Fatal("scripted failure"))
            sys.exit(1)
        if token == Order.NONSENSE:
            self.gateway.send_frame(b"x" * 64)
            time.sleep(60)
        if token == Order.ERROR:
            return [self.end(running, "error", message="scripted error")]
        if token == Order.FOREVER:
            token = running.replies[1]
        else:
            running.replies.pop(0)
        if token in request.sampling.stop_token_ids:
            return [self.end(running, "stop", stop_token_id=token)]
        running.num_output += 1
        if running.num_output == request.sampling.max_tokens:
            return [self.end(running, "length", token)]
        return [self.output(running, token)]

    def output(self, running: Running, token: int | None, **more: object) -> Output:
        sampling = running.request.sampling
        prompt = running.request.prompt_token_ids
        first = running.num_output <= 1
        return Output(
            running.request.request_id,
            token_ids=() if token is None else (token,),
            logprobs=() if token is None or sampling.logprobs is None else (score(token, sampling.logprobs),),
            prompt_logprobs=tuple(score(one, sampling.prompt_logprobs) for one in prompt[1:])
            if first and sampling.prompt_logprobs is not None
            else None,
            num_cached_tokens=self.script.num_cached_tokens if first else 0,
            **more,
        )

    def end(self, running: Running, reason: str, token: int | None = None, **more: object) -> Output:
        del self.running[running.request.request_id]
        return self.output(running, token, finish_reason=reason, **more)


def score(token: int, num_top: int) -> TokenLogprob:
    """The given token ranks second; its neighbours are the alternatives."""
    return TokenLogprob(
        -0.5, 2, tuple(token + i for i in range(num_top)), tuple(-0.25 - i for i in range(num_top))
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connect", required=True)
    parser.add_argument("--script", default="{}")
    parser.add_argument("--secret", help="in place of the one in the environment")
    arguments = parser.parse_args()
    secret = os.environ[SECRET_VARIABLE] if arguments.secret is None else arguments.secret
    driver = ScriptedDriver(
        Script(**json.loads(arguments.script)), connect(arguments.connect, secret, "driver")
    )
    driver.load()
    driver.serve()


if __name__ == "__main__":
    main()
