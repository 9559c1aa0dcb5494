"""Microseconds per call of the runtime's decisions, compiled and plain, for one decode step's sizes.

python bench/bench_decisions.py [--layers 24 --experts 32 --top-k 4 --recursion 2] [--jobs 300] [--rounds 300] [--json]
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import numpy as np

from seqmoe.predictors.calibration import Calibration
from seqmoe.predictors.calibration_fast import FastCalibration, fast_softmax
from seqmoe.predictors.forecast import to_inclusion
from seqmoe.predictors.psi import softmax
from seqmoe.runtime.eviction_fast import FastForecastEviction
from seqmoe.runtime.eviction_forecast import ForecastEviction, Rule, expected_worth, first_use_worth, hard_worth
from seqmoe.runtime.schedule import ORDERS, Admission, FetchJob, Scheduler, make_jobs
from seqmoe.runtime.schedule_fast import FastScheduler, JobMaker

K_PRIME, JOB_STEPS, WINDOW, CALLS = 12, 2, 48, 5
Call = Callable[[], object]


def measure(rounds: int, prepared: Iterator[Call]) -> list[float]:
    """Best and median microseconds of this thread's processor time, of CALLS calls after each preparation."""
    samples = []
    next(prepared)()  # compiles
    for call, _ in zip(prepared, range(rounds), strict=False):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        samples.append((time.thread_time_ns() - start) / CALLS / 1000)
    return [round(min(samples), 2), round(statistics.median(samples), 2)]


class Sizes:
    """What is measured with: a model's shape, and forecasts to choose among."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.layers, self.experts, self.top_k, self.c = args.layers, args.experts, args.top_k, args.recursion
        self.total, self.jobs = self.layers * self.experts, args.jobs
        rng = np.random.default_rng(0)
        shape = (8, self.c + 1, self.layers, self.experts)
        self.logits = 2 * rng.normal(size=shape).astype(np.float32)
        self.scores = softmax(self.logits)
        points = tuple((1 / (1 + np.exp(-np.linspace(-7, 7, 40)))).tolist())
        steps = self.c + 1
        self.calibration = Calibration(
            self.top_k, (0.7,) * steps, (points,) * steps, (tuple(p * 0.9 + 0.02 for p in points),) * steps
        )
        self.forecasts = self.calibration.apply(self.scores)

    def eviction(self, kind: type[ForecastEviction], rule: Rule, what: str) -> Iterator[Call]:
        """With half of the experts candidates."""
        rng = random.Random(0)
        one = kind(self.layers, self.experts, horizon=self.c, rule=rule)
        one.release(rng.sample(range(self.total), self.total // 2), -1)
        for position in count():
            layer = position % self.layers
            experts = rng.sample(range(layer * self.experts, (layer + 1) * self.experts), self.top_k)
            if what == "update":
                yield partial(one.update, self.forecasts[position % 8], position // self.layers)
            elif what == "touch":  # of a layer that is reached, and the first choice after it
                passing = count(position * CALLS)
                yield lambda experts=experts, passing=passing: (one.touch(experts, next(passing)), one.peek())
            elif what == "release":
                one.touch(experts, position)
                yield partial(one.release, experts, position)
            else:
                one.touch(experts, position)
                one.release(experts, position)
                yield getattr(one, what)

    def next(self, kind: type[Scheduler], order: str) -> Iterator[Call]:
        """With a queue of so many jobs, all admitted."""
        rng = random.Random(0)
        one = kind(self.layers, order=order, budget=1.39)
        slot_of, worth = np.full(self.total, -1, dtype=np.int32), np.ones(self.total)
        for position in count():
            one.advance(position)
            experts = rng.sample(range(self.total), min(self.jobs, self.total))
            due = [position + 2 + i * WINDOW // len(experts) for i in range(len(experts))]
            one.offer([FetchJob(e, d, rng.random()) for e, d in zip(experts, due, strict=True)])
            yield partial(one.next, slot_of, Admission(worth, 0.1, position + 3, 0.2))

    def offer(self, kind: type[Scheduler], what: str) -> Iterator[Call]:
        """With a quarter of the experts resident: in one go, and as jobs that are made, and queued, by themselves."""
        rng = random.Random(0)
        one, maker = kind(self.layers), JobMaker(self.layers, self.experts)
        slot_of = np.array([rng.choice([-1, -1, -1, 0]) for _ in range(self.total)], dtype=np.int32)
        choice = {"k_prime": K_PRIME, "steps": JOB_STEPS, "lead": 1, "least": 0.0}
        fast = isinstance(one, FastScheduler)
        made, queue = (maker.make, one.offer_block) if fast else (make_jobs, one.offer)
        for i in count():
            data = (self.forecasts[i % 8], 0, -1, slot_of)
            if what == "offer":
                yield partial(queue, made(*data, **choice))
            else:
                yield partial(one.offer_scores if what == "offer_scores" else made, *data, **choice)


def each(function: Callable[..., object], data: np.ndarray) -> Iterator[Call]:
    for i in count():
        yield partial(function, data[i % len(data)])


def cases(sizes: Sizes) -> dict[str, tuple[Iterator[Call], Iterator[Call]]]:
    """By name, compiled and plain."""
    kinds = (FastForecastEviction, ForecastEviction)
    rules: dict[str, Rule] = {
        "": expected_worth, " (first-use)": first_use_worth, " (hard)": partial(hard_worth, k=sizes.top_k),
    }  # fmt: skip
    out = {
        f"update{name}": tuple(sizes.eviction(kind, rule, "update") for kind in kinds) for name, rule in rules.items()
    }
    for name, what in (("touch + peek", "touch"), ("release", "release"), ("peek", "peek"), ("admission", "admission")):
        out[name] = tuple(sizes.eviction(kind, expected_worth, what) for kind in kinds)
    for name in ("offer_scores", "make jobs", "offer"):
        out[name] = (sizes.offer(FastScheduler, name), sizes.offer(Scheduler, name))
    for order in ORDERS:
        out[f"next ({order})"] = tuple(sizes.next(kind, order) for kind in (FastScheduler, Scheduler))
    fitted, filled = FastCalibration(sizes.calibration, sizes.top_k), FastCalibration(None, sizes.top_k)
    pairs: dict[str, tuple[Callable[..., object], Callable[..., object], np.ndarray]] = {
        "calibration": (fitted.apply, sizes.calibration.apply, sizes.scores),
        "to_inclusion": (filled.apply, partial(to_inclusion, k=sizes.top_k), sizes.scores),
        "softmax": (fast_softmax, softmax, sizes.logits),
    }
    for name, (fast, plain, data) in pairs.items():
        out[name] = (each(fast, data), each(plain, data))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 24), ("experts", 32), ("top-k", 4), ("recursion", 2), ("jobs", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print one line of JSON in place of the table")
    args = parser.parse_args()
    results = {}
    if not args.json:
        print(f"{'us per call':22}{'compiled':>16}{'plain':>20}   best / median")
    for name, (fast, plain) in cases(Sizes(args)).items():
        a, b = measure(args.rounds, fast), measure(max(5, args.rounds // 5), plain)
        results[name] = {"compiled": a, "plain": b}
        if not args.json:
            print(f"{name:22}{a[0]:8.2f}{a[1]:8.2f}{b[0]:12.1f}{b[1]:8.1f}", flush=True)
    if args.json:
        print(json.dumps({**vars(args), "unit": "us", "values": ["best", "median"], "results": results}))


if __name__ == "__main__":
    main()
