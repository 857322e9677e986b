"""One stage against `transformers.generate`: same model, threads, dtype and prompts, in turn, in one run.

usage: python benchmarks/against_transformers.py .demo/SmolLM2-135M-Instruct [--threads 1] [--batches 1 8] [--rounds 3]

Prints output tokens per second of each (median of the rounds, which alternate) and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import transformers

from bimetal.engine.bench import Workload, run_workload
from bimetal.engine.driver.driver import Driver
from bimetal.engine.wire.options import EngineOptions

INPUT_TOKENS, OUTPUT_TOKENS = 32, 64


def peer_tokens_per_s(model: transformers.PreTrainedModel, batch: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (batch, INPUT_TOKENS), generator=generator)
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
        )
    return (out.shape[1] - INPUT_TOKENS) * batch / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    peer = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    layers = peer.config.num_hidden_layers
    stage = {
        "node": "local",
        "gpu": "cpu",
        "start_layer": 0,
        "end_layer": layers,
        "num_threads": options.threads,
    }
    plan = {"model": str(options.model), "dtype": "float32", "replicas": [{"name": "r", "stages": [stage]}]}
    driver = Driver(
        EngineOptions(
            plan=plan, max_model_len=INPUT_TOKENS + OUTPUT_TOKENS, max_num_seqs=max(options.batches)
        )
    )
    try:
        driver.start()
        print(
            f"{'batch':>5} {'transformers':>14} {'bimetal':>10} {'ratio':>7}   (output tok/s, {options.threads} threads, float32)"
        )
        for batch in options.batches:
            peer_tokens_per_s(peer, batch, 0)
            run_workload(driver, Workload(batch, INPUT_TOKENS, 8), seed=0)
            theirs, ours = [], []
            for r in range(options.rounds):
                theirs.append(peer_tokens_per_s(peer, batch, 1 + r))
                ours.append(
                    run_workload(
                        driver, Workload(batch, INPUT_TOKENS, OUTPUT_TOKENS), seed=1 + r
                    ).output_tokens_per_s
                )
            a, b = statistics.median(theirs), statistics.median(ours)
            print(f"{batch:>5} {a:>14.1f} {b:>10.1f} {b / a:>7.2f}", flush=True)
    finally:
        driver.stop()


if __name__ == "__main__":
    main()
