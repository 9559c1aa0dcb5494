"""Predictors by name or by folder, ready to forecast: rivals are fitted here, trained ones are loaded."""

import difflib
from collections.abc import Callable
from pathlib import Path

from seqmoe.predictors.pool import Pool
from seqmoe.predictors.protocol import Predictor
from seqmoe.predictors.rivals import LastStep, Oracle, Popularity, Rival, TokenTable, WithinSequence
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError

FitProgress = Callable[[int, int, float], None]  # steps done, steps in all, loss


def _patterns() -> Rival:
    from seqmoe.predictors.history import Patterns

    return Patterns()


def _patterns_bayes() -> Rival:
    from seqmoe.predictors.history import Patterns

    return Patterns("bayes")


def _infinity() -> Rival:
    from seqmoe.predictors.history import MoEInfinity

    return MoEInfinity()


def _nearest_step() -> Rival:
    from seqmoe.predictors.history import NearestStep

    return NearestStep()


def _nearest_token() -> Rival:
    from seqmoe.predictors.history import NearestTokenStep

    return NearestTokenStep()


RIVALS: dict[str, Callable[[], Rival]] = {
    "popularity": Popularity,
    "last": LastStep,
    "within": WithinSequence,
    "token": TokenTable,
    "patterns": _patterns,
    "patterns-bayes": _patterns_bayes,
    "infinity": _infinity,
    "nearest-step": _nearest_step,
    "nearest-token": _nearest_token,
    "oracle": Oracle,
}
TRAINED = ("ridge", "probe")  # fitted for a horizon; minutes
LAYER_PREDICTORS = ("next-router", "specprefetch")
NAMES = (*RIVALS, *TRAINED)


def make_predictor(
    name: str,
    training: Trace | None,
    horizon: int,
    *,
    validation: Trace | None = None,
    with_tokens: bool = True,
    seed: int = 0,
    progress: FitProgress | None = None,
) -> Predictor:
    """A rival by name, fitted to `training`, or what lies in a folder. UsageError for an unknown name.

    Names joined by + make a pool, which is fitted to `validation`.
    """
    if "+" in name and not Path(name).is_dir():
        if validation is None:
            raise UsageError(f"predictor {name} must be fitted: give --calibrate-sequences, such as 256:288")
        members = [make_predictor(part, training, horizon, seed=seed, progress=progress) for part in name.split("+")]
        return Pool(members).fit(validation, horizon, with_tokens and validation.tokens is not None)
    if name in RIVALS:
        return _fitted(RIVALS[name](), training)
    if name == "ridge":
        from seqmoe.predictors.history import Ridge

        return _fitted(Ridge(horizon), training)
    if name == "probe":
        from seqmoe.predictors.probe import TransformerProbe

        return _fitted(TransformerProbe(horizon, seed=seed, progress=progress), training)
    folder = Path(name)
    if not folder.is_dir():
        near = difflib.get_close_matches(name, (*NAMES, *LAYER_PREDICTORS), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join((*NAMES, *LAYER_PREDICTORS))}"
        raise UsageError(f"--predictor {name}: neither a folder nor a known predictor; {hint}")
    from seqmoe.predictors.seq2seq_predictor import Seq2SeqPredictor  # brings torch

    return Seq2SeqPredictor.load(folder)


def _fitted(rival: Rival, training: Trace | None) -> Rival:
    if not rival.needs_fit:
        return rival
    if training is None:
        raise UsageError(f"predictor {rival.name} must be fitted: give --fit-sequences, such as 0:256")
    return rival.fit(training)
