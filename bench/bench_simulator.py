"""The simulator against the real runtime: the same trace, policy, slots and link, hit rates and tokens/s side by side.

    python bench/bench_simulator.py --model synthetic/ --traces routing.npz --sequences 289,291 --predictor predictor/ \\
        --policies lru,seqmoe --residency 0.15,0.25,0.45 --link-ratio 0.72 [--kind dma] [--out F.json]

The link's rate is the ratio times a layer's time, which a first run with everything in memory gives. The simulator is then
given what it would be given by a probe: times of a layer and of an expert, of a transfer and of a forecast. They are taken
from the run that is compared, because this machine's speed wanders by more between runs than the simulator errs; `drift`
says by how much that run's layers took longer than the first run's.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from seqmoe.autotune.simulate_plan import Timing
from seqmoe.autotune.simulate_policies import Changes, Workbench
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_file import parse_sequences, read_trace
from seqmoe.runtime.engine import Engine
from seqmoe.runtime.report import RunReport


def first_steps(trace: Trace, index: int, steps: int) -> Trace:
    """A sequence's first steps."""
    one = trace.sequence(index)
    cut = slice(0, min(steps, one.num_steps))
    length = np.array([min(steps, one.num_steps)])
    return Trace(
        one.expert_ids[cut],
        None if one.expert_weights is None else one.expert_weights[cut],
        None if one.tokens is None else one.tokens[cut],
        np.zeros(1, dtype=np.int64),
        length,
        one.num_experts,
    )


def real(
    arguments: argparse.Namespace, mode: str, trace: Trace, residency: float | None, link: str
) -> tuple[RunReport, dict[str, Any]]:
    """One request over the whole sequence, cold: its first row is the prompt."""
    with Engine.open(
        arguments.model, mode=mode, residency=residency, link=link, replay=trace, context=trace.num_steps + 8,
        predictor=arguments.predictor,
    ) as engine:  # fmt: skip
        report = engine.generate([[1]], max_new_tokens=trace.num_steps, ignore_eos=True)
        return report, engine.describe()


def per_step(report: RunReport) -> dict[str, float]:
    """Medians would hide the steps that waited: means, in seconds."""
    figures, steps = report.to_dict(), len(report.decode)
    names = ("experts_s", "other_s", "management_s", "predictor_s", "stall_s")
    return {name: figures[name] / steps for name in names} | {"step_s": report.decode_seconds / steps}


def simulate(bench: Workbench, first: Workbench, name: str, plan: Any, timing: Timing, slots: int) -> dict[str, float]:
    """All steps but the first, which in the real run is the prompt."""
    all_steps, one = (part.run(name, plan, timing, slots) for part in (bench, first))

    def rest(field: str) -> float:
        return float(getattr(all_steps, field).sum() - getattr(one, field).sum())

    moved = rest("prefetched") + rest("misses") - rest("late")
    return {
        "hit_rate": rest("hits") / (rest("hits") + rest("misses")),
        "tokens_per_s": rest("steps") / rest("time"),
        "transfers_per_step": moved / rest("steps"),
    }


def compare(
    arguments: argparse.Namespace, bench: Workbench, trace: Trace, name: str, share: float, base: dict[str, float]
) -> dict[str, Any]:
    """One policy at one residency."""
    layers, k = trace.num_layers, trace.top_k
    transfer = arguments.link_ratio * base["step_s"] / layers
    record_bytes = arguments.record_bytes
    link = f"{arguments.kind}:{record_bytes / (transfer - 1e-6) / 1e9:.6f}GB/s,1us"
    report, facts = real(arguments, name, trace, share, link)
    spent = per_step(report)
    layer = (spent["experts_s"] + spent["other_s"] + spent["management_s"]) / layers
    timing = Timing((layer,) * layers, transfer, spent["predictor_s"], record_bytes, spent["experts_s"] / (layers * k))
    first = Workbench(first_steps(trace, 0, 1), predictor=arguments.predictor)
    said = simulate(bench, first, name, bench.plan(name, Changes(), transfer / layer), timing, facts["slots"])
    speed = 1 / spent["step_s"]
    moved = report.to_dict()["decode_needed_bytes"] / record_bytes + facts.get("prefetch", {}).get("prefetched", 0)
    return {
        "policy": name,
        "residency": share,
        "hit_rate": report.hit_rate,
        "simulated_hit_rate": said["hit_rate"],
        "transfers_per_step": moved / len(report.decode),
        "simulated_transfers_per_step": said["transfers_per_step"],
        "tokens_per_s": speed,
        "simulated_tokens_per_s": said["tokens_per_s"],
        "error": said["tokens_per_s"] / speed - 1,
        "drift": layer * layers / base["step_s"] - 1,
        "stall_s_per_step": spent["stall_s"],
        "steps": len(report.decode),
    }


def main() -> int:
    """Prints a table; --out writes the rows as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--sequences", required=True)
    parser.add_argument("--predictor", required=True)
    parser.add_argument("--policies", default="lru,seqmoe")
    parser.add_argument("--residency", default="0.15,0.25,0.45")
    parser.add_argument("--link-ratio", type=float, default=0.72)
    parser.add_argument("--kind", default="dma", choices=["dma", "throttled"])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--record-bytes", type=int, default=9 << 20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    whole = read_trace(arguments.traces)
    rows = []
    print(
        "sequence policy            resident   hit rate  simulated  points   transfers  simulated   tokens/s  simulated   error   drift"
    )
    for index in parse_sequences(arguments.sequences):
        trace = first_steps(whole, index, arguments.steps)
        bench = Workbench(trace, predictor=arguments.predictor)
        base = per_step(real(arguments, "full", trace, None, "dma:9GB/s,1us")[0])
        for share in [float(part) for part in arguments.residency.split(",")]:
            for name in arguments.policies.split(","):
                row = {"sequence": index, **compare(arguments, bench, trace, name, share, base)}
                rows.append(row)
                points = 100 * (row["simulated_hit_rate"] - row["hit_rate"])
                print(
                    f"{index:8} {name:18} {share:8.0%} {row['hit_rate']:10.4f} {row['simulated_hit_rate']:10.4f} {points:+7.2f} "
                    f"{row['transfers_per_step']:11.1f} {row['simulated_transfers_per_step']:10.1f} {row['tokens_per_s']:10.2f} {row['simulated_tokens_per_s']:10.2f} {row['error']:+7.1%} {row['drift']:+7.1%}",
                    flush=True,
                )
    worst = max(abs(row["simulated_hit_rate"] - row["hit_rate"]) for row in rows)
    print(f"hit rate within {100 * worst:.2f} points; tokens/s: mean error {mean(abs(r['error']) for r in rows):.1%}, "
          f"worst {max(abs(r['error']) for r in rows):.1%}")  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
