"""One forecast that a sequence predictor opens and the layers' adapters sharpen as the step runs. Loads without torch.

The sequence predictor's scores for the step that begins are known for all layers; when layer l has routed, an adapter's
scores for layers l + 1 to l + d are better than those, mostly because they are of this very token. Neither contains the
other, so they are multiplied, each raised to a power fitted on validation sequences (a logarithmic opinion pool):

    fused[p] = softmax(a[p, d] * log sequence[p] + b[p, d] * log adapter[p, d])          a, b >= 0

for layer p seen from d layers before. a = 1, b = 0 is the sequence predictor alone, so in likelihood, on the sequences it
is fitted to, the pool is never worse than either. One calibration for each distance turns scores into probabilities.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.calibration import Calibration, fit_to_forecasts
from seqmoe.predictors.forecast import Forecast
from seqmoe.predictors.pool import fit_powers, log_scores
from seqmoe.predictors.protocol import LayerPredictor, Predictor
from seqmoe.predictors.psi import psi_numpy, softmax
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import write_atomic

FILE_NAME = "fusion.json"  # beside the sequence predictor's weights
FORMAT, VERSION = "seqmoe-fusion", 1
Floats = NDArray[np.float32]
_FIT_ROWS = 6000  # steps that the two powers of a layer are fitted to


@dataclass(frozen=True, eq=False)
class Fusion:
    """The powers of a pool and its calibration. Layer p has none from d layers before where p < d."""

    k: int
    sequence_power: Floats  # [L, depth], of the sequence predictor: a
    adapter_power: Floats  # [L, depth], of the adapter: b
    calibration: Calibration  # "steps ahead" are layers ahead less one

    def __post_init__(self) -> None:
        for name in ("sequence_power", "adapter_power"):
            powers = getattr(self, name)
            if powers.ndim != 2 or powers.shape != self.sequence_power.shape or not np.isfinite(powers).all():
                raise UsageError(f"fusion's {name} must be finite numbers, [layers, depth]")
            if powers.min() < 0:
                raise UsageError(f"fusion's {name} must not be negative, got {powers.min()}")
        if self.calibration.k != self.k:
            raise UsageError(f"fusion is for k={self.k}, its calibration for k={self.calibration.k}")

    @property
    def depth(self) -> int:
        """Layers ahead that an adapter sharpens."""
        return int(self.sequence_power.shape[1])

    def pool(self, target: int, distance: int, sequence: Floats, adapter: Floats) -> Floats:
        """Scores [..., E] of layer `target` from both, `distance` layers before it; every row sums to 1."""
        a, b = self.sequence_power[target, distance - 1], self.adapter_power[target, distance - 1]
        return softmax(a * log_scores(sequence) + b * log_scores(adapter))

    def open(self, scores: Floats, inclusion: Floats, position: int) -> "OpenForecast":
        """The forecast of a step that begins: the sequence predictor's `scores` [horizon, L, E] (rows sum to 1) and the
        same as calibrated probabilities (rows sum to k). `position` = step * L."""
        return OpenForecast(self, scores[0], inclusion.copy(), position)

    def save(self, folder: Path) -> None:
        """Writes `fusion.json`."""
        data = {"format": FORMAT, "version": VERSION, "k": self.k, "calibration": self.calibration.to_dict()}
        powers = {"sequence_power": self.sequence_power.tolist(), "adapter_power": self.adapter_power.tolist()}
        write_atomic(folder / FILE_NAME, json.dumps({**data, **powers}) + "\n")

    @classmethod
    def load(cls, folder: Path, num_layers: int, k: int) -> Self:
        """UsageError, naming file and field, for what is not this model's fusion."""
        path = folder / FILE_NAME
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if (data.get("format"), data.get("version")) != (FORMAT, VERSION):
                raise UsageError(f"format and version are not '{FORMAT}' and {VERSION}")
            if data.get("k") != k:
                raise UsageError(f"k is {data.get('k')}, expected {k}")
            a, b = (np.array(data[name], dtype=np.float32) for name in ("sequence_power", "adapter_power"))
            found = cls(k, a, b, Calibration.from_dict(k, data["calibration"]))
            if len(a) != num_layers:
                raise UsageError(f"sequence_power is for {len(a)} layers, expected {num_layers}")
            return found
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"{path}: cannot be read ({error!r})") from None
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None


class OpenForecast:
    """A step's forecast, sharpened in place as its layers route; the scheduler reads `forecast` whenever it decides.

    What it says of a layer only ever changes to what is known from nearer by: an update from further away than the last
    one is ignored.
    """

    def __init__(self, fusion: Fusion, scores: Floats, inclusion: Floats, position: int) -> None:
        """Use `Fusion.open`."""
        self._fusion, self._scores, self._inclusion = fusion, scores, inclusion
        self._start = self.position = position
        self._distance = np.full(len(scores), np.iinfo(np.int64).max)

    @property
    def forecast(self) -> Forecast:
        """Calibrated probabilities [horizon, L, E] as of `position`."""
        return Forecast(self.position, self._inclusion)

    def refine(self, layer: int, adapter_scores: Floats, batch: int = 1) -> range:
        """Layer `layer` has routed, and its adapters give [d, E] for the layers after it (summed over `batch`).

        Returns the layers whose probabilities have changed.
        """
        self.position = self._start + layer + 1
        fusion = self._fusion
        reached = min(len(adapter_scores), fusion.depth)
        for distance in range(1, reached + 1):
            target = layer + distance
            if distance >= self._distance[target]:
                continue
            self._distance[target] = distance
            scores = fusion.pool(target, distance, self._scores[target], adapter_scores[distance - 1] / batch)
            self._inclusion[0, target] = fusion.calibration.apply_step(scores, distance - 1)
        return range(layer + 1, layer + 1 + reached)


@dataclass(frozen=True, eq=False)
class Both:
    """What a sequence predictor and adapters say of one sequence (S steps), and what was chosen."""

    sequence: Floats  # [S, L, E], at the step's start, with its token where the predictor uses one
    adapters: Floats  # [S, L, depth, E]: of layer p from d + 1 layers before; zeros where there is none
    trace: Trace


def both_forecasts(predictor: Predictor, adapters: LayerPredictor, trace: Trace, with_tokens: bool) -> Iterator[Both]:
    """For each sequence of a trace with router inputs."""
    layers, experts, depth = trace.num_layers, trace.num_experts, min(adapters.depth, trace.num_layers - 1)
    for i in range(trace.num_sequences):
        one = trace.sequence(i)
        scores = predictor.forecast_trace(one, 1, with_tokens)[:, 0]
        refined = np.zeros((one.num_steps, layers, depth, experts), dtype=np.float32)
        for layer in range(layers - 1):
            inputs = one.router_input(layer)
            for step in range(one.num_steps):
                rows = adapters.refine(layer, inputs[step : step + 1])
                for d, row in enumerate(rows[:depth]):
                    refined[step, layer + 1 + d, d] = row
        yield Both(scores, refined, one)


def fit_fusion(predictor: Predictor, adapters: LayerPredictor, trace: Trace, with_tokens: bool) -> Fusion:
    """Fits powers and calibration to a validation trace with router inputs. UsageError where it has none."""
    if trace.router_inputs is None:
        raise UsageError("router_inputs are not in this trace; collect it with router inputs")
    found = list(both_forecasts(predictor, adapters, trace, with_tokens))
    layers, depth = trace.num_layers, found[0].adapters.shape[2]
    truth = np.concatenate([psi_numpy(f.trace.expert_ids, None, trace.num_experts)[1:] for f in found])
    stride = max(1, len(truth) // _FIT_ROWS)
    truth = truth[::stride]
    sequence = log_scores(np.concatenate([f.sequence[1:] for f in found])[::stride])
    adapter = np.concatenate([f.adapters[1:] for f in found])[::stride]
    a, b = np.ones((layers, depth), dtype=np.float32), np.zeros((layers, depth), dtype=np.float32)
    for target in range(1, layers):
        for d in range(min(depth, target)):
            features = np.stack([sequence[:, target], log_scores(adapter[:, target, d])])
            a[target, d], b[target, d] = fit_powers(features, truth[:, target]).tolist()
    draft = Fusion(trace.top_k, a, b, Calibration(trace.top_k, (1.0,) * depth, ((),) * depth, ((),) * depth))
    return replace(draft, calibration=_calibrate(draft, found))


def fused_scores(fusion: Fusion, both: Both) -> Floats:
    """Pooled scores [S, L, depth, E]; where there is no adapter so far ahead, the sequence predictor's."""
    out = np.repeat(both.sequence[:, :, None], fusion.depth, axis=2)
    for target in range(1, both.trace.num_layers):
        for d in range(min(fusion.depth, target)):
            out[:, target, d] = fusion.pool(target, d + 1, both.sequence[:, target], both.adapters[:, target, d])
    return out


def _calibrate(fusion: Fusion, found: list[Both]) -> Calibration:
    """One temperature and curve a distance, from the layers that an adapter reaches from there."""
    parts = []
    for d in range(fusion.depth):
        forecasts = []
        for both in found:
            forecasts.append((fused_scores(fusion, both)[:, None, d + 1 :, d], both.trace.layers(d + 1)))
        steps = sum(both.trace.num_steps for both in found)
        parts.append(fit_to_forecasts(forecasts, 1, fusion.k, steps))
    return Calibration(
        fusion.k,
        tuple(part.temperature[0] for part in parts),
        tuple(part.forecast[0] for part in parts),
        tuple(part.happened[0] for part in parts),
    )
