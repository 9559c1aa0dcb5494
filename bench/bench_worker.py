"""What the fetch worker costs decode while it has nothing to send: the price of a second thread and of the interpreter lock.

    python bench/bench_worker.py --model synthetic/ --replay trace.safetensors --link dma:6GB/s [--pairs 12] [--json]

Every expert is resident. One arm forecasts and keeps the worker looking for something to send, layer by layer; the other
makes the same forecasts and leaves the worker asleep. Arms alternate (ABBA) in one process; the ratio is within pairs.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np

from seqmoe.predictors.trace_file import read_trace
from seqmoe.predictors.trace_forecasts import perfect_forecasts
from seqmoe.runtime.engine import Engine
from seqmoe.runtime.policy import POLICIES
from seqmoe.runtime.runner import CachedRunner


def main() -> int:
    """Prints both speeds, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--replay", type=Path, required=True, help="trace of the model's geometry")
    parser.add_argument("--link", default="dma:6GB/s")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    trace = read_trace(arguments.replay)
    plan = POLICIES["foresight"].plan
    assert plan is not None
    speeds: dict[bool, list[float]] = {True: [], False: []}
    with Engine.open(
        arguments.model, mode="foresight", residency=1.0, link=arguments.link, replay=trace, context=512,
        forecasts=perfect_forecasts(trace, plan.horizon + 1),
    ) as engine:  # fmt: skip
        fetching = engine.fetching
        assert fetching is not None and isinstance(engine.runner, CachedRunner)
        engine.runner.preload(np.arange(engine.spec.total_experts))
        engine.generate([[1]], max_new_tokens=arguments.tokens, ignore_eos=True)
        for pair in range(arguments.pairs):
            for awake in (True, False) if pair % 2 else (False, True):
                fetching.asleep = not awake
                looked = fetching.worker.decisions
                report = engine.generate([[1]], max_new_tokens=arguments.tokens, ignore_eos=True)
                speeds[awake].append(report.decode_tokens_per_s)
                if awake:
                    assert fetching.worker.decisions > looked + arguments.tokens, "the worker did not run"
        prefetched = fetching.describe()["prefetched"]
    ratios = [on / off for on, off in zip(speeds[True], speeds[False], strict=True)]
    slowdown = 1 - statistics.median(ratios)
    low, high = min(ratios), max(ratios)
    print(f"worker awake  {statistics.median(speeds[True]):8.2f} tokens/s")
    print(f"worker asleep {statistics.median(speeds[False]):8.2f} tokens/s")
    print(f"slowdown      {slowdown:8.2%}   (ratios {low:.3f} to {high:.3f}, {len(ratios)} pairs, {prefetched} fetches in all)")
    if arguments.json:
        print(json.dumps({"slowdown": slowdown, "ratios": ratios, "awake_tokens_per_s": speeds[True],
                          "asleep_tokens_per_s": speeds[False]}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
