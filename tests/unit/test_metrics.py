"""Forecasts, metrics and calibration: cases worked by hand, and that calibration does what it promises."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.routing import routed_trace

from seqmoe.predictors.calibration import (
    FILE_NAME,
    Calibration,
    fit_calibration,
    fit_to_forecasts,
    load_calibration,
    save_calibration,
)
from seqmoe.predictors.evaluate import evaluate
from seqmoe.predictors.forecast import Forecast, logit_inclusion, to_inclusion
from seqmoe.predictors.metrics import RankCounts, Reliability, brier_skill, lead_curve, leads
from seqmoe.predictors.rivals import Oracle, Popularity, TokenTable
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError


def one_layer(ids: list[list[int]], experts: int) -> Trace:
    array = np.array(ids, dtype=np.int16)[:, None]
    return Trace(array, None, None, np.array([0]), np.array([len(ids)]), experts)


def test_water_filling_by_hand() -> None:
    # c * (0.5, 0.25, 0.15, 0.1) with sum 2: 4 * 0.25 = 1 would do, but 4 * 0.5 > 1; the first is full, the others
    # share 1 by 2
    assert to_inclusion([0.5, 0.25, 0.15, 0.1], 2).tolist() == pytest.approx([1, 0.5, 0.3, 0.2])
    assert to_inclusion([0.4, 0.3, 0.2, 0.1], 2).tolist() == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert to_inclusion([0.9, 0.1, 0, 0], 3).tolist() == pytest.approx([1, 1, 0.5, 0.5])
    assert to_inclusion([1, 0, 0, 0], 4).tolist() == pytest.approx([1, 1, 1, 1])
    with pytest.raises(ValueError, match="k must be 1 to 4 experts, got 5"):
        to_inclusion([0.4, 0.3, 0.2, 0.1], 5)


@pytest.mark.parametrize("make", [to_inclusion, logit_inclusion, lambda p, k: logit_inclusion(p, k, 0.3)])
@pytest.mark.parametrize("k", [1, 4, 31, 32])
def test_inclusion_sums_to_k_and_keeps_the_order(make, k: int) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(32, 0.05), size=(3, 200)).astype(np.float32)
    p[0, 0] = np.eye(32)[3]
    q = make(p, k)
    assert q.shape == p.shape and q.dtype == np.float32
    assert q.min() >= 0 and q.max() <= 1 + 1e-6
    np.testing.assert_allclose(q.sum(axis=-1), k, rtol=1e-4)
    order = np.argsort(-p, axis=-1, kind="stable")
    assert (np.diff(np.take_along_axis(q, order, axis=-1), axis=-1) <= 1e-6).all()


def test_a_forecast_is_checked() -> None:
    scores = to_inclusion(np.full((2, 3, 8), 1 / 8), 2)
    forecast = Forecast(6, scores)
    forecast.check_sums(2)
    assert forecast.horizon == 2
    with pytest.raises(ValueError, match="read-only"):
        forecast.scores[0, 0, 0] = 1
    with pytest.raises(ValueError, match=r"scores\[0, 0\] sum to 2.000, must be k=3 within 2%"):
        forecast.check_sums(3)
    for bad in (np.zeros((3, 8)), np.full((1, 1, 2), np.nan), np.full((1, 1, 2), 1.5), np.full((1, 1, 2), -0.1)):
        with pytest.raises(ValueError, match="scores must"):
            Forecast(0, bad.astype(np.float32))


def test_recall_by_hand() -> None:
    sequence = one_layer([[0, 1], [2, 3], [0, 3]], 4)
    scores = np.zeros((3, 2, 1, 4), dtype=np.float32)
    scores[1, 0, 0] = [0.4, 0.3, 0.2, 0.1]  # for step 1, {2, 3}: ranks 2 and 3
    scores[1, 1, 0] = [0.4, 0.1, 0.1, 0.4]  # for step 2, {0, 3}: ranks 0 and 1 (a tie goes by index)
    scores[2, 0, 0] = [0.1, 0.2, 0.3, 0.4]  # for step 2: ranks 3 and 0
    ranks = RankCounts(2, 1, 4)
    ranks.add(scores, sequence)
    assert ranks.counts[:, 0].tolist() == [[1, 0, 1, 2], [1, 1, 0, 0]]
    assert [ranks.recall(m)[0, 0] for m in (1, 2, 3, 4)] == [0.25, 0.25, 0.5, 1.0]
    assert [ranks.recall(m)[1, 0] for m in (1, 2)] == [0.5, 1.0]


def test_brier_and_calibration_error_by_hand() -> None:
    sequence = one_layer([[0], [0], [1]], 2)
    inclusion = np.zeros((3, 1, 1, 2), dtype=np.float32)
    inclusion[1, 0, 0] = [0.8, 0.2]  # happens: 0
    inclusion[2, 0, 0] = [0.8, 0.2]  # happens: 1
    inclusion[0] = 0.5  # row 0 does not count
    counted = Reliability(1)
    counted.add(inclusion, sequence)
    assert counted.brier()[0] == pytest.approx((0.04 + 0.04 + 0.64 + 0.64) / 4)
    # of the two 0.8 one happened, of the two 0.2 one did: |1.6 - 1| and |0.4 - 1| over 4 forecasts
    assert counted.error_above(0.1)[0] == pytest.approx((0.6 + 0.6) / 4)
    assert counted.error_above(0.5)[0] == pytest.approx(0.6 / 2)
    assert counted.worst_sum == pytest.approx(0, abs=1e-6)
    assert [(round(f, 3), y, n) for f, y, n in counted.diagram()] == [(0.2, 0.5, 2), (0.8, 0.5, 2)]
    assert brier_skill(np.array([0.1]), np.array([0.2]))[0] == pytest.approx(0.5)


def test_leads_are_the_windows_of_the_design() -> None:
    # L = 4, one predictor, trigger 4: L - (l' - 1 - p) = 4 - (3 - p) = p + 1
    assert leads(2, 4).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    # triggers 2 and 4: layers 0 and 1 are forecast when layer 1 of the step before has routed, 3 and 4 layers ahead
    assert leads(1, 4, (2, 4)).tolist() == [[3, 4, 3, 4]]
    assert leads(2, 4, with_tokens=True).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    recall = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.5, 0.4, 0.4]])
    curve = dict(lead_curve(recall, leads(2, 4)))
    assert curve[0] == curve[1] == pytest.approx(0.75)
    assert curve[2] == pytest.approx((0.5 + 0.8 + 0.7 + 0.6) / 4)
    assert curve[5] == pytest.approx(0.45) and max(curve) == 5


def test_calibration_repairs_scores_that_are_too_sure(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    layers, experts, k = 2, 8, 2
    truth = rng.dirichlet(np.full(experts, 0.6), size=(900, layers))
    gumbel = np.log(truth) + rng.gumbel(size=truth.shape)  # k without replacement, by the true chances
    ids = np.argsort(-gumbel, axis=2)[:, :, :k].astype(np.int16)
    trace = Trace(ids, None, None, np.array([0]), np.array([len(ids)]), experts)
    sure = truth**4 / (truth**4).sum(axis=2, keepdims=True)
    scores = np.repeat(sure[:, None], 2, axis=1).astype(np.float32)
    scores[:-1, 1] = sure[1:]
    half = trace.num_steps // 2
    first = Trace(ids[:half], None, None, np.array([0]), np.array([half]), experts)
    second = Trace(ids[half:], None, None, np.array([0]), np.array([half]), experts)
    fitted = fit_to_forecasts([(scores[:half], first)], 2, k, half)
    assert fitted.temperature[0] > 2  # they are four times too sure
    before, after = Reliability(2), Reliability(2)
    before.add(to_inclusion(scores[half:], k), second)
    after.add(fitted.apply(scores[half:]), second)
    assert (after.brier() < before.brier()).all()
    assert after.error_above(0.1).max() < 0.05 < before.error_above(0.1).min()
    assert after.worst_sum < 0.02
    save_calibration(tmp_path, {"with_tokens": fitted})
    assert load_calibration(tmp_path, k) == {"with_tokens": fitted}
    assert load_calibration(tmp_path / "nothing", k) == {}
    # more steps ahead than were fitted: the last one's
    np.testing.assert_array_equal(fitted.apply(scores[:5, [0, 1, 1]])[:, 2], fitted.apply(scores[:5])[:, 1])


def test_bad_calibrations_are_named(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    good = Calibration(2, (1.0,), ((0.0, 1.0),), ((0.0, 1.0),))
    save_calibration(tmp_path, {"without_tokens": good})
    text = path.read_text()
    for wrong, message in (
        ("{", "cannot be read"),
        (text.replace("seqmoe-calibration", "x"), "format and version are not"),
        (text.replace("[1.0]", "[-1.0]"), "temperatures above 0"),
        (text.replace("[0.0, 1.0]", "[0.0, 7.0]"), "curves must be probabilities"),
        (text.replace('"happened"', '"hap"'), "calibration is damaged"),
        (text.replace("[1.0]", "[1.0, 2.0]"), "a curve for each step ahead"),
    ):
        assert wrong != text
        path.write_text(wrong)
        with pytest.raises(UsageError, match=re.escape(str(path))) as caught:
            load_calibration(tmp_path, 2)
        assert message in str(caught.value)
    path.write_text(text)
    with pytest.raises(UsageError, match="k is 2, expected 3"):
        load_calibration(tmp_path, 3)


def test_evaluation_of_the_oracle_and_of_real_rivals() -> None:
    training, judged = routed_trace(1, (30,) * 20), routed_trace(2, (30,) * 10)
    best = evaluate(Oracle(), judged, 3, with_tokens=False)
    assert best.recall.min() == 1 and best.brier.max() < 0.02
    table, popular = TokenTable().fit(training), Popularity().fit(training)
    calibration = fit_calibration(table, routed_trace(3, (30,) * 10), 3, True)
    token = evaluate(table, judged, 3, with_tokens=True, calibration=calibration)
    plain = evaluate(popular, judged, 3, with_tokens=False)
    assert token.recall[0, 0].mean() > plain.recall[0, 0].mean() + 0.03
    np.testing.assert_allclose(token.recall[:, 1:], plain.recall[:, 1:])  # the token says nothing of later steps
    assert token.calibrated and not plain.calibrated and token.ms > 0
    skilled = token.against(plain)
    assert skilled.skill is not None and skilled.skill[0] > 0 and skilled.reference == "popularity"
    found = skilled.to_dict()
    assert found["recall_at"]["2"] == pytest.approx(token.recall[0, 0].mean())
    assert found["recall_at_step"]["3"]["5"] == pytest.approx(token.recall[3, 2].mean())
    assert list(found["recall_at"]) == ["2", "3", "4", "5", "6", "7", "8"]  # not beyond the 8 experts
