"""Predictors within the step, on synthetic router inputs: SpecPrefetch learns what the next router wants."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.routing import routed, routed_trace

from seqmoe.predictors.evaluate import evaluate_layers
from seqmoe.predictors.protocol import LayerPredictor
from seqmoe.predictors.routers import NextRouters, Routers, SpecPrefetch, load_routers, save_routers
from seqmoe.profiles.errors import CheckpointError, UsageError

TRAINING, ROUTERS = routed(1, lengths=(60,) * 20, layers=4, experts=8, hidden=10)
JUDGED, _ = routed(2, lengths=(40,) * 5, layers=4, experts=8, hidden=10)


@pytest.fixture(scope="module")
def adapters() -> SpecPrefetch:
    return SpecPrefetch.fit(TRAINING, ROUTERS, rank=8, depth=2, epochs=20, learning_rate=1e-2)


def test_the_next_router_is_applied_to_todays_input() -> None:
    predictor = NextRouters(ROUTERS, depth=2)
    assert isinstance(predictor, LayerPredictor)
    x = JUDGED.router_input(1, slice(0, 3))
    got = predictor.refine(1, x)
    logits = x @ ROUTERS.weight[2].T
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(got[0], expected.sum(axis=0), rtol=1e-4)
    assert got.shape == (2, 8) and predictor.refine(2, x).shape == (1, 8) and predictor.refine(3, x).shape == (0, 8)
    np.testing.assert_allclose(got.sum(axis=1), 3, rtol=1e-5)  # the batch's scores are summed


def test_norms_carry_an_input_to_the_next_layers_scale() -> None:
    norm = np.arange(1, 41, dtype=np.float32).reshape(4, 10)
    routers = Routers(ROUTERS.weight, np.ones((4, 8), dtype=np.float32), norm)
    x = JUDGED.router_input(1, slice(0, 2))
    np.testing.assert_allclose(
        routers.logits(2, x, of=1), (x / norm[1] * norm[2]) @ ROUTERS.weight[2].T + 1, rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(routers.logits(2, x), x @ ROUTERS.weight[2].T + 1, rtol=1e-4, atol=1e-4)


def test_adapters_learn_what_the_next_router_wants(adapters: SpecPrefetch) -> None:
    assert isinstance(adapters, LayerPredictor)
    early = evaluate_layers(NextRouters(ROUTERS, depth=2), JUDGED)
    learned = evaluate_layers(adapters, JUDGED)
    assert learned.recall_ahead(2)[0] > 0.8 > early.recall_ahead(2)[0] + 0.05
    assert learned.recall_ahead(2)[1] > early.recall_ahead(2)[1] + 0.05
    assert np.isnan(learned.recall[0, :, 0]).all() and np.isnan(learned.recall[0, 1, 1])  # nothing before layer 0
    assert learned.to_dict()["recall_at"]["2"] == pytest.approx(learned.recall_ahead(2)[0])


def test_adapters_learn_from_the_chosen_weights_too() -> None:
    learned = SpecPrefetch.fit(TRAINING, None, rank=8, depth=1, epochs=20, learning_rate=1e-2)
    early = evaluate_layers(NextRouters(ROUTERS, depth=1), JUDGED)
    assert evaluate_layers(learned, JUDGED).recall_ahead(2)[0] > early.recall_ahead(2)[0] + 0.05


def test_untrained_adapters_of_full_rank_are_the_next_router() -> None:
    untrained = SpecPrefetch.fit(TRAINING, ROUTERS, rank=10, depth=2, epochs=0)
    x = JUDGED.router_input(0, slice(0, 4))
    np.testing.assert_allclose(untrained.refine(0, x), NextRouters(ROUTERS, 2).refine(0, x), atol=1e-4)


def test_the_batch_is_summed_and_the_last_layer_has_none(adapters: SpecPrefetch) -> None:
    x = JUDGED.router_input(1, slice(0, 5))
    together = adapters.refine(1, x)
    np.testing.assert_allclose(together, sum(adapters.refine(1, x[i : i + 1]) for i in range(5)), rtol=1e-4)
    assert adapters.refine(2, x).shape == (1, 8) and adapters.refine(3, x).shape == (0, 8)


def test_adapters_are_saved_and_checked(adapters: SpecPrefetch, tmp_path: Path) -> None:
    path = tmp_path / "adapters.safetensors"
    adapters.save(path)
    x = JUDGED.router_input(0, slice(0, 2))
    np.testing.assert_array_equal(SpecPrefetch.load(path, 4, 8).refine(0, x), adapters.refine(0, x))
    with pytest.raises(CheckpointError, match=r"up is for \[layers, experts\] = \[4, 8\], expected \[5, 8\]"):
        SpecPrefetch.load(path, 5, 8)
    save_routers(tmp_path / "routers.safetensors", ROUTERS)
    with pytest.raises(CheckpointError, match="format is None, expected 'seqmoe-adapters'"):
        SpecPrefetch.load(tmp_path / "routers.safetensors", 4, 8)
    np.testing.assert_array_equal(load_routers(tmp_path / "routers.safetensors").weight, ROUTERS.weight)
    with pytest.raises(CheckpointError, match="tensor weight is missing"):
        load_routers(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: cannot be read as safetensors")):
        SpecPrefetch.load(path, 4, 8)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(UsageError, match="router_inputs are not in this trace"):
        SpecPrefetch.fit(routed_trace(), None)
    with pytest.raises(UsageError, match=r"trace has \[layers, experts, hidden\] = \[3, 8, 6\], expected \[4, 8, 10\]"):
        SpecPrefetch.fit(routed_trace(router_inputs=True), ROUTERS)
    with pytest.raises(UsageError, match=r"router bias has shape \[4\], expected \[4, 8\]"):
        Routers(ROUTERS.weight, np.zeros(4, dtype=np.float32))
    with pytest.raises(UsageError, match="router weight holds values that are not finite"):
        Routers(np.full((1, 2, 3), np.nan, dtype=np.float32))
