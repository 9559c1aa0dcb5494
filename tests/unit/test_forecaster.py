"""Forecasts while decoding equal those that are made of the finished trace."""

import numpy as np
import pytest
import torch
from support.toy_traces import random_trace

from seqmoe.predictors.forecast import to_inclusion
from seqmoe.predictors.history import NearestTokenStep
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_forecasts import TraceForecasts
from seqmoe.runtime.forecaster import OnlineForecaster, TraceForecaster

LAYERS, EXPERTS, K, ROWS = 3, 8, 2, 3


@pytest.fixture(scope="module")
def trace() -> Trace:
    return random_trace([20, 14, 30], LAYERS, EXPERTS, K, seed=1)


def made(trace: Trace) -> OnlineForecaster:
    return OnlineForecaster(NearestTokenStep().fit(trace), (LAYERS, EXPERTS, K), ROWS)


def route(forecaster: OnlineForecaster, rows: list[tuple[Trace, int]]) -> None:
    """One decode step of a batch: each sequence's own row."""
    for layer in range(LAYERS):
        ids = np.stack([one.expert_ids[row, layer] for one, row in rows]).astype(np.int64)
        weights = np.stack([one.expert_weights[row, layer] for one, row in rows])
        forecaster.routed(layer, torch.from_numpy(ids), torch.from_numpy(weights).to(torch.bfloat16).float())


def expected(trace: Trace, index: int) -> np.ndarray:
    one = trace.sequence(index)
    return to_inclusion(NearestTokenStep().fit(trace).forecast_trace(one, ROWS, True), K)


def test_step_by_step_is_the_whole_trace(trace: Trace) -> None:
    one, forecaster = trace.sequence(2), made(trace)
    assert one.tokens is not None
    want = expected(trace, 2)
    for row in range(one.num_steps):
        scores = forecaster.at_start(row, one.tokens[row : row + 1].astype(np.int64))
        assert scores is not None and scores.shape == (ROWS, LAYERS, EXPERTS)
        assert np.allclose(scores, want[row], atol=2e-2), row  # weights went through bfloat16
        route(forecaster, [(one, row)])


def test_a_batch_gets_the_mean(trace: Trace) -> None:
    parts, forecaster = [trace.sequence(0), trace.sequence(1)], made(trace)
    want = [expected(trace, 0), expected(trace, 1)]
    forecaster.start(2)
    for row in range(10):
        tokens = np.array([part.tokens[row] for part in parts], dtype=np.int64)  # type: ignore[index]
        scores = forecaster.at_start(row, tokens)
        assert scores is not None and np.allclose(scores, (want[0][row] + want[1][row]) / 2, atol=2e-2)
        route(forecaster, [(part, row) for part in parts])


def test_a_prompt_is_shown_as_if_it_had_been_decoded(trace: Trace) -> None:
    one, forecaster = trace.sequence(2), made(trace)
    assert one.tokens is not None
    prompt = 12
    for first, last in ((0, 8), (8, prompt)):  # in two passes, as long prompts are
        for layer in range(LAYERS):
            ids = torch.from_numpy(one.expert_ids[first:last, layer].astype(np.int64))
            forecaster.routed(layer, ids, torch.from_numpy(one.expert_weights[first:last, layer]))  # type: ignore[index]
    forecaster.prompt_over(one.tokens[None, :prompt].astype(np.int64), np.array([prompt]))
    scores = forecaster.at_start(prompt, one.tokens[prompt : prompt + 1].astype(np.int64))
    assert np.allclose(scores, expected(trace, 2)[prompt], atol=2e-2)


def test_a_new_request_knows_nothing_of_the_last(trace: Trace) -> None:
    one, forecaster = trace.sequence(1), made(trace)
    assert one.tokens is not None
    first = forecaster.at_start(0, one.tokens[:1].astype(np.int64))
    route(forecaster, [(one, 0)])
    forecaster.at_start(1, one.tokens[1:2].astype(np.int64))
    forecaster.start(1)
    assert np.array_equal(forecaster.at_start(0, one.tokens[:1].astype(np.int64)), first)


def test_weights_that_are_no_shares_cost_the_shares_only(trace: Trace) -> None:
    one, forecaster = trace.sequence(0), made(trace)
    for layer in range(LAYERS):
        ids = torch.from_numpy(one.expert_ids[:1, layer].astype(np.int64))
        forecaster.routed(layer, ids, torch.full((1, K), float("nan")))
    scores = forecaster.at_start(1, None)
    assert scores is not None and np.isfinite(scores).all()


def test_known_forecasts_go_by_the_row_of_the_trace() -> None:
    start = np.random.default_rng(0).random((4, ROWS, LAYERS, EXPERTS)).astype(np.float16)
    forecaster = TraceForecaster(TraceForecasts(start))
    assert np.array_equal(forecaster.at_start(6, None), start[2].astype(np.float32))  # the replay wraps around
    assert forecaster.after_last(0) is None
