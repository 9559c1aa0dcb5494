"""`seqmoe`: the tools that are not tuning or running. Subcommands are imported when they are used, so --help is quick."""

from typing import NoReturn

import click

from seqmoe.profiles.cliutil import Group

LAZY = {
    "bench": ("seqmoe.runtime.bench_cli:bench_command", "Run several modes at several residencies side by side."),
    "doctor": (
        "seqmoe.autotune.doctor:doctor_command",
        "Say what this machine has, and what will not work here and why.",
    ),
    "eval": ("seqmoe.predictors.eval_cli:eval_command", "Recall, calibration and lead time of predictors on a trace."),
    "profile": ("seqmoe.autotune.profile_cli:profile_group", "Show, explain, verify and compare deployment profiles."),
    "simulate": (
        "seqmoe.autotune.simulate_cli:simulate_command",
        "Replay a trace under several policies on a virtual clock.",
    ),
    "trace": ("seqmoe.predictors.trace_cli:trace_group", "Import, collect and describe routing traces."),
    "train": ("seqmoe.predictors.train_cli:train_command", "Train a sequence predictor on routing traces."),
}
EPILOG = """\b
Examples:
  seqmoe doctor --model demo
  seqmoe bench --model demo --residency 0.25,0.45
  seqmoe profile explain demo.profile.yaml

\b
To tune a model: seqmoe-tune --model demo. To run one: seqmoe-run --profile demo.profile.yaml.
"""


@click.group("seqmoe", cls=Group, lazy=LAZY, epilog=EPILOG)
@click.version_option(package_name="seqmoe", prog_name="seqmoe")
def seqmoe_group() -> None:
    """Mixture-of-Experts models larger than fast memory, tuned to the machine."""


def main() -> NoReturn:
    """Entry point of `seqmoe`."""
    seqmoe_group.main(prog_name="seqmoe")
    raise AssertionError("a command's main never returns")
