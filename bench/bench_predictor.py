"""How long one forecast of the sequence predictor takes: one step, and one step and eight recursions, on one core.

    taskset -c 0 python bench/bench_predictor.py --out predictor.json
    python bench/bench_predictor.py --predictor DIR

Without --predictor a network of the given size with random weights: its time does not depend on them.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.seq2seq import Seq2SeqConfig, Seq2SeqNet, load_predictor
from seqmoe.predictors.seq2seq_predictor import Seq2SeqPredictor


def median_ms(work: Callable[[], Any], before: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median and extremes of `work`, each time after `before`, which is not timed."""
    times = []
    for _ in range(repeats + 10):
        before()
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    kept = np.sort(times[10:])
    return {
        "median_ms": round(float(np.median(kept)), 4),
        "least_ms": round(float(kept[0]), 4),
        "p90_ms": round(float(kept[int(0.9 * len(kept))]), 4),
    }


def measure(predictor: Seq2SeqPredictor, batch: int, repeats: int) -> dict[str, Any]:
    """Times of a decode step's forecasts, each after a step was observed."""
    config = predictor.config
    rng = np.random.default_rng(0)
    shape = (batch, config.num_layers, config.num_experts)
    ids = np.argsort(rng.random(shape), axis=-1)[..., : config.top_k]
    seen = psi_numpy(ids, rng.random(ids.shape), config.num_experts)
    tokens = rng.integers(0, 1000, batch) if config.uses_tokens else None
    predictor.start(batch)

    def observe() -> None:
        predictor.observe(seen, tokens)

    return {
        "batch": batch,
        "one_step": median_ms(lambda: predictor.forecast(1, tokens), observe, repeats),
        "nine_steps": median_ms(lambda: predictor.forecast(9, tokens), observe, repeats),
        # what was forecast is not computed again when it is observed
        "observe_after_forecast": median_ms(observe, lambda: predictor.forecast(1, tokens), repeats),
        "bytes": predictor.nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predictor", type=Path, help="folder that seqmoe train wrote")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.predictor:
        loaded = load_predictor(arguments.predictor)
        net, vocabulary = loaded.net, loaded.vocabulary
    else:
        layers = arguments.layers
        config = Seq2SeqConfig(layers, arguments.experts, arguments.k, (layers,), hidden=arguments.hidden)
        net, vocabulary = Seq2SeqNet(config), None
    result = {
        "hidden": net.config.hidden,
        "features": net.config.num_layers * net.config.num_experts,
        "weights": sum(p.numel() for p in net.parameters()),
        "int8_kernels": measure(Seq2SeqPredictor(net, vocabulary, fast=True), arguments.batch, arguments.repeats),
        "torch_float32": measure(Seq2SeqPredictor(net, vocabulary, fast=False), arguments.batch, arguments.repeats),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
