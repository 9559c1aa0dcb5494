"""The fixed features by hand: running means, matches, and the token table without the step itself."""

import math

import pytest
import torch

from seqmoe.predictors.seq2seq_features import (
    SLACK,
    FeatureSpec,
    later_matches,
    leave_one_out,
    row_features,
    token_table,
)

SPEC = FeatureSpec(decays=(0.5,), betas=(2.0,), token_beta=2.0, token_weight=9.0, window=8)


def one_hot(*experts: int) -> torch.Tensor:
    """[1, s, 1, 3]: one layer of three experts, one chosen a step; -1 is no step."""
    psi = torch.zeros(1, len(experts), 1, 3)
    for step, expert in enumerate(experts):
        if expert >= 0:
            psi[0, step, 0, expert] = 1
    return psi


def test_means_and_matches() -> None:
    # the steps chose 0, 1, 0, 2; shown are the steps before: none, 0, 1, 0
    history = row_features(SPEC, one_hot(-1, 0, 1, 0), None, None, None, False)
    last, mean, match = history.features[0].unbind(1)  # [s, F] each
    assert last[3].tolist() == [1, 0, 0]
    # 0.5 * (step 2) + 0.25 * (step 1) + 0.125 * (step 0)
    assert mean[3].tolist() == pytest.approx([0.5 + 0.125, 0.25, 0])
    # before step 3 lies a 0, as before step 1, which chose 1: weight 1; steps 0 (nothing before) and 2 (a 1 before): e^-2
    low = math.exp(-2)
    total = 1 + 2 * low + SLACK
    assert match[3].tolist() == pytest.approx([2 * low / total, 1 / total, 0], abs=1e-6)
    assert match[0].tolist() == [0, 0, 0]


def test_a_match_followed_further() -> None:
    history = row_features(SPEC, one_hot(-1, 0, 1, 0), None, None, None, False)
    later = later_matches(SPEC, history, torch.tensor([3]), 1)[0, 0, 0]
    # one step further: step 0 was followed by step 1 (a 1), step 1 by step 2 (a 0); what follows step 2 is not yet known
    low = math.exp(-2)
    assert later.tolist() == pytest.approx([1 / (1 + low + SLACK), low / (1 + low + SLACK), 0], abs=1e-6)
    assert later_matches(SPEC, history, torch.tensor([3]), 3).abs().sum() == 0


def test_the_window_and_other_sequences_are_out_of_sight() -> None:
    psi = one_hot(-1, 0, 1, 0, 1, 0)
    near = row_features(SPEC._replace(window=2), psi, None, None, None, False).features[0, 5, 2]
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]])
    packed = row_features(SPEC, psi, None, segments, None, False).features[0, 5]
    cut = row_features(SPEC, psi[:, 3:], None, None, None, False).features[0, 2]
    assert not torch.allclose(near, row_features(SPEC, psi, None, None, None, False).features[0, 5, 2])
    torch.testing.assert_close(packed, cut)


def test_the_same_token_counts_more_and_the_unknown_one_never() -> None:
    table = torch.zeros(9, 3)
    rows = torch.tensor([[5, 6, 7, 5]])
    match = row_features(SPEC, one_hot(-1, 0, 1, 2), rows, None, table, True).features[0, 3, 3]
    low = math.exp(-2)  # nothing before is like a 2; step 0 was fed the same token
    total = low * (10 + 1 + 1) + SLACK
    assert match.tolist() == pytest.approx([10 * low / total, low / total, low / total], abs=1e-6)
    unknown = row_features(SPEC, one_hot(-1, 0, 1, 2), torch.zeros_like(rows), None, table, True).features[0, 3]
    torch.testing.assert_close(unknown[3], unknown[2])  # as without tokens


def test_the_table_leaves_the_step_itself_out() -> None:
    rows = torch.tensor([2, 2, 3, 2])
    ids = torch.tensor([[[0]], [[1]], [[2]], [[0]]])
    table, seen = token_table(rows, ids, 5, 3)
    popularity = torch.tensor([0.5, 0.25, 0.25])
    assert seen.tolist() == [0, 0, 3, 1, 0]
    torch.testing.assert_close(table[2], (torch.tensor([2.0, 1, 0]) + 3 * popularity) / 6)
    for unseen in (0, 1, 4):
        torch.testing.assert_close(table[unseen], popularity)
    without = leave_one_out(table, seen, torch.tensor([2]), torch.tensor([[1.0, 0, 0]]))
    torch.testing.assert_close(without[0], (torch.tensor([1.0, 1, 0]) + 3 * popularity) / 5)
    torch.testing.assert_close(
        leave_one_out(table, seen, torch.tensor([0]), torch.tensor([[1.0, 0, 0]]))[0], popularity
    )
