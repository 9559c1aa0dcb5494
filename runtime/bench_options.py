"""Options of `seqmoe bench` that concern policies, and what its modes need: found out before anything runs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from seqmoe.predictors.registry import LAYER_PREDICTORS, NAMES, RIVALS
from seqmoe.predictors.trace_file import parse_sequences, read_trace
from seqmoe.profiles.cliutil import require
from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.bench import Arm
from seqmoe.runtime.policy import GIVEN, LAYERS, PERFECT, POLICIES, Changes

_Function = TypeVar("_Function", bound=Callable[..., Any])
METADATA, ADAPTERS = "predictor.json", "adapters.safetensors"  # in a predictor's folder

MODES_HELP = "\n".join(f"  {name:27} {policy.help}" for name, policy in POLICIES.items())

_SHARE = click.FloatRange(0, 1, min_open=True)
_OPTIONS: tuple[tuple[str, str, Any, str], ...] = (
    ("--k-prime", "k_prime", click.IntRange(1), "Experts of each layer that become fetch jobs."),
    ("--horizon", "horizon", click.IntRange(1, 63), "c: steps of forecast in the cache score."),
    ("--lambda", "discount", _SHARE, "Discount of a step in it."),
    ("--job-steps", "job_steps", click.IntRange(1, 64), "Steps ahead that become fetch jobs."),
    ("--ema-alpha", "ema_alpha", _SHARE, "How fast the budget follows the link."),
    ("--m-max", "m_max", click.IntRange(1), "At most so many prefetches a layer."),
    ("--lead", "lead", click.IntRange(0), "Jobs due within so many layers are dropped."),
    ("--least", "least", click.FloatRange(0, 1), "Confidence that a job must exceed."),
    ("--after/--no-after", "after", None, "A second forecast, without token, after the last layer."),
    ("--early-binding/--late-binding", "early_binding", None, "Bind slots with the jobs, or when a transfer starts."),
    ("--restraint/--no-restraint", "restraint", None, "Stop forecasts and prefetch where they do not pay."),
)


def policy_options(function: _Function) -> _Function:
    """An option for each change of the policies' plans, all None when not given; see `changes_from_options`."""
    for flag, name, kind, text in reversed(_OPTIONS):
        shown = f"{text} [default: the mode's own]"
        function = click.option(flag, name, type=kind, default=None, show_default=False, help=shown)(function)
    return function


def changes_from_options(options: Mapping[str, Any]) -> Changes:
    """What of the policies' plans was given."""
    return Changes(**{name: options[name] for _, name, _, _ in _OPTIONS if options.get(name) is not None})


@dataclass(frozen=True)
class Given:
    """What the user gives to the modes."""

    predictor: str | None = None
    fit: Path | None = None
    fit_sequences: str | None = None
    replay: Path | None = None
    sequences: str | None = None

    def job(self) -> dict[str, Any]:
        """Of a measurement job."""
        return {
            "predictor": self.predictor,
            "fit": str(self.fit) if self.fit else None,
            "fit_sequences": self.fit_sequences,
            "replay": str(self.replay) if self.replay else None,
            "sequences": self.sequences,
        }


def check_given(given: Given, arms: Iterable[Arm]) -> int:
    """The number of sequences that are replayed, 0 without --replay. UsageError for what is missing, what is not there
    and what does not go together."""
    for path, option in ((given.replay, "--replay"), (given.fit, "--fit")):
        require(path is None or path.is_file(), f"{option} {path}: no such file")
    require(given.replay is not None or not given.sequences, "--sequences says which of --replay's, which is missing")
    require(given.fit is not None or not given.fit_sequences, "--fit-sequences says which of --fit's, which is missing")
    replayed = _numbers(given.sequences, "--sequences")
    fitted = _numbers(given.fit_sequences, "--fit-sequences")
    for arm in arms:
        _check_mode(arm, given)
    if given.fit is not None and given.replay is not None and given.fit.samefile(given.replay):
        _check_apart(fitted, replayed)
    replay = None if given.replay is None else read_trace(given.replay, replayed)
    fit = None if given.fit is None else read_trace(given.fit, fitted)
    for arm in arms:
        if POLICIES[arm.mode].predictor == LAYERS and not has_adapters(given.predictor):
            require(
                fit is not None and fit.router_inputs is not None,
                f"mode {arm.mode} needs adapters: --predictor with a folder that has {ADAPTERS}, or --fit with a trace "
                "that has router inputs (seqmoe trace collect --router-inputs)",
            )
    return 0 if replay is None else replay.num_sequences


def has_adapters(predictor: str | None) -> bool:
    """Whether --predictor leads to layers' adapters."""
    return predictor is not None and (Path(predictor).is_file() or (Path(predictor) / ADAPTERS).is_file())


def _check_mode(arm: Arm, given: Given) -> None:
    mode, policy = arm.mode, POLICIES[arm.mode]
    sees = policy.predictor == PERFECT or (policy.plan is not None and policy.plan.eviction in ("belady", "belady-8"))
    if sees:
        require(given.replay is not None, f"mode {mode} needs --replay: it knows the future")
        require(arm.batch == 1, f"mode {mode} knows the future of one sequence: leave it out, or --batch 1")
    elif policy.predictor == GIVEN:
        require(
            given.predictor is not None,
            f"mode {mode} needs --predictor: a folder of `seqmoe train`, or, with --fit, one of {', '.join(_USABLE)}",
        )
        _check_predictor(given.predictor or "", given.fit)
    elif policy.predictor == LAYERS:
        require(
            given.replay is None,
            f"mode {mode} reads the routers' inputs, which are not a replayed trace's: leave it out, or --replay",
        )
    elif policy.plan is not None and policy.plan.eviction in ("static", "prefill-hot"):
        require(
            given.replay is None or given.fit is not None,
            f"mode {mode} with --replay needs --fit: the replayed trace's own popularity is not known beforehand",
        )
    elif policy.predictor is not None:
        require(given.fit is not None, f"mode {mode} needs --fit: a trace of other sequences, to learn from")


_USABLE = tuple(name for name in NAMES if name != "oracle")


def _check_predictor(name: str, fit: Path | None) -> None:
    folder = Path(name)
    if name in _USABLE:
        needs_fit = name not in RIVALS or RIVALS[name]().needs_fit
        require(fit is not None or not needs_fit, f"--predictor {name} needs --fit: a trace to learn from")
    elif name == "oracle":
        raise UsageError("--predictor oracle: the future is what mode foresight is for, with --replay")
    elif name in LAYER_PREDICTORS:
        raise UsageError(f"--predictor {name} forecasts the next layer only: that is what mode specprefetch is for")
    elif "+" in name and not folder.is_dir():
        raise UsageError(f"--predictor {name}: a pool has to be calibrated, which is not done here; give one predictor")
    elif not folder.is_dir():
        raise UsageError(f"--predictor {name}: neither a folder nor one of {', '.join(_USABLE)}")
    elif not (folder / METADATA).is_file():
        raise UsageError(f"--predictor {name}: no {METADATA} in it; give the --out of `seqmoe train`")


def _numbers(text: str | None, option: str) -> list[int] | None:
    return parse_sequences(text, option) if text else None


def _check_apart(fitted: list[int] | None, replayed: list[int] | None) -> None:
    """What is fitted to must not be what is replayed."""
    require(
        fitted is not None and replayed is not None,
        "--fit and --replay are the same trace: --fit-sequences and --sequences must keep them apart",
    )
    if both := set(fitted or ()) & set(replayed or ()):
        raise UsageError(f"--fit-sequences: sequence {min(both)} is among --sequences too; keep them apart")
