"""Microseconds of one scheduling decision over a queue of jobs, compiled and plain. The last line is JSON.

python bench/bench_schedule.py [--jobs 300]
"""

import argparse
import json
import random
import statistics
import time

import numpy as np

from seqmoe.runtime.schedule import ORDERS, Admission, FetchJob, Scheduler
from seqmoe.runtime.schedule_fast import FastScheduler

LAYERS, EXPERTS, WINDOW = 24, 32, 48


def measure(kind: type[Scheduler], order: str, count: int, rounds: int) -> list[float]:
    """Best and median microseconds of this thread's processor time for one decision with `count` jobs in the queue."""
    rng = random.Random(0)
    scheduler = kind(LAYERS, order=order, budget=1.39)
    slot_of = np.full(LAYERS * EXPERTS, -1, dtype=np.int32)
    worth = np.ones(LAYERS * EXPERTS)
    samples = []
    for position in range(rounds):
        scheduler.advance(position)
        experts = rng.sample(range(LAYERS * EXPERTS), count)
        scheduler.offer([FetchJob(e, position + 2 + i * WINDOW // count, rng.random()) for i, e in enumerate(experts)])
        admission = Admission(worth, 0.1, position + 3, 0.2)
        start = time.thread_time_ns()
        for _ in range(5):
            scheduler.next(slot_of, admission)
        samples.append((time.thread_time_ns() - start) / 5000)
    return [round(min(samples), 2), round(statistics.median(samples), 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=300)
    args = parser.parse_args()
    results = {}
    print(f"us per decision over {args.jobs} jobs, best / median")
    for order in ORDERS:
        fast, plain = (
            measure(kind, order, args.jobs, rounds) for kind, rounds in ((FastScheduler, 400), (Scheduler, 40))
        )
        results[order] = {"compiled": fast, "plain": plain}
        print(
            f"{order:12} compiled {fast[0]:6.2f} /{fast[1]:6.2f}   plain {plain[0]:8.1f} /{plain[1]:8.1f}", flush=True
        )
    print(json.dumps({"jobs": args.jobs, "unit": "us", "values": ["best", "median"], "results": results}))


if __name__ == "__main__":
    main()
