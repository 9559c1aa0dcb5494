"""The verdict's arithmetic on numbers worked by hand."""

import math

import pytest

from seqmoe.autotune import stats
from seqmoe.autotune.measure import Failure, Measurement, Workload
from seqmoe.autotune.validate import abba, check_same_tokens, compare, judge, pairs_that_fit
from seqmoe.profiles.errors import SeqmoeError
from seqmoe.profiles.knobs import Knobs

DEFAULT, TUNED = Knobs(slots=10), Knobs(slots=10, policy="lfu")


def measurement(seconds, knobs=DEFAULT, tokens=((1, 2),), peak=100):
    return Measurement(knobs, 1 / seconds, 0.1, 0.5, 1, peak, 0.0, 10, 0.5, 2, tokens, {}, 1.0)


def test_log_ratios_are_positive_where_the_tuned_arm_is_faster():
    assert stats.log_ratios([2.0, 1.0], [1.0, 2.0]) == pytest.approx([math.log(2), -math.log(2)])
    with pytest.raises(ValueError):
        stats.log_ratios([1.0], [1.0, 2.0])


def test_t_interval_by_hand():
    # mean 0.2, standard deviation 0.1, 3 values: half width 4.303 * 0.1 / sqrt(3) = 0.24843
    low, high = stats.t_interval([0.1, 0.2, 0.3])
    assert (low, high) == (pytest.approx(0.2 - 0.24843, abs=1e-5), pytest.approx(0.2 + 0.24843, abs=1e-5))
    assert stats.t_interval([0.1]) == (-math.inf, math.inf)


def test_bootstrap_is_seeded_and_stays_within_the_values():
    values = [0.1, 0.2, 0.3]
    assert stats.bootstrap_interval(values, 1) == stats.bootstrap_interval(values, 1)
    low, high = stats.bootstrap_interval(values, 1)
    # 1/27 of the resamples are all 0.1, more than the 2.5% that are cut off
    assert (low, high) == (pytest.approx(0.1), pytest.approx(0.3))
    assert stats.bootstrap_interval([0.5] * 4, 7) == (0.5, 0.5)


def test_the_interval_is_the_wider_of_both():
    low, high = stats.interval([0.1, 0.2, 0.3], 1)
    assert (low, high) == pytest.approx(stats.t_interval([0.1, 0.2, 0.3]))


def test_the_t_interval_covers_what_it_promises():
    import random

    draw, covered = random.Random(3), 0
    for _ in range(2000):
        low, high = stats.t_interval([draw.gauss(0.0, 1.0) for _ in range(4)])
        covered += low <= 0 <= high
    assert 0.935 <= covered / 2000 <= 0.965


def test_aa_band_by_hand():
    # neighbours differ by log 1.1 each time; over 4 pairs half of it is left
    assert stats.aa_band([1.0, 1.1, 1.0], 4) == pytest.approx(math.log(1.1) / 2)
    assert stats.aa_band([1.0, 1.001, 1.0], 4) == pytest.approx(math.log(1.02))  # never under 2%
    assert stats.aa_band([1.0], 4) == pytest.approx(math.log(1.02))


def test_a_steady_gain_is_proven():
    verdict = judge([measurement(1.0)] * 3, [measurement(0.8, TUNED, peak=n) for n in (1, 3, 2)], seed=0)
    assert verdict.status == "tuned"
    assert verdict.ratio == pytest.approx(1.25)
    assert verdict.ratio_ci95 == pytest.approx((1.25, 1.25))
    assert (verdict.n_pairs, verdict.aa_band, verdict.peak_rss_bytes) == (3, pytest.approx(0.02), 3)
    assert "+25.0% in 3 pairs" in verdict.reason


@pytest.mark.parametrize(
    ("default", "tuned"),
    [
        ([1.0, 1.0, 1.0], [0.99, 0.99, 0.99]),  # steady, but within the 2% that count as a tie
        ([1.0, 1.0, 1.0], [0.7, 0.9, 1.3]),  # faster on average, by chance
        ([1.0, 1.3, 0.9], [0.9, 1.2, 0.8]),  # always faster, by less than the default differs from itself
        ([1.0, 1.0, 1.0], [1.2, 1.2, 1.2]),  # slower
    ],
)
def test_what_is_not_proven_keeps_the_default(default, tuned):
    verdict = judge([measurement(s) for s in default], [measurement(s, TUNED) for s in tuned], seed=0)
    assert verdict.status == "default_kept"
    assert "not proven faster" in verdict.reason


def test_order_and_number_of_pairs():
    assert abba(3) == [("default", "tuned"), ("tuned", "default"), ("default", "tuned")]
    assert [pairs_that_fit(seconds, 10.0) for seconds in (0, 59, 100, 1e6)] == [3, 3, 5, 12]


WORK = Workload("m", ("p",), 2, 0, 64, 1 << 30, "disk", 0)


def run(outcomes):
    """Compare with a scripted machine: arm -> outcomes in turn."""
    order = []

    def measure(knobs, workload, timeout_s):
        order.append("tuned" if knobs == TUNED else "default")
        return outcomes[order[-1]].pop(0)

    verdict = compare(DEFAULT, TUNED, WORK, measure, n_pairs=3, timeout_s=1, seed=0, on_run=lambda *_: None)
    return verdict, order


def test_pairs_are_interleaved_and_a_drift_is_no_gain():
    # every run is 10% slower than the one before: ABBAAB
    times = [1.1**i for i in range(6)]
    outcomes = {
        "default": [measurement(times[i]) for i in (0, 3, 4)],
        "tuned": [measurement(times[i], TUNED) for i in (1, 2, 5)],
    }
    verdict, order = run(outcomes)
    assert order == ["default", "tuned", "tuned", "default", "default", "tuned"]
    assert verdict.status == "default_kept"


def test_a_failing_tuned_arm_keeps_the_default_and_a_failing_default_is_an_error():
    failure = Failure("memory", "killed", 137, 1.0)
    verdict, _ = run({"default": [measurement(1.0)] * 3, "tuned": [failure]})
    assert (verdict.status, verdict.reason) == ("default_kept", "the best settings failed in the comparison: killed")
    with pytest.raises(SeqmoeError, match="killed"):
        run({"default": [failure], "tuned": []})


def test_different_tokens_are_never_a_verdict():
    other = measurement(0.5, TUNED, tokens=((1, 3),))
    with pytest.raises(SeqmoeError, match="different tokens .*policy.*lfu"):
        check_same_tokens([measurement(1.0), other])
    with pytest.raises(SeqmoeError, match="bug of seqmoe"):
        run({"default": [measurement(1.0)] * 3, "tuned": [other] * 3})
