"""What the gateway itself costs a streamed token: CPU time of its process, with a driver that only echoes.

    python benchmarks/gateway.py --streams 48 --tokens 200 --tokens-per-s 20

The driver answers every stream at the given rate, as an engine with that many running requests would; the client reads
raw sockets. Prints output tok/s, the gateway's CPU time per token and its share of one core, and how late tokens come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from gateway.servers import demo_model, server_starter  # noqa: E402


async def stream(port: int, prompt: list[int], num_tokens: int, logprobs: int | None) -> list[float]:
    """When each event came."""
    body = {
        "model": "scripted",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "stream": True,
        "logprobs": logprobs,
    }
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(payload), payload)
    )
    times_s = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times_s.append(time.perf_counter())
    writer.close()
    return times_s


async def load(arguments: argparse.Namespace, port: int) -> list[list[float]]:
    prompts = [[6, 300 + i] for i in range(arguments.streams)]  # 6: repeat the next token
    return await asyncio.gather(
        *(stream(port, prompt, arguments.tokens, arguments.logprobs) for prompt in prompts)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--tokens-per-s", type=float, default=20, help="of one stream")
    parser.add_argument("--logprobs", type=int)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server_starter(demo_model(), Path(folder)) as start:
        server = start(
            max_num_seqs=arguments.streams,
            token_s=1 / arguments.tokens_per_s,
            vocab_size=49152,
            max_model_len=8192,
            log_path="/dev/null",
        )
        port = int(server.url.rsplit(":", 1)[1])
        gateway = psutil.Process(server.process.pid)
        before, began_s = gateway.cpu_times(), time.perf_counter()
        times_s = asyncio.run(load(arguments, port))
        took_s = time.perf_counter() - began_s
        after = gateway.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    num_tokens = sum(map(len, times_s))
    gaps_s = sorted(b - a for times in times_s for a, b in pairwise(times))
    print(
        f"{num_tokens} tokens over {arguments.streams} streams in {took_s:.2f} s: {num_tokens / took_s:.0f} tok/s"
    )
    print(f"gateway CPU: {cpu_s / num_tokens * 1e6:.0f} us a token, {cpu_s / took_s:.1%} of one core")
    print(
        f"gap between tokens: p50 {gaps_s[len(gaps_s) // 2] * 1e3:.1f} ms, p99 {gaps_s[len(gaps_s) * 99 // 100] * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
