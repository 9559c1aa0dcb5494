"""How much of the decode speed is left while other processes hold cores: our team of threads, OpenMP's, and one thread.

    python bench/bench_busy.py [--model demo] [--residency 0.25] [--busy 0,1,2] [--rounds 5] [--json]

Each busy process spins in a session of its own, as another user's program would. Rounds are interleaved; medians.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

from seqmoe.profiles.knobs import Knobs
from seqmoe.runtime.engine import Engine
from seqmoe.runtime.kernels import team

SPIN = (sys.executable, "-c", "while True: pass")


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that never wait."""
    running = [subprocess.Popen(SPIN, start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextlib.contextmanager
def openmp_only() -> Iterator[None]:
    """The team hands its work to OpenMP, inside of decode steps too."""
    team._fields[team.T_AWAKE] -= 1  # at_work adds one
    try:
        yield
    finally:
        team._fields[team.T_AWAKE] += 1


def main() -> int:
    """Prints a table, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--residency", type=float, default=0.25)
    parser.add_argument("--busy", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    counts = [int(part) for part in arguments.busy.split(",")]
    threads = len(os.sched_getaffinity(0))
    rates: dict[str, list[float]] = {}

    def measure(name: str, knobs: Knobs) -> None:
        with Engine.open(
            arguments.model, mode="lru", knobs=knobs, residency=arguments.residency, context=512
        ) as engine:
            for count in counts:
                for _ in range(2):
                    with busy(count):
                        report = engine.generate(["The old man"], max_new_tokens=arguments.tokens, ignore_eos=True)
                    key = f"{name}, {count} busy"
                    rates.setdefault(key, []).append(report.decode_tokens_per_s)

    for round_number in range(arguments.rounds):
        print(f"round {round_number + 1} of {arguments.rounds}", file=sys.stderr)
        measure("team", Knobs(compute_threads=threads))
        with openmp_only():
            measure("openmp", Knobs(compute_threads=threads))
        measure("one thread", Knobs(compute_threads=1))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, value in medians.items():
        print(f"{name:<24}{value:9.1f} tokens/s   {min(rates[name]):.1f} to {max(rates[name]):.1f}")
    if arguments.json:
        print(json.dumps({"model": arguments.model, "threads": threads, "decode_tokens_per_s": medians}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
