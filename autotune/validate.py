"""The verdict: the best settings against the default, in interleaved pairs of fresh processes on prompts the search never saw."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from seqmoe.autotune import stats
from seqmoe.autotune.measure import Failure, Measure, Measurement, Workload
from seqmoe.profiles.errors import SeqmoeError
from seqmoe.profiles.knobs import Knobs

MIN_PAIRS = 3
MAX_PAIRS = 12
OnRun = Callable[[int, int, Measurement | Failure], None]  # (runs done, runs in all, the last)


@dataclass(frozen=True)
class Verdict:
    """The comparison's outcome. `ratio` is time of the default / time of the tuned: more than 1 where the tuned is faster."""

    status: Literal["tuned", "default_kept", "untested"]
    reason: str
    ratio: float | None = None
    ratio_ci95: tuple[float, float] | None = None
    aa_band: float | None = None  # as a share: 0.03 is 3%
    n_pairs: int = 0
    default_tokens_per_s: float | None = None
    tuned_tokens_per_s: float | None = None
    peak_rss_bytes: int | None = None  # largest of the tuned arm


def pairs_that_fit(seconds: float, run_s: float) -> int:
    """Pairs for which there is time, fixed before the first one: stopping when it looks good would make chance a winner."""
    return max(MIN_PAIRS, min(MAX_PAIRS, int(seconds / max(1e-9, 2 * run_s))))


def abba(n_pairs: int) -> list[tuple[str, str]]:
    """Order of the arms in each pair: (A, B), (B, A), (A, B), ... so that a steady drift favours neither."""
    return [("default", "tuned") if pair % 2 == 0 else ("tuned", "default") for pair in range(n_pairs)]


def compare(
    default: Knobs,
    tuned: Knobs,
    workload: Workload,
    measure: Measure,
    *,
    n_pairs: int,
    timeout_s: float,
    seed: int,
    on_run: OnRun,
) -> Verdict:
    """Run the pairs and judge. A failing default is an error; a failing tuned arm keeps the default."""
    runs: dict[str, list[Measurement]] = {"default": [], "tuned": []}
    done = 0
    for order in abba(n_pairs):
        for arm in order:
            outcome = measure(default if arm == "default" else tuned, workload, timeout_s)
            done += 1
            on_run(done, 2 * n_pairs, outcome)
            if isinstance(outcome, Failure):
                if arm == "default":
                    raise outcome.error()
                return Verdict("default_kept", f"the best settings failed in the comparison: {outcome.message}")
            runs[arm].append(outcome)
            check_same_tokens(runs["default"] + runs["tuned"])
    return judge(runs["default"], runs["tuned"], seed)


def judge(default: Sequence[Measurement], tuned: Sequence[Measurement], seed: int) -> Verdict:
    """The verdict on pairs that were measured: `tuned` only if the interval's lower bound lies above the A/A band."""
    default_s, tuned_s = [m.seconds_per_token for m in default], [m.seconds_per_token for m in tuned]
    ratios = stats.log_ratios(default_s, tuned_s)
    low, high = stats.interval(ratios, seed)
    band = stats.aa_band(default_s, len(ratios))
    ratio = math.exp(statistics.fmean(ratios))
    proven = low > band
    words = f"{_percent(ratio)} in {len(ratios)} pairs (95% interval {_percent(math.exp(low))} to {_percent(math.exp(high))})"
    share = math.expm1(band)
    reason = f"faster by {words}, beyond the {share:.1%} that runs of the default differ by"
    if not proven:
        reason = f"not proven faster: {words}, needed more than {share:.1%}"
    return Verdict(
        "tuned" if proven else "default_kept",
        reason,
        ratio,
        (math.exp(low), math.exp(high)),
        share,
        len(ratios),
        statistics.median(m.tokens_per_s for m in default),
        statistics.median(m.tokens_per_s for m in tuned),
        max(m.peak_rss_bytes for m in tuned),
    )


def check_same_tokens(runs: Sequence[Measurement]) -> None:
    """Settings may cost time, never tokens. Raises SeqmoeError when two runs differ: that is a bug of ours."""
    if any(run.token_ids != runs[0].token_ids for run in runs[1:]):
        other = next(run for run in runs if run.token_ids != runs[0].token_ids)
        changed = {k: v for k, v in other.knobs.to_dict().items() if v != runs[0].knobs.to_dict()[k]}
        raise SeqmoeError(
            f"two settings gave different tokens for the same prompts (differing in {changed or 'nothing'}); "
            "this must not happen and is a bug of seqmoe: no profile was tuned"
        )


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"
