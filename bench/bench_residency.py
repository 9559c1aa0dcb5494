"""Microseconds of the residency's operations, for each eviction: best and median. The last line is JSON.

python bench/bench_residency.py [--slots 5000]
"""

import argparse
import json
import statistics
import time

import numpy as np

from seqmoe.predictors.trace import Trace
from seqmoe.runtime.eviction import make_eviction
from seqmoe.runtime.residency import Residency

LAYERS, EXPERTS, TOP_K, STEPS = 48, 256, 4, 60


def random_trace(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((STEPS, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.int16)
    zero, steps = np.zeros(1, dtype=np.int64), np.array([STEPS])
    return Trace(ids, None, None, zero, steps, EXPERTS)


def filled(trace: Trace, num_slots: int, name: str) -> Residency:
    residency = Residency(num_slots, LAYERS, EXPERTS, make_eviction(name, trace=trace), reserve=TOP_K)
    for expert in range(num_slots):
        residency.load(expert * LAYERS * EXPERTS // num_slots)
    for layer in range(LAYERS):
        residency.release(layer)
    return residency


def measure(trace: Trace, num_slots: int, name: str) -> dict[str, list[float]]:
    """Best and median microseconds of this thread's own processor time, over calls made a whole step at a time. The
    best is what the code costs; the median includes what else this machine was doing."""
    samples: dict[str, list[float]] = {"lookup_4_hits": [], "release_4": [], "load_evict": [], "fetch_land": []}
    clock = time.thread_time_ns
    residency = filled(trace, num_slots, name)
    by_layer = residency.slot_of_expert.reshape(LAYERS, -1)
    for step in trace.expert_ids.tolist():
        residency.begin_step()
        hits = [np.flatnonzero(row >= 0)[:TOP_K].tolist() for row in by_layer]
        start = clock()
        for layer, experts in enumerate(hits):
            residency.lookup(layer, experts)
        samples["lookup_4_hits"].append((clock() - start) / LAYERS / 1000)
        start = clock()
        for layer in range(LAYERS):
            residency.release(layer)
        samples["release_4"].append((clock() - start) / LAYERS / 1000)
        missing = [flat for layer, experts in enumerate(step) for flat in residency.lookup(layer, experts).missing]
        start = clock()
        for flat in missing:
            residency.load(flat)
        samples["load_evict"].append((clock() - start) / len(missing) / 1000)
        for layer in range(LAYERS):
            residency.release(layer)
        absent = np.flatnonzero(residency.slot_of_expert < 0).tolist()[::50]
        start = clock()
        for flat in absent:
            fetch = residency.fetch(flat)
            assert fetch is not None
            residency.land(fetch.tag)
        samples["fetch_land"].append((clock() - start) / len(absent) / 1000)
        for layer in range(LAYERS):
            residency.release(layer)
    return {key: [round(min(values), 2), round(statistics.median(values), 2)] for key, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=5000)
    args = parser.parse_args()
    trace = random_trace(0)
    results = {name: measure(trace, args.slots, name) for name in ("lru", "lfu", "static", "belady")}
    print(f"us per operation, {args.slots} slots, {LAYERS} layers of {EXPERTS} experts, top-{TOP_K}")
    print("best / median")
    print(f"{'':8}" + "".join(f"{key:>16}" for key in results["lru"]))
    for name, row in results.items():
        print(f"{name:8}" + "".join(f"{best:8.2f} /{median:6.2f}" for best, median in row.values()))
    print(json.dumps({"slots": args.slots, "unit": "us", "values": ["best", "median"], "results": results}))


if __name__ == "__main__":
    main()
