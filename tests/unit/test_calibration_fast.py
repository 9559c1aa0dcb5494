"""The compiled calibration, water-filling and softmax against the plain ones."""

import numpy as np
import pytest

from seqmoe.predictors.calibration import Calibration
from seqmoe.predictors.calibration_fast import FastCalibration, fast_softmax
from seqmoe.predictors.forecast import Forecast, to_inclusion
from seqmoe.predictors.psi import softmax
from seqmoe.profiles.errors import UsageError

CLOSE = 1e-6


def some_calibration(rng: np.random.Generator, k: int, horizon: int) -> Calibration:
    """Curves as they are fitted, and such as are only allowed: none, points at one place, not from 0 to 1."""
    xs, ys = [], []
    for _ in range(horizon):
        points = int(rng.choice([0, 1, 2, 5, 48]))
        x, y = np.sort(rng.random(points)), np.sort(rng.random(points))
        if points > 4:
            if rng.random() < 0.5:
                x[2] = x[1]
            if rng.random() < 0.5:
                x[0], x[-1], y[0], y[-1] = 0, 1, 0, 1
        xs.append(tuple(x.tolist()))
        ys.append(tuple(y.tolist()))
    return Calibration(k, tuple(np.exp(rng.uniform(-2, 2, horizon)).tolist()), tuple(xs), tuple(ys))


def some_scores(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Flat, sharp, full of ties, or with nothing but one expert."""
    scores = softmax(rng.normal(size=shape) * rng.choice([0.0, 0.5, 3.0, 15.0], size=(*shape[:-1], 1)))
    if rng.random() < 0.3:
        scores = np.round(scores, 2)
    if rng.random() < 0.2:
        scores[..., 0, :] = 0.0
        scores[..., 0, 0] = 1.0
    return scores.astype(np.float32)


@pytest.mark.parametrize("seed", range(60))
def test_it_calibrates_as_the_plain_one(seed: int):
    rng = np.random.default_rng(seed)
    experts = int(rng.choice([2, 4, 32, 33]))
    k = int(rng.integers(1, experts + 1)) if rng.random() < 0.5 else min(4, experts)
    shape = [(3, 4, experts), (1, 2, experts), (2, 9, 3, experts), (2, 1, 2, 3, experts)][seed % 4]
    calibration = some_calibration(rng, k, int(rng.choice([1, 2, 8])))
    scores = some_scores(rng, shape)
    fast = FastCalibration(calibration, k).apply(scores)
    assert fast.dtype == np.float32 and fast.shape == shape
    assert np.abs(fast - calibration.apply(scores)).max() <= CLOSE


@pytest.mark.parametrize("temperature", [1e-3, 0.02, 0.04])
def test_a_temperature_that_hardly_anything_survives(temperature: float):
    scores = some_scores(np.random.default_rng(0), (2, 5, 8))
    calibration = Calibration(3, (temperature,), ((),), ((),))
    assert np.abs(FastCalibration(calibration, 3).apply(scores) - calibration.apply(scores)).max() <= CLOSE


@pytest.mark.parametrize("seed", range(60))
def test_it_fills_as_the_plain_one(seed: int):
    rng = np.random.default_rng(seed)
    experts = int(rng.choice([1, 2, 4, 32, 33]))
    k = int(rng.integers(1, experts + 1))
    scores = some_scores(rng, (2, 3, 4, experts))
    if seed % 3 == 0:
        scores -= np.float32(0.01)  # scores below 0 count as 0
    assert np.abs(FastCalibration(None, k).apply(scores) - to_inclusion(scores, k)).max() <= CLOSE


def test_any_layout_of_memory():
    rng = np.random.default_rng(1)
    scores, calibration = some_scores(rng, (3, 4, 8)), some_calibration(rng, 2, 3)
    for made in (calibration, None):
        fast = FastCalibration(made, 2)
        expected = fast.apply(scores)
        frozen = np.asfortranarray(scores)
        frozen.flags.writeable = False
        assert np.array_equal(fast.apply(frozen), expected)
        assert np.array_equal(fast.apply(scores.astype(np.float64)), expected)
        assert np.array_equal(fast.apply(scores[None])[0], expected)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_stays_to_be_seen(garbage: float):
    scores = some_scores(np.random.default_rng(2), (2, 3, 8))
    scores[1, 2, 5] = garbage
    for calibration in (Calibration(2, (0.8,), ((0.0, 1.0),), ((0.0, 0.9),)), None):
        out = FastCalibration(calibration, 2).apply(scores)
        assert np.isnan(out[1, 2]).all() and np.isnan(out).sum() == 8
        with pytest.raises(ValueError, match="finite"):
            Forecast(0, out)
    whole = Calibration(8, (1.0,), ((),), ((),))
    assert np.isnan(FastCalibration(whole, 8).apply(scores)).sum() == 8


def test_what_does_not_fit_is_refused():
    calibration = Calibration(4, (1.0,), ((),), ((),))
    with pytest.raises(UsageError, match="k=4, the model has k=2"):
        FastCalibration(calibration, 2)
    for made in (calibration, None):
        with pytest.raises(ValueError, match="1 to 3 experts, got 4"):
            FastCalibration(made, 4).apply(np.ones((1, 1, 3), dtype=np.float32))


def test_softmax():
    rng = np.random.default_rng(3)
    for shape in ((3, 24, 32), (7,), (2, 1)):
        logits = (rng.normal(size=shape) * 20).astype(np.float32)
        out = fast_softmax(logits)
        assert out.shape == shape and out.dtype == np.float32
        assert np.abs(out - softmax(logits)).max() <= CLOSE
    assert np.isnan(fast_softmax(np.array([0.0, np.nan], dtype=np.float32))).all()
