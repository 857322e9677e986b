"""The demo: plan a real model over two unlike CPU stages, serve it, ask it questions as any OpenAI client would.

    python demo/demo.py --model .demo/SmolLM2-135M-Instruct [--keep-serving]

Prints the plan, each answer as it streams, TTFT and TPOT as the client saw them, and each stage's share of the work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.table import Table

FLEET = """\
# Two CPU stages that are not alike: the left one is told to be twice as fast, so the plan gives it more layers.
version: 1
model: {model}
dtype: float32
nodes:
  - {{name: left, gpu: cpu, num_threads: 1, memory_bytes: 3e9, memory_bytes_per_s: 20e9}}
  - {{name: right, gpu: cpu, num_threads: 1, memory_bytes: 3e9, memory_bytes_per_s: 14e9}}
limits: {{max_model_len: 2048, max_num_seqs: 16, mean_context: 256}}
"""
QUESTIONS = (
    "What is the capital of France?",
    "Which planet is known as the Red Planet?",
    "Write one sentence about the sea.",
)
START_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Answer:
    question: str
    text: str
    ttft_s: float
    tpot_s: float
    num_tokens: int


@contextlib.contextmanager
def serving(fleet: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "bimetal.cli.main", "serve", str(fleet), "--port", str(port)]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(15)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"demo: the server ended with status {process.returncode}; its message is above")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            if response.status == 200:
                return
        time.sleep(0.2)
    sys.exit(f"demo: the server was not ready within {START_TIMEOUT_S:.0f} s")


def ask(client: OpenAI, model: str, question: str, console: Console) -> Answer:
    console.print(f"\n[bold]{question}[/bold]")
    began_s = time.perf_counter()
    first_s = last_s = began_s
    text, num_tokens = "", 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                last_s = time.perf_counter()
                if not text:
                    first_s = last_s
                text += choice.delta.content
                console.print(choice.delta.content, end="", highlight=False, markup=False, soft_wrap=True)
    console.print()
    return Answer(question, text, first_s - began_s, (last_s - first_s) / max(num_tokens - 1, 1), num_tokens)


def stage_shares(url: str) -> list[float]:
    """Busy ratio of each stage, as /metrics has it."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("bimetal_stage_busy_ratio{")]


def print_summary(answers: list[Answer], shares: list[float], console: Console) -> None:
    table = Table(title="as the client saw it", box=None, title_justify="left", pad_edge=False)
    for name in ("question", "tokens", "TTFT ms", "TPOT ms"):
        table.add_column(name, justify="left" if name == "question" else "right")
    for a in answers:
        table.add_row(a.question, str(a.num_tokens), f"{a.ttft_s * 1e3:.0f}", f"{a.tpot_s * 1e3:.1f}")
    console.print()
    console.print(table)
    if shares:
        busy = ", ".join(f"stage {i} {share:.0%}" for i, share in enumerate(shares))
        console.print(
            f"busy in the last second: {busy} (one request at a time: the stages take turns)", highlight=False
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder that demo/convert_model.py wrote")
    parser.add_argument("--port", type=int, default=8011)
    parser.add_argument("--keep-serving", action="store_true", help="leave the server running until Ctrl-C")
    options = parser.parse_args()
    console = Console()
    url = f"http://127.0.0.1:{options.port}"
    with tempfile.TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.yaml"
        fleet.write_text(FLEET.format(model=json.dumps(str(options.model))))
        with serving(fleet, options.port) as process:
            wait_until_ready(process, url)
            client = OpenAI(base_url=f"{url}/v1", api_key="none")
            model = client.models.list().data[0].id
            answers = [ask(client, model, question, console) for question in QUESTIONS]
            print_summary(answers, stage_shares(url), console)
            if "Paris" not in answers[0].text:
                sys.exit(f"demo: the first answer should name Paris, but is {answers[0].text!r}")
            if options.keep_serving:
                console.print(f"\nserving at {url}/v1 (model {model!r}); Ctrl-C stops it", highlight=False)
                with contextlib.suppress(KeyboardInterrupt):
                    process.wait()


if __name__ == "__main__":
    main()
