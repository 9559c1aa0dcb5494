"""Decode steps that the simulator replays in a second of one core, forecasts given. The last line is JSON.

python bench/bench_simulate.py [--layers 24] [--experts 32] [--top-k 4]
"""

import argparse
import json
import time

import numpy as np

from seqmoe.autotune.simulate_fast import simulate_fast
from seqmoe.autotune.simulate_plan import Inputs, Timing
from seqmoe.predictors.forecast import to_inclusion
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_forecasts import TraceForecasts, perfect_forecasts
from seqmoe.runtime.policy import POLICIES

STEPS = 2000
SHOWN = ("lru", "belady", "seqmoe-cache-only", "seqmoe-infinity-order", "seqmoe")


def sticky_inputs(layers: int, experts: int, top_k: int) -> Inputs:
    """A trace in which about half of a step's experts were used in the step before, and forecasts that are mostly right."""
    rng = np.random.default_rng(0)
    liking = rng.random((layers, experts))
    ids = np.empty((STEPS, layers, top_k), dtype=np.int16)
    for step in range(STEPS):
        liking = 0.8 * liking + 0.2 * rng.random((layers, experts))
        ids[step] = np.argsort(-(liking + 0.2 * rng.random((layers, experts))), axis=1)[:, :top_k]
    length = np.full(4, STEPS // 4)
    trace = Trace(ids, None, None, np.cumsum(length) - length, length, experts)
    truth = perfect_forecasts(trace, 9).start.astype(np.float32)
    mixed = truth + 0.8 * rng.random(truth.shape, dtype=np.float32)
    scores = to_inclusion(mixed / mixed.sum(-1, keepdims=True), top_k).astype(np.float16)
    return Inputs(trace, TraceForecasts(scores, scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    args = parser.parse_args()
    inputs = sticky_inputs(args.layers, args.experts, args.top_k)
    timing = Timing.of_ratio(0.72, args.layers)
    results = {}
    print(f"steps a second, {args.layers} layers of {args.experts} experts, best of 3")
    for name in SHOWN:
        plan = POLICIES[name].plan
        assert plan is not None
        rates = []
        for _ in range(4):  # the first compiles
            begin = time.thread_time()
            simulate_fast(inputs, plan, timing, round(0.25 * args.layers * args.experts))
            rates.append(STEPS / (time.thread_time() - begin))
        results[name] = round(max(rates[1:]))
        print(f"{name:24}{results[name]:8d}", flush=True)
    print(json.dumps({"unit": "steps/s", "layers": args.layers, "experts": args.experts, "results": results}))


if __name__ == "__main__":
    main()
