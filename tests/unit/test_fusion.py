"""The fused forecast: never less likely than its better half, sharper as the step proceeds, calibrated, saved."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.routing import routed

from seqmoe.predictors.fusion import Both, Fusion, both_forecasts, fit_fusion, fused_scores
from seqmoe.predictors.metrics import chosen_experts
from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.registry import make_predictor
from seqmoe.predictors.routers import NextRouters
from seqmoe.profiles.errors import UsageError

LENGTHS = (120, 90, 150, 80, 130, 110)


@pytest.fixture(scope="module")
def fitted():
    training, routers = routed(1, LENGTHS, layers=5, experts=12, top_k=3)
    validation, _ = routed(2, LENGTHS, layers=5, experts=12, top_k=3)
    test, _ = routed(3, LENGTHS, layers=5, experts=12, top_k=3)
    sequence = make_predictor("nearest-token", training, 1)
    adapters = NextRouters(routers, depth=3)
    return sequence, adapters, fit_fusion(sequence, adapters, validation, True), validation, test


def likelihood(scores: np.ndarray, both: Both, target: int) -> float:
    """Mean log score of the experts that were chosen."""
    truth = psi_numpy(both.trace.expert_ids, None, both.trace.num_experts)[1:, target]
    return float((truth * np.log(np.maximum(scores[1:, target], 1e-6))).sum(-1).mean())


def recall(scores: np.ndarray, both: Both, target: int, m: int) -> float:
    best = np.argsort(-scores[1:, target], axis=-1)[:, :m]
    return float(np.take_along_axis(chosen_experts(both.trace)[1:, target], best, 1).sum() / (3 * len(best)))


def test_it_is_not_less_likely_than_its_better_half_at_any_distance(fitted):
    sequence, adapters, fusion, validation, test = fitted
    better = []
    for trace, slack in ((validation, 1e-3), (test, 0.02)):
        found = list(both_forecasts(sequence, adapters, trace, True))
        for target in range(1, 5):
            for d in range(min(3, target)):
                fused, alone, adapter = (
                    np.mean([likelihood(which(one), one, target) for one in found])
                    for which in (
                        lambda one, d=d: fused_scores(fusion, one)[:, :, d],
                        lambda one: one.sequence,
                        lambda one, d=d: one.adapters[:, :, d],
                    )
                )
                assert fused >= max(alone, adapter) - slack, (target, d)
                better.append(fused - max(alone, adapter))
    assert max(better) > 0.05, "nowhere better than both"


def test_a_forecast_is_sharpened_in_place_and_only_from_nearer_by(fitted):
    sequence, adapters, fusion, _, test = fitted
    one = test.sequence(0)
    scores = sequence.forecast_trace(one, 2, True)[40]
    inclusion = np.stack([fusion.calibration.apply_step(row, 0) for row in scores])
    opened = fusion.open(scores, inclusion, position=40 * 5)
    assert opened.forecast.position == 200
    assert (opened.forecast.scores == inclusion).all()
    before = opened.forecast.scores.copy()
    rows = adapters.refine(1, one.router_input(1)[40:41])
    assert opened.refine(1, rows) == range(2, 5)
    after = opened.forecast.scores
    assert opened.forecast.position == 202
    assert (after[0, :2] == before[0, :2]).all() and (after[1] == before[1]).all()
    assert (np.abs(after[0, 2:] - before[0, 2:]).max(axis=1) > 1e-3).all()
    opened.forecast.check_sums(3)
    near = after[0, 2].copy()
    opened.refine(0, adapters.refine(0, one.router_input(0)[40:41]))  # late: from further away than what is known
    assert (opened.forecast.scores[0, 2] == near).all()
    expected = fusion.pool(2, 1, scores[0, 2], rows[0])
    assert np.allclose(near, fusion.calibration.apply_step(expected, 0))
    # A batch's adapters sum over its sequences.
    twice = fusion.open(scores, inclusion, 200)
    twice.refine(1, rows * 2, batch=2)
    assert np.allclose(twice.forecast.scores[0, 2], near, atol=1e-6)


def test_confidences_are_calibrated(fitted):
    sequence, adapters, fusion, _, test = fitted
    said, happened = [], []
    for one in both_forecasts(sequence, adapters, test, True):
        for d in range(fusion.depth):
            probabilities = fusion.calibration.apply_step(fused_scores(fusion, one)[1:, d + 1 :, d], d)
            said.append(probabilities.ravel())
            happened.append(chosen_experts(one.trace)[1:, d + 1 :].ravel())
    p, y = np.concatenate(said), np.concatenate(happened)
    above = p > 0.1
    bins = np.digitize(p[above], np.linspace(0.1, 1, 10))
    error = sum(abs(p[above][bins == b].sum() - y[above][bins == b].sum()) for b in set(bins.tolist())) / above.sum()
    assert error < 0.05


def test_powers_of_a_useless_half_are_none(fitted):
    sequence, _, _, validation, _ = fitted

    class Noise:
        name, depth, nbytes = "noise", 1, 0

        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)

        def refine(self, layer, router_input):
            p = self.rng.random((min(1, 4 - layer), 12)).astype(np.float32)
            return p / p.sum(-1, keepdims=True)

    fusion = fit_fusion(sequence, Noise(), validation, True)
    assert (fusion.adapter_power[1:] < 0.1).all()
    assert (fusion.sequence_power[1:] > 0.3).all()


def test_saved_and_checked(fitted, tmp_path: Path):
    fusion = fitted[2]
    fusion.save(tmp_path)
    again = Fusion.load(tmp_path, 5, 3)
    assert (again.sequence_power == fusion.sequence_power).all() and again.calibration == fusion.calibration
    with pytest.raises(UsageError, match=r"fusion.json: k is 3, expected 4"):
        Fusion.load(tmp_path, 5, 4)
    with pytest.raises(UsageError, match="for 5 layers, expected 6"):
        Fusion.load(tmp_path, 6, 3)
    data = json.loads((tmp_path / "fusion.json").read_text())
    for change, says in (
        ({"format": "x"}, "format"),
        ({"sequence_power": [[float("nan")] * 3] * 5}, "finite"),
        ({"adapter_power": [[-1.0] * 3] * 5}, "negative"),
        ({"adapter_power": "x"}, "cannot be read"),
        ({"calibration": {}}, "damaged"),
    ):
        (tmp_path / "fusion.json").write_text(json.dumps({**data, **change}))
        with pytest.raises(UsageError, match=says):
            Fusion.load(tmp_path, 5, 3)


def test_a_trace_without_router_inputs_is_refused(fitted):
    sequence, adapters, _, validation, _ = fitted
    with pytest.raises(UsageError, match="router_inputs"):
        fit_fusion(sequence, adapters, replace(validation, router_inputs=None), True)
