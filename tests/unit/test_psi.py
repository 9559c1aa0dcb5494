import numpy as np
import pytest
import torch

from seqmoe.predictors.psi import normalised_weights, psi, psi_numpy, psi_of_scores, psi_of_scores_numpy
from seqmoe.profiles.errors import UsageError

IDS = np.array([[[3, 1], [0, 2]]], dtype=np.int16)  # [1, 2, 2]


def test_the_chosen_have_their_share_and_the_others_nothing() -> None:
    weights = np.array([[[0.3, 0.1], [0.5, 0.5]]], dtype=np.float16)
    expected = [[[0, 0.25, 0, 0.75], [0.5, 0, 0.5, 0]]]
    np.testing.assert_allclose(psi_numpy(IDS, weights, 4), expected, atol=1e-3)
    shares = torch.from_numpy(normalised_weights(IDS, weights))
    np.testing.assert_allclose(psi(torch.from_numpy(IDS).long(), shares, 4).numpy(), expected, atol=1e-3)


def test_without_weights_all_count_the_same() -> None:
    np.testing.assert_array_equal(psi_numpy(IDS, None, 4), [[[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]]])
    zeros = np.zeros(IDS.shape, dtype=np.float16)  # all rounded away
    np.testing.assert_array_equal(psi_numpy(IDS, zeros, 4), psi_numpy(IDS, None, 4))


def test_psi_of_scores_keeps_the_best() -> None:
    scores = np.array([0.1, 0.3, 0.5, 0.1], dtype=np.float32)
    np.testing.assert_allclose(psi_of_scores_numpy(scores, 2), [0, 0.375, 0.625, 0])
    np.testing.assert_allclose(psi_of_scores(torch.from_numpy(scores), 2).numpy(), [0, 0.375, 0.625, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5])
def test_bad_weights_are_refused(bad: float) -> None:
    weights = np.full(IDS.shape, 0.5, dtype=np.float32)
    weights[0, 1, 1] = bad
    with pytest.raises(UsageError, match="finite and not negative"):
        psi_numpy(IDS, weights, 4)


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(UsageError, match=r"weights have shape \[1, 2, 1\], expert_ids \[1, 2, 2\]"):
        psi_numpy(IDS, np.ones((1, 2, 1), dtype=np.float32), 4)
