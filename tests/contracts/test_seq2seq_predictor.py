"""The sequence predictor behind its protocol: whole traces, single steps, batches and the fast kernels agree."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.toy_traces import random_trace

from seqmoe.predictors.batches import Vocabulary
from seqmoe.predictors.protocol import Predictor, replay_forecasts
from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.seq2seq import Seq2SeqConfig, Seq2SeqNet, load_predictor
from seqmoe.predictors.seq2seq_file import PredictorInfo, save_predictor
from seqmoe.predictors.seq2seq_predictor import Seq2SeqPredictor, TorchStep
from seqmoe.predictors.seq2seq_step import FastStep
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = Vocabulary(np.arange(15))


def net(
    tokens: bool, split: tuple[int, ...] = (3,), blocks: int = 1, feedback: str = "psi", window: int = 512
) -> Seq2SeqNet:
    torch.manual_seed(0)
    config = Seq2SeqConfig(
        3, 8, 2, split, hidden=32, d_state=16, headdim=16, chunk=8, blocks=blocks,
        token_rows=VOCABULARY.rows if tokens else 0, feedback=feedback, window=window,
    )  # fmt: skip
    made = Seq2SeqNet(config).eval()
    with torch.no_grad():
        for group in made.nets():  # large enough for forecasts to differ clearly
            group.recursed.normal_()
            group.output.weight.mul_(4)
            if group.token is not None and group.table is not None and group.seen is not None:
                group.token.weight.normal_()
                group.table.uniform_()
                group.seen += 3
    return made


def predictor(tokens: bool = True, fast: bool = True, **options: object) -> Seq2SeqPredictor:
    made = net(tokens, **options)  # type: ignore[arg-type]
    return Seq2SeqPredictor(made, VOCABULARY if tokens else None, fast=fast)


def trace(steps: int = 40, seed: int = 0) -> Trace:
    return random_trace([steps], seed=seed)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("split", [(3,), (1, 3), (1, 2, 3)])
@pytest.mark.parametrize("tokens", [True, False])
def test_whole_traces_are_forecast_as_step_by_step(tokens: bool, split: tuple[int, ...], fast: bool) -> None:
    made, sequence = predictor(tokens, fast, split=split), trace()
    assert isinstance(made, Predictor) and made.nbytes > 0
    whole = made.forecast_trace(sequence, 3, tokens)
    assert whole.shape == (40, 3, 3, 8) and whole.dtype == np.float32
    np.testing.assert_allclose(whole, replay_forecasts(made, sequence, 3, tokens), atol=1e-5)
    np.testing.assert_allclose(whole.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_parallel_scan_gives_what_steps_give(tokens: bool, blocks: int) -> None:
    made = predictor(tokens, fast=False, blocks=blocks)
    sequences = random_trace([1, 40, 9, 17])
    many = made.forecast_many(sequences, tokens)
    for i in range(4):
        rows = slice(int(sequences.seq_start[i]), int(sequences.seq_start[i] + sequences.seq_len[i]))
        np.testing.assert_allclose(many[rows], made.forecast_trace(sequences.sequence(i), 1, tokens)[:, 0], atol=1e-4)


@pytest.mark.parametrize("fast", [True, False])
def test_a_forecast_changes_nothing(fast: bool) -> None:
    made, sequence = predictor(True, fast), trace()
    assert sequence.tokens is not None
    activations = psi_numpy(sequence.expert_ids, sequence.expert_weights, 8)
    plain = replay_forecasts(made, sequence, 2, True)
    made.start(1)
    for step in range(sequence.num_steps):
        fed = sequence.tokens[step : step + 1]
        made.forecast(4, None)
        first = made.forecast(2, fed)[0]
        made.forecast(8, fed + 1)
        made.forecast(1, None)
        np.testing.assert_array_equal(made.forecast(2, fed)[0], first)
        np.testing.assert_array_equal(first, plain[step])
        made.observe(activations[step : step + 1], fed)


@pytest.mark.parametrize("fast", [True, False])
def test_a_batch_is_its_sequences_side_by_side(fast: bool) -> None:
    made, parts = predictor(True, fast, split=(1, 3)), [trace(12, seed) for seed in range(3)]
    alone = [replay_forecasts(made, part, 3, True) for part in parts]
    activations = np.stack([psi_numpy(p.expert_ids, p.expert_weights, 8) for p in parts])
    tokens = np.stack([p.tokens for p in parts if p.tokens is not None])
    made.start(3)
    for step in range(12):
        together = made.forecast(3, tokens[:, step])
        for i in range(3):
            np.testing.assert_allclose(together[i], alone[i][step], atol=1e-5)
        made.observe(activations[:, step], tokens[:, step])


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("feedback", ["psi", "soft"])
def test_fast_steps_are_those_of_the_network_but_for_rounding(blocks: int, feedback: str) -> None:
    made = net(True, blocks=blocks, feedback=feedback).nets()[0]
    fast, slow = FastStep(made), TorchStep(made)
    w = fast.weights  # give the network the weights that int8 holds exactly
    inputs = np.zeros((32, 7, 24), dtype=np.float32)
    inputs[:, :3] = (w.sparse * w.sparse_scale[:, None]).transpose(2, 0, 1)
    inputs[:, 3:6] = (w.dense * w.dense_scale[:, None]).reshape(32, 24, 3).transpose(0, 2, 1)
    made.input.weight.data = torch.from_numpy(inputs.reshape(32, -1))
    made.output.weight.data = torch.from_numpy(w.output * w.output_scale[:, None])
    assert made.token is not None
    made.token.weight.data = torch.from_numpy(w.token * w.token_scale[:, None])  # the table's part is in it
    for i, block in enumerate(made.mixers()):
        block.mixer.in_proj.weight.data = torch.from_numpy(w.in_proj[i] * w.in_scale[i][:, None])
        block.mixer.out_proj.weight.data = torch.from_numpy(w.out_proj[i] * w.out_scale[i][:, None])
    rng = np.random.default_rng(0)
    quick_state, slow_state = fast.start(2), slow.start(2)
    for i in range(30):
        ids = np.argsort(rng.random((2, 3, 8)), axis=-1)[..., :2]
        psi = psi_numpy(ids, rng.random(ids.shape), 8) * (i > 0)
        rows = None if i % 3 == 0 else rng.integers(0, VOCABULARY.rows, 2)
        quick, quick_state = fast.step(psi, rows, quick_state)
        reference, slow_state = slow.step(psi, rows, slow_state)
        np.testing.assert_allclose(quick, reference, rtol=1e-3, atol=1e-3)
        later, slow_later = quick_state, slow_state
        for _ in range(4):
            fed = slow.feed_back(reference)
            np.testing.assert_allclose(fast.feed_back(reference), fed, atol=1e-6)
            quick, later = fast.recurse(fed, later)
            reference, slow_later = slow.recurse(fed, slow_later)
            np.testing.assert_allclose(quick, reference, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fast", [True, False])
def test_sequences_longer_than_the_window_are_forecast_alike(fast: bool) -> None:
    made = predictor(True, fast, window=9)
    sequence = trace(300)  # longer than what the fast memory keeps, too
    whole = made.forecast_trace(sequence, 2, True)
    np.testing.assert_allclose(whole, replay_forecasts(made, sequence, 2, True), atol=1e-5)
    exact = predictor(True, False, window=9).forecast_many(sequence, True)
    np.testing.assert_allclose(exact, whole[:, 0], atol=0.05 if fast else 1e-4)
    far = predictor(True, fast, window=8).forecast_trace(sequence, 2, True)
    assert not np.allclose(far, whole, atol=1e-4)


def test_later_steps_cannot_be_seen() -> None:
    made, sequence = predictor(True, True), trace()
    other = trace(seed=5)
    assert sequence.tokens is not None and other.tokens is not None
    ids, tokens = sequence.expert_ids.copy(), sequence.tokens.copy()
    ids[20:], tokens[21:] = other.expert_ids[20:], other.tokens[21:]
    weights = sequence.expert_weights
    mixed = Trace(ids, weights, tokens, sequence.seq_start, sequence.seq_len, 8)
    before, after = made.forecast_trace(sequence, 2, True), made.forecast_trace(mixed, 2, True)
    np.testing.assert_array_equal(before[:21], after[:21])  # row 20 knows the token of step 20, not its experts
    assert not np.allclose(before[21], after[21], atol=1e-4)


def test_unknown_tokens_are_one_token() -> None:
    made = predictor(True)
    far, negative, known = (made.forecast(1, np.array([token])) for token in (10**9, -5, 3))
    np.testing.assert_array_equal(far, negative)
    assert not np.allclose(far, known, atol=1e-4) and not np.allclose(far, made.forecast(1), atol=1e-4)


def test_wrong_shapes_are_refused() -> None:
    made = predictor(True)
    with pytest.raises(UsageError, match=r"activations must have shape \[1, 3, 8\], got \[2, 3, 8\]"):
        made.observe(np.zeros((2, 3, 8), dtype=np.float32))
    with pytest.raises(UsageError, match="horizon must be at least 1, got 0"):
        made.forecast(0)
    with pytest.raises(UsageError, match="the trace has num_experts 9, the predictor was made for 8"):
        made.forecast_trace(random_trace([5], experts=9), 1, False)
    with pytest.raises(UsageError, match="the trace has top_k 3, the predictor was made for 2"):
        made.forecast_many(random_trace([5], k=3), False)


def test_saved_and_loaded_it_forecasts_the_same(tmp_path: Path) -> None:
    made = net(True, split=(1, 3))
    save_predictor(tmp_path / "p", made, VOCABULARY, PredictorInfo("abc"), torch.float32)
    loaded = load_predictor(tmp_path / "p")
    assert loaded.info.model_digest == "abc"
    whole = Seq2SeqPredictor(made, VOCABULARY).forecast_trace(trace(), 2, True)
    np.testing.assert_array_equal(loaded.forecast_trace(trace(), 2, True), whole)
    save_predictor(tmp_path / "half", made, VOCABULARY, PredictorInfo())
    assert (tmp_path / "half/predictor.safetensors").stat().st_size < (
        tmp_path / "p/predictor.safetensors"
    ).stat().st_size
    half = load_predictor(tmp_path / "half").forecast_trace(trace(), 1, True)
    np.testing.assert_allclose(half, whole[:, :1], atol=0.05)


@pytest.mark.parametrize("fast", [True, False])
def test_a_prompt_is_taken_in_one_go(fast: bool) -> None:
    made, one = predictor(True, fast, split=(1, 3)), trace(30)
    activations = psi_numpy(one.expert_ids, one.expert_weights, one.num_experts)[None]
    assert one.tokens is not None
    made.start(1)
    made.prefill(activations[:, :25], one.tokens[None, :25])
    expected = made.forecast_trace(one, 2, True)[25]
    np.testing.assert_allclose(made.forecast(2, one.tokens[25:26])[0], expected, atol=2e-4)
