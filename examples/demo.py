"""The demo, start to finish: tune the demo model here, run it from its profile, and set the speeds side by side.

    python examples/demo.py [--model demo|demo-xl] [--budget 3m] [--out out/demo.yaml]
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from seqmoe.profiles.schema import Profile, read_profile
from seqmoe.profiles.sizes import format_bytes
from seqmoe.runtime.jobs_process import raise_job_error
from seqmoe.runtime.jobs_server import JobServer

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Question: Tom has 12 apples. He gives 5 to Anna and buys 8 more. How many apples does Tom have now?\nAnswer:"
REPEATS = 3
DEFAULT_KEPT = 3  # exit code of seqmoe-tune: the default settings could not be beaten, which is a result


def run(*command: str, accept: tuple[int, ...] = (0,)) -> None:
    """Shows the command, runs it, and ends the demo if it fails."""
    print(f"\n$ {' '.join(Path(part).name if part.startswith(sys.prefix) else part for part in command)}", flush=True)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code not in accept:
        sys.exit(code)


def measure(jobs: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Every job `REPEATS` times, in turns, so that a machine that slows down does so for all of them."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    with JobServer() as server:
        for repeat in range(REPEATS):
            for name in sorted(jobs, reverse=repeat % 2 == 1):
                result = server.run(jobs[name], timeout_s=300)
                raise_job_error(result)
                runs[name].append(result)
    return runs


def jobs_for(profile: Profile) -> dict[str, dict[str, Any]]:
    """Default and tuned settings in the profile's memory, and everything in memory whatever it takes.

    Where the default was kept, the profile holds the default: one row then, not the same settings measured twice.
    """
    work = profile.target.workload
    common = {
        "model": profile.target.model.id,
        "context": work.context_max,
        "link": work.link,
        "prompts": [PROMPT],
        "max_new_tokens": 96,
        "warmup_tokens": 16,
    }
    tuned = profile.evidence.status == "tuned"
    # As many slots as the profile has: a few MiB more or less of the interpreter are hundreds of the demo's experts.
    default = {**common, "memory_bytes": work.memory_bytes, "slots": profile.to_knobs().slots}
    jobs = {"default" if tuned else "default (kept)": default}
    if tuned:
        jobs["tuned"] = {**common, "memory_bytes": work.memory_bytes, "knobs": profile.to_knobs().to_dict()}
    return {**jobs, "all in memory": {**common, "mode": "full"}}


def show(runs: dict[str, list[dict[str, Any]]], profile: Profile) -> None:
    """The closing table."""
    table = Table(title=f"{profile.target.model.id}: what the profile brings here (medians of {REPEATS} runs, interleaved)")
    for heading in ("settings", "experts in memory", "hit rate", "tokens/s", "peak memory"):
        table.add_column(heading, justify="left" if heading == "settings" else "right")
    for name, results in runs.items():
        speeds = [result["decode_tokens_per_s"] for result in results]
        table.add_row(
            name,
            f"{results[0]['residency']:.0%}",
            f"{median(result['hit_rate'] for result in results):.1%}",
            f"{median(speeds):.1f}  ({min(speeds):.1f} to {max(speeds):.1f})",
            format_bytes(max(result["peak_rss_bytes"] for result in results)),
        )
    console = Console()
    console.print(table)
    console.print(f"memory budget {format_bytes(profile.target.workload.memory_bytes)}; verdict: {profile.evidence.status}")
    tokens = {json.dumps(result["token_ids"]) for results in runs.values() for result in results}
    console.print("all of them wrote the same tokens" if len(tokens) == 1 else "[red]the tokens differ: this is a bug[/red]")


@click.command()
@click.option("--model", default="demo", show_default=True)
@click.option("--budget", default="3m", show_default=True, help="Time for the tuner.")
@click.option("--out", default=ROOT / "out" / "demo.yaml", type=click.Path(path_type=Path), help="Profile to write.")
def main(model: str, budget: str, out: Path) -> None:
    """Tune, run, compare."""
    tools = Path(sys.executable).parent
    out.parent.mkdir(parents=True, exist_ok=True)
    tune = (str(tools / "seqmoe-tune"), "--model", model, "--budget", budget, "--out", str(out))
    run(*tune, accept=(0, DEFAULT_KEPT))
    run(str(tools / "seqmoe-run"), "--profile", str(out), "--prompt", PROMPT, "--max-new-tokens", "64")
    profile = read_profile(out)
    jobs = jobs_for(profile)
    print(f"\ncomparing: {', '.join(jobs)} ...", flush=True)
    show(measure(jobs), profile)


if __name__ == "__main__":
    main()
