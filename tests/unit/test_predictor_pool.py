"""A pool of predictors: powers of least KL, never less likely than its best member, refused where it is not fitted."""

import numpy as np
import pytest
from support.routing import routed_trace

from seqmoe.predictors.metrics import RankCounts
from seqmoe.predictors.pool import Pool, fit_powers, log_scores
from seqmoe.predictors.protocol import Predictor, replay_forecasts
from seqmoe.predictors.psi import softmax
from seqmoe.predictors.registry import make_predictor
from seqmoe.profiles.errors import UsageError

SHAPE = {"layers": 4, "experts": 12, "top_k": 3}
TRAINING = routed_trace(1, (90,) * 8, **SHAPE)
VALIDATION = routed_trace(2, (80,) * 6, **SHAPE)
TEST = routed_trace(3, (80,) * 6, **SHAPE)


def recall(predictor: Predictor, with_tokens: bool) -> float:
    ranks = RankCounts(1, TEST.num_layers, TEST.num_experts)
    for i in range(TEST.num_sequences):
        one = TEST.sequence(i)
        ranks.add(predictor.forecast_trace(one, 1, with_tokens), one)
    return float(ranks.recall(4).mean())


def test_the_powers_are_the_best_on_a_grid():
    rng = np.random.default_rng(0)
    truth = softmax(3 * rng.standard_normal((200, 6)))
    features = np.stack(
        [np.log(truth) + rng.standard_normal((200, 6)), np.log(truth) + 2 * rng.standard_normal((200, 6))]
    )
    features = features.astype(np.float32)

    def loss(a: float, b: float) -> float:
        return float(-(truth * log_scores(softmax(a * features[0] + b * features[1]))).sum(-1).mean())

    a, b = fit_powers(features, truth)
    grid = min(loss(x, y) for x in np.linspace(0, 1.5, 31) for y in np.linspace(0, 1.5, 31))
    assert loss(a, b) <= grid + 1e-5
    assert a > b > 0
    noise = np.stack([features[0], rng.standard_normal((200, 6)).astype(np.float32), -features[0]])
    powers = fit_powers(noise, truth)
    assert powers.min() >= 0 and powers[1] < 0.2 and powers[2] < 1e-3 + powers[0]


@pytest.mark.parametrize("with_tokens", [False, True])
def test_it_ranks_no_worse_than_its_members(with_tokens):
    names = ("nearest-step", "patterns", "token") if with_tokens else ("nearest-step", "patterns", "within")
    pool = make_predictor("+".join(names), TRAINING, 1, validation=VALIDATION, with_tokens=with_tokens)
    assert isinstance(pool, Predictor) and pool.name == "+".join(names)
    best = max(recall(make_predictor(name, TRAINING, 1), with_tokens) for name in names)
    assert recall(pool, with_tokens) > best - 0.002


def test_step_by_step_it_gives_the_same():
    pool = make_predictor("nearest-token+token", TRAINING, 2, validation=VALIDATION)
    one = TEST.sequence(0)
    expected = pool.forecast_trace(one, 2, True)
    np.testing.assert_allclose(replay_forecasts(pool, one, 2, True), expected, atol=2e-5)
    np.testing.assert_allclose(expected.sum(-1), 1, atol=1e-5)


def test_what_cannot_be_is_one_line():
    with pytest.raises(UsageError, match="--calibrate-sequences"):
        make_predictor("token+last", TRAINING, 1)
    with pytest.raises(UsageError, match="neither a folder nor a known predictor"):
        make_predictor("token+lasst", TRAINING, 1, validation=VALIDATION)
    pool = make_predictor("token+last", TRAINING, 1, validation=VALIDATION, with_tokens=True)
    with pytest.raises(UsageError, match="without tokens"):
        pool.forecast_trace(TEST.sequence(0), 1, False)
    with pytest.raises(UsageError, match="at least two"):
        Pool([make_predictor("last", TRAINING, 1)])
