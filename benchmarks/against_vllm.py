"""One GPU, one model's shape with dummy weights: vLLM and `bimetal bench` in turn, in one run, the same workloads.

    python benchmarks/against_vllm.py Llama-3.1-8B 1:128:256 32:128:256 --peer-path /path/to/vllm

Every engine gets a process of its own, a short pass of each workload (8 output tokens, which compiles what is left to
compile), then `--passes` whole ones; the best counts. Requests:input:output tokens, all at once, full lengths, greedy.
`--peer-path`: a folder to import vLLM from, where it is not installed beside bimetal. The peer runs with its defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

from bimetal.engine.bench import Workload, parse_workload

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
PEER_FLAG = "--as-peer"


def run_peer(options: argparse.Namespace, workloads: list[Workload]) -> None:
    """In the peer's process: prints one JSON line for each workload."""
    from vllm import LLM, SamplingParams

    config = json.loads(
        (resources.files("bimetal.catalog") / "data" / "models" / f"{options.model}.json").read_text()
    )
    config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(config))
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max(w.input_tokens + w.output_tokens for w in workloads),
        max_num_seqs=max(w.num_requests for w in workloads),
        gpu_memory_utilization=0.9,
        enable_prefix_caching=False,
    )

    def tokens_per_s(workload: Workload, output_tokens: int, seed: int) -> float:
        rng = random.Random(seed)
        prompts: Any = [
            {"prompt_token_ids": [rng.randrange(10, 30000) for _ in range(workload.input_tokens)]}
            for _ in range(workload.num_requests)
        ]
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - began)

    for workload in workloads:
        tokens_per_s(workload, 8, seed=0)
        best = max(tokens_per_s(workload, workload.output_tokens, 1 + i) for i in range(options.passes))
        print(json.dumps({"workload": str(workload), "output_tokens_per_s": best}), flush=True)


def peer_results(options: argparse.Namespace) -> dict[str, float]:
    path = os.pathsep.join(filter(None, [options.peer_path, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__, *sys.argv[1:], PEER_FLAG]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdout is not None
    found = {}
    for line in process.stdout:
        if line.startswith('{"workload"'):
            document = json.loads(line)
            found[document["workload"]] = document["output_tokens_per_s"]
            print(f"vllm {line}", end="", file=sys.stderr, flush=True)
    process.wait()
    return found


def own_results(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "bimetal.cli.main", "bench", "--model", options.model, "--json"]
    command += ["--device", options.device, "--load-format", "dummy", "--dtype", "bfloat16"]
    command += ["--passes", str(options.passes)]
    for workload in options.workloads:
        command += ["-w", workload]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(output, file=sys.stderr)
    return {document["workload"]: document for document in json.loads(output)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="of the catalogue")
    parser.add_argument("workloads", nargs="+", help="REQUESTS:INPUT:OUTPUT")
    parser.add_argument("--device", default="H200", help="GPU of the catalogue")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--peer-path")
    parser.add_argument(PEER_FLAG, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    workloads = [parse_workload(text) for text in options.workloads]
    if options.as_peer:
        run_peer(options, workloads)
        return
    peer = peer_results(options)
    own = own_results(options)
    print(f"| {options.model} | bimetal | vLLM | ratio | TPOT p50 | MBU |\n|" + " --- |" * 6)
    for name, document in own.items():
        tokens_per_s, tpot_ms = document["output_tokens_per_s"], document["tpot_s"]["p50"] * 1e3
        mbu = document["stages"][0]["mbu_ratio"] if document["stages"] else None
        theirs = peer.get(name)
        cells = [name, f"{tokens_per_s:,.0f}"]
        cells += ["–", "–"] if theirs is None else [f"{theirs:,.0f}", f"{tokens_per_s / theirs:.3f}"]
        cells += [f"{tpot_ms:.1f} ms", "–" if mbu is None else f"{mbu:.3f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
