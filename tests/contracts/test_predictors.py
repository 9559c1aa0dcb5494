"""What every predictor must keep: whole traces equal step by step, nothing is known early, scores are scores."""

from collections.abc import Callable

import numpy as np
import pytest
from support.routing import routed_trace

from seqmoe.predictors.history import MoEInfinity, NearestStep, NearestTokenStep, Patterns, Ridge
from seqmoe.predictors.protocol import Predictor, replay_forecasts
from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.registry import NAMES, make_predictor
from seqmoe.predictors.rivals import LastStep, Oracle, Popularity, TokenTable, WithinSequence
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError

HORIZON = 4
TRAINING = routed_trace(seed=1, lengths=(20,) * 12)
JUDGED = routed_trace(seed=2, lengths=(14, 9, 2))


def _probe() -> Predictor:
    from seqmoe.predictors.probe import TransformerProbe

    return TransformerProbe(HORIZON, width=16, depth=2, epochs=2).fit(TRAINING)


MAKERS: dict[str, Callable[[], Predictor]] = {
    "popularity": lambda: Popularity().fit(TRAINING),
    "last": lambda: LastStep().fit(TRAINING),
    "within": lambda: WithinSequence().fit(TRAINING),
    "token": lambda: TokenTable().fit(TRAINING),
    "patterns": lambda: Patterns().fit(TRAINING),
    "patterns-bayes": lambda: Patterns("bayes").fit(TRAINING),
    "infinity": lambda: MoEInfinity().fit(TRAINING),
    "nearest-step": lambda: NearestStep().fit(TRAINING),
    "nearest-token": lambda: NearestTokenStep().fit(TRAINING),
    "ridge": lambda: Ridge(HORIZON, strength=1.0).fit(TRAINING),
    "probe": _probe,
}
_made: dict[str, Predictor] = {}


@pytest.fixture(params=list(MAKERS))
def predictor(request: pytest.FixtureRequest) -> Predictor:
    if request.param not in _made:
        _made[request.param] = MAKERS[request.param]()
    return _made[request.param]


def test_every_known_name_is_tested() -> None:
    assert set(NAMES) == {*MAKERS, "oracle"}


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("index", range(3))
def test_a_trace_at_once_equals_step_by_step(predictor: Predictor, index: int, with_tokens: bool) -> None:
    sequence = JUDGED.sequence(index)
    whole = predictor.forecast_trace(sequence, HORIZON, with_tokens)
    assert whole.shape == (sequence.num_steps, HORIZON, sequence.num_layers, sequence.num_experts)
    assert whole.dtype == np.float32
    one_by_one = replay_forecasts(predictor, sequence, HORIZON, with_tokens)
    np.testing.assert_allclose(whole, one_by_one, atol=2e-5)


@pytest.mark.parametrize("with_tokens", [False, True])
def test_no_row_depends_on_what_comes_later(predictor: Predictor, with_tokens: bool) -> None:
    one, other = JUDGED.sequence(0), routed_trace(seed=3, lengths=(14,))
    for cut in (1, 6, 13):
        joined = _spliced(one, other, cut, cut + 1)  # the same steps before cut, the same tokens up to cut
        a = predictor.forecast_trace(one, HORIZON, with_tokens)
        b = predictor.forecast_trace(joined, HORIZON, with_tokens)
        np.testing.assert_allclose(a[: cut + 1], b[: cut + 1], atol=1e-5)


@pytest.mark.parametrize("with_tokens", [False, True])
def test_scores_are_distributions(predictor: Predictor, with_tokens: bool) -> None:
    scores = predictor.forecast_trace(JUDGED.sequence(1), HORIZON, with_tokens)
    assert np.isfinite(scores).all() and scores.min() >= 0
    np.testing.assert_allclose(scores.sum(axis=3), 1, atol=1e-4)


def test_a_forecast_changes_nothing(predictor: Predictor) -> None:
    sequence = JUDGED.sequence(0)
    activations = psi_numpy(sequence.expert_ids, sequence.expert_weights, sequence.num_experts)
    tokens = sequence.tokens
    assert tokens is not None

    def run(extra: bool) -> np.ndarray:
        predictor.start(1)
        rows = []
        for t in range(8):
            if extra:
                predictor.forecast(1, None)
                predictor.forecast(HORIZON, tokens[t + 1 : t + 2])
            rows.append(predictor.forecast(HORIZON, tokens[t : t + 1])[0])
            predictor.observe(activations[t : t + 1], tokens[t : t + 1])
        return np.stack(rows)

    np.testing.assert_allclose(run(False), run(True), atol=1e-6)


def test_a_batch_is_its_sequences_side_by_side(predictor: Predictor) -> None:
    parts = [JUDGED.sequence(0), JUDGED.sequence(1)]
    each = [psi_numpy(p.expert_ids, p.expert_weights, p.num_experts) for p in parts]
    predictor.start(2)
    for t in range(5):
        predictor.observe(np.stack([a[t] for a in each]), np.array([p.tokens[t] for p in parts]))  # type: ignore[index]
    fed = np.array([p.tokens[5] for p in parts])  # type: ignore[index]
    together = predictor.forecast(HORIZON, fed)
    for row, part in enumerate(parts):
        alone = predictor.forecast_trace(part, HORIZON, True)[5]
        np.testing.assert_allclose(together[row], alone, atol=2e-5)


def test_tokens_matter_only_where_it_is_said(predictor: Predictor) -> None:
    sequence = JUDGED.sequence(0)
    same = np.allclose(
        predictor.forecast_trace(sequence, HORIZON, False), predictor.forecast_trace(sequence, HORIZON, True), atol=1e-6
    )
    assert same == (not predictor.uses_tokens)
    assert isinstance(predictor.name, str) and predictor.name
    assert isinstance(predictor, Predictor) and predictor.nbytes > 0


def test_a_trace_of_another_shape_is_refused(predictor: Predictor) -> None:
    with pytest.raises(UsageError, match=r"\[layers, experts\] = \[3, 8\], expected \[2, 8\]"):
        predictor.forecast_trace(routed_trace(layers=2).sequence(0), HORIZON, False)


def test_the_oracle_is_right_and_equals_itself_step_by_step() -> None:
    sequence = JUDGED.sequence(0)
    oracle = Oracle(sequence)
    whole = oracle.forecast_trace(sequence, HORIZON, False)
    activations = psi_numpy(sequence.expert_ids, sequence.expert_weights, sequence.num_experts)
    np.testing.assert_array_equal(whole[3, 2], activations[5])
    np.testing.assert_array_equal(whole[-1, 1:], np.full_like(whole[-1, 1:], 1 / 8))
    np.testing.assert_allclose(whole, replay_forecasts(oracle, sequence, HORIZON, False))
    with pytest.raises(UsageError, match="the oracle needs the future of 2 sequences"):
        oracle.start(2)


def test_unknown_names_and_missing_training_are_said() -> None:
    with pytest.raises(UsageError, match="did you mean 'patterns'"):
        make_predictor("pattern", TRAINING, HORIZON)
    with pytest.raises(UsageError, match="must be fitted: give --fit-sequences"):
        make_predictor("last", None, HORIZON)
    with pytest.raises(UsageError, match="must be fitted to a training trace first"):
        LastStep().start(1)
    parts = (TRAINING.expert_ids, TRAINING.expert_weights, None, TRAINING.seq_start, TRAINING.seq_len, 8)
    with pytest.raises(UsageError, match="needs a trace with tokens"):
        TokenTable().fit(Trace(*parts))
    with pytest.raises(UsageError, match="was fitted for 2 steps ahead, 3 were asked for"):
        Ridge(2).fit(TRAINING).forecast_trace(JUDGED.sequence(0), 3, False)


def _spliced(one: Trace, other: Trace, step: int, token: int) -> Trace:
    """`one` before a step and before a token, `other` from there on."""
    assert one.tokens is not None and other.tokens is not None
    assert one.expert_weights is not None and other.expert_weights is not None
    return Trace(
        np.concatenate([one.expert_ids[:step], other.expert_ids[step:]]),
        np.concatenate([one.expert_weights[:step], other.expert_weights[step:]]),
        np.concatenate([one.tokens[:token], other.tokens[token:]]),
        one.seq_start,
        one.seq_len,
        one.num_experts,
    )
