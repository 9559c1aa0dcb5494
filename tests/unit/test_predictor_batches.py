"""Packing: every step once, inputs from the step before, nothing across sequences; and the losses by hand."""

import math

import numpy as np
import pytest
import torch
from support.toy_traces import random_trace

from seqmoe.predictors.batches import Steps, Vocabulary, assemble, epoch, pack, whole_sequences
from seqmoe.predictors.losses import kl_loss, ranking_loss, ranks
from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.seq2seq import RARE_TOKEN
from seqmoe.profiles.errors import UsageError

LENGTHS = [5, 40, 1, 17, 100, 33]


def steps_of(lengths: list[int] = LENGTHS) -> Steps:
    trace = random_trace(lengths)
    assert trace.tokens is not None
    return Steps.of(trace, Vocabulary.of(trace.tokens, least=1))


def test_packing_has_every_step_once() -> None:
    steps = steps_of()
    for seed in range(5):
        rows = pack(steps.starts, steps.lengths, 32, np.random.default_rng(seed))
        assert all(sum(count for _, count, _ in row) <= 32 for row in rows)
        seen = np.concatenate([np.arange(first, first + count) for row in rows for first, count, _ in row])
        assert sorted(seen.tolist()) == list(range(sum(LENGTHS)))
        assert {first for row in rows for first, _, begins in row if begins} == set(steps.starts.tolist())


def test_long_sequences_are_cut_elsewhere_each_time() -> None:
    steps = steps_of([100])
    cuts = {pack(steps.starts, steps.lengths, 32, np.random.default_rng(seed))[0][0][0] for seed in range(20)}
    assert len(cuts) > 3


def test_a_batch_shows_each_step_the_one_before_and_never_another_sequence() -> None:
    trace = random_trace(LENGTHS)
    steps = steps_of()
    truth = psi_numpy(trace.expert_ids, trace.expert_weights, trace.num_experts)
    begins = set(trace.seq_start.tolist())
    seen = 0
    for rows in epoch(steps, 2, 32, np.random.default_rng(3)):
        batch = assemble(steps, rows, 32)
        for r, pieces in enumerate(rows):
            at = 0
            for first, count, is_start in pieces:
                for i in range(count):
                    psi, step = batch.psi[r, at + i], first + i
                    expected = np.zeros_like(truth[0]) if i == 0 else truth[step - 1]
                    np.testing.assert_allclose(psi, expected, atol=1e-6)
                    assert bool(batch.valid[r, at + i]) == (i > 0 or is_start)
                    assert i > 0 or not is_start or step in begins
                    np.testing.assert_array_equal(batch.ids[r, at + i], trace.expert_ids[step])
                    seen += 1
                assert len(set(batch.segments[r, at : at + count].tolist())) == 1
                at += count
            assert not batch.valid[r, at:].any()
            assert bool((batch.segments[r].diff() >= 0).all())
    assert seen == sum(LENGTHS)


def test_processes_share_an_epoch_without_overlap() -> None:
    steps = steps_of()
    alone = list(epoch(steps, 4, 32, np.random.default_rng(0)))
    ranks_of = [list(epoch(steps, 2, 32, np.random.default_rng(0), rank, 2)) for rank in range(2)]
    assert len(ranks_of[0]) == len(ranks_of[1])
    for whole, first, second in zip(alone, *ranks_of, strict=False):
        assert sorted(map(tuple, whole)) == sorted(map(tuple, first + second))


def test_whole_sequences_are_whole_and_within_the_limit() -> None:
    steps = steps_of()
    groups = list(whole_sequences(steps, 80))
    assert sorted(row[0][1] for group in groups for row in group) == sorted(LENGTHS)
    assert all(len(group) == 1 or len(group) * max(row[0][1] for row in group) <= 80 for group in groups)


def test_vocabulary() -> None:
    vocabulary = Vocabulary.of(np.array([7, 7, 3, 3, 3, 9]), least=2)
    assert vocabulary.ids.tolist() == [3, 7] and vocabulary.rows == 4
    found = vocabulary.lookup(np.array([[3, 7], [9, 10**9], [-1, 0]]))
    assert found.tolist() == [[2, 3], [RARE_TOKEN, RARE_TOKEN], [RARE_TOKEN, RARE_TOKEN]]
    assert Vocabulary.of(np.array([7, 7, 3, 3, 3]), least=2, most=1).ids.tolist() == [3]
    assert Vocabulary(np.zeros(0, dtype=np.int64)).lookup(np.array([5])).tolist() == [RARE_TOKEN]


def test_tokens_that_a_trace_lacks_are_asked_for() -> None:
    trace = random_trace([5])
    bare = type(trace)(trace.expert_ids, trace.expert_weights, None, trace.seq_start, trace.seq_len, 8)
    with pytest.raises(UsageError, match="the trace has no tokens"):
        Steps.of(bare, Vocabulary(np.array([1])))


def test_kl_by_hand() -> None:
    log_probs = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    ids, shares = torch.tensor([0, 1]), torch.tensor([0.75, 0.25])
    # 0.75 ln(0.75 / 0.5) + 0.25 ln(0.25 / 0.25); with the plain set: 0.5 ln 1 + 0.5 ln 2
    assert float(kl_loss(log_probs, ids, shares, 0.0)) == pytest.approx(0.75 * math.log(1.5), abs=1e-6)
    assert float(kl_loss(log_probs, ids, shares, 1.0)) == pytest.approx(0.5 * math.log(2), abs=1e-6)


def test_ranking_by_hand() -> None:
    logits, ids = torch.tensor([2.0, 1.5, 1.8, 0.0]), torch.tensor([0, 1])
    # hardest other is 1.8: (1 - 2 + 1.8) + (1 - 1.5 + 1.8), over 2; with both others two more pairs, both at 0
    assert float(ranking_loss(logits, ids, 1)) == pytest.approx((0.8 + 1.3) / 2)
    assert float(ranking_loss(logits, ids, 9)) == pytest.approx((0.8 + 1.3) / 4)


def test_ranks_count_ties_half() -> None:
    scores = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.5, 0.5, 0.5, 0.5]])
    assert ranks(scores, torch.tensor([[0, 3], [0, 3]])).tolist() == [[0, 2], [1, 1]]
