"""Adapters and fusion in a predictor's folder: fitted, saved, loaded, judged by layers ahead."""

from pathlib import Path

import numpy as np
import pytest
from support.routing import routed

from seqmoe.predictors.evaluate import evaluate_layers
from seqmoe.predictors.registry import make_predictor
from seqmoe.predictors.within_step import (
    ADAPTERS,
    evaluate_within_step,
    fit_within_step,
    load_within_step,
)
from seqmoe.profiles.errors import CheckpointError, UsageError

SHAPE = {"layers": 5, "experts": 12, "top_k": 3, "hidden": 10}
TRAINING, ROUTERS = routed(1, (100,) * 10, **SHAPE)
VALIDATION, _ = routed(2, (90,) * 6, **SHAPE)
TEST, _ = routed(3, (90,) * 6, **SHAPE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("predictor")
    fit_within_step(path, make_predictor("nearest-token", TRAINING, 1), TRAINING, VALIDATION, ROUTERS)
    return path


def test_the_fused_forecast_is_at_least_its_better_half(folder):
    adapters, fusion = load_within_step(folder, 5, 12, 3)
    sequence = make_predictor("nearest-token", TRAINING, 1)
    found = evaluate_within_step(sequence, adapters, fusion, TEST, True)
    gains = []
    for distance in (1, 2, 3):
        fused, *halves = (found.at(source, distance, 4) for source in ("fused", "sequence", "adapters"))
        gains.append(fused - max(halves))
    assert min(gains) > -0.005 and max(gains) > 0.01, gains
    assert found.at("fused", 1, 4) > found.at("fused", 3, 4), "no sharper from nearer by"
    assert found.error.max() < 0.06
    assert found.to_dict()["within_step"]["1"]["fused"]["4"] == found.at("fused", 1, 4)
    # The adapters' own recall is what the evaluation of layer predictors says; that one counts first steps too.
    alone = evaluate_layers(adapters, TEST)
    assert found.at("adapters", 1, 4) == pytest.approx(alone.recall_ahead(4)[0], abs=0.02)
    assert np.isclose(found.recall[:, :, -1], 1).all()


def test_halves_of_it_and_other_models_are_refused(folder, tmp_path):
    assert load_within_step(tmp_path, 5, 12, 3) is None
    (tmp_path / ADAPTERS).write_bytes((folder / ADAPTERS).read_bytes())
    with pytest.raises(UsageError, match="adapters.safetensors is there without fusion.json"):
        load_within_step(tmp_path, 5, 12, 3)
    with pytest.raises(UsageError, match="k is 3, expected 2"):
        load_within_step(folder, 5, 12, 2)
    with pytest.raises(CheckpointError, match="layers, experts"):
        load_within_step(folder, 5, 16, 3)
