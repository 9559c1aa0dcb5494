"""A trained sequence predictor on disk: `predictor.safetensors` and `predictor.json` in one folder. No pickle."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from seqmoe.predictors.batches import Vocabulary
from seqmoe.predictors.seq2seq import Seq2SeqConfig, Seq2SeqNet
from seqmoe.profiles.errors import CheckpointError, UsageError
from seqmoe.profiles.files import replacing, write_atomic

FORMAT = "seqmoe-seq2seq"
VERSION = 1
WEIGHTS, METADATA = "predictor.safetensors", "predictor.json"
# small, and what a rounding error in them does grows along the sequence
_KEPT_FLOAT32 = ("A_log", "dt_bias", ".D", "norm.weight", "conv1d.weight", "conv1d.bias", "recursed", ".bias", "seen")


@dataclass(frozen=True)
class PredictorInfo:
    """What goes with the weights: for which model, and how it was trained."""

    model_digest: str | None = None
    training: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SavedPredictor:
    """A predictor as it was read."""

    net: Seq2SeqNet
    vocabulary: Vocabulary | None
    info: PredictorInfo


def save_predictor(
    folder: Path, net: Seq2SeqNet, vocabulary: Vocabulary | None, info: PredictorInfo, dtype: torch.dtype | None = None
) -> None:
    """Writes the two files, the second last. Large weights go as `dtype` (default bfloat16), the small ones as float32."""
    tensors = {
        name: value.detach().to("cpu", torch.float32 if _small(name) else dtype or torch.bfloat16).contiguous()
        for name, value in net.state_dict().items()
    }
    if vocabulary is not None:
        tensors["vocabulary"] = torch.from_numpy(vocabulary.ids)
    target = folder / WEIGHTS
    with replacing(target) as temporary:
        save_file(tensors, temporary)
        digest = hashlib.sha256(temporary.read_bytes()).hexdigest()
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "config": dataclasses.asdict(net.config),
        "model_digest": info.model_digest,
        "weights_sha256": digest,
        "training": info.training,
    }
    write_atomic(folder / METADATA, json.dumps(metadata, indent=1) + "\n")


def read_metadata(folder: Path) -> tuple[Seq2SeqConfig, PredictorInfo, dict[str, Any]]:
    """The config, the rest, and the raw JSON of a saved predictor. CheckpointError naming file and field."""
    path = folder / METADATA
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a predictor's folder has {METADATA} and {WEIGHTS} (seqmoe train)")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        got = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise CheckpointError(f"{path}: format must be {FORMAT!r}, got {got!r}")
    if raw.get("version") != VERSION:
        raise CheckpointError(f"{path}: version must be {VERSION}, got {raw.get('version')!r}")
    config = _config(path, raw.get("config"))
    digest, training = raw.get("model_digest"), raw.get("training", {})
    if not isinstance(digest, str | None) or not isinstance(training, dict):
        raise CheckpointError(f"{path}: model_digest must be text or null, training an object")
    return config, PredictorInfo(digest, training), raw


def load_predictor(folder: Path, device: str | torch.device = "cpu") -> SavedPredictor:
    """Reads a saved predictor, weights as float32. CheckpointError, naming file and field, for anything wrong with it."""
    config, info, raw = read_metadata(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, {METADATA} beside it needs it")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if raw.get("weights_sha256") != digest:
        raise CheckpointError(
            f"{path}: sha256 is {digest[:12]}, {METADATA} says {str(raw.get('weights_sha256'))[:12]}: "
            "the two files are not of one predictor, or one is damaged"
        )
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({' '.join(str(error).split())})") from None
    ids = tensors.pop("vocabulary", None)
    vocabulary = None if ids is None else Vocabulary(ids.numpy().astype(np.int64))
    rows = 0 if vocabulary is None else vocabulary.rows
    if rows != config.token_rows:
        raise CheckpointError(f"{path}: vocabulary has {rows} rows, {METADATA} says token_rows {config.token_rows}")
    net = Seq2SeqNet(config)
    expected = net.state_dict()
    for name in sorted(set(expected) ^ set(tensors)):
        raise CheckpointError(
            f"{path}: tensor {name} is {'missing' if name in expected else 'not part of this config'}"
        )
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(value.shape)}, {METADATA} wants {list(expected[name].shape)}"
            )
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{path}: tensor {name} has values that are not finite")
    net.load_state_dict({name: value.float() for name, value in tensors.items()})
    return SavedPredictor(net.eval().to(device), vocabulary, info)


def check_fits(
    config: Seq2SeqConfig,
    where: Path | str,
    *,
    num_layers: int,
    num_experts: int,
    top_k: int,
    split: tuple[int, ...] | None = None,
    model_digest: str | None = None,
    made_for: str | None = None,
) -> None:
    """UsageError, naming the field and the expected value, unless a predictor is for this model and split.

    `made_for` is the predictor's own model digest; digests are compared where both are known.
    """
    wanted = {"num_layers": num_layers, "num_experts": num_experts, "top_k": top_k}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise UsageError(f"{where}: predictor has {name} {getattr(config, name)}, expected {value}")
    if split is not None and config.split != tuple(split):
        have, want = (",".join(str(layer) for layer in layers) for layers in (config.split, split))
        raise UsageError(f"{where}: predictor has trigger layers {have}, expected {want}")
    if model_digest is not None and made_for is not None and model_digest != made_for:
        raise UsageError(f"{where}: predictor was trained for model {made_for}, expected {model_digest}")


def _config(path: Path, raw: Any) -> Seq2SeqConfig:
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: config must be an object")
    fields = {f.name: f for f in dataclasses.fields(Seq2SeqConfig)}
    for name in raw:
        if name not in fields:
            raise CheckpointError(f"{path}: config.{name} is not known; known are {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, known in fields.items():
        if name not in raw:
            if known.default is dataclasses.MISSING:
                raise CheckpointError(f"{path}: config.{name} is missing")
            continue
        value = raw[name]
        kind = {"feedback": str, "token_weight": float, "decays": float, "betas": float}.get(name, int)
        if name in ("split", "decays", "betas"):
            if not isinstance(value, list) or not all(type(part) is kind for part in value):
                raise CheckpointError(f"{path}: config.{name} must be a list of type {kind.__name__}, got {value!r}")
            value = tuple(value)
        elif type(value) is not kind:
            raise CheckpointError(f"{path}: config.{name} must be of type {kind.__name__}, got {value!r}")
        values[name] = value
    try:
        return Seq2SeqConfig(**values)
    except UsageError as error:
        raise CheckpointError(f"{path}: config: {error}") from None


def _small(name: str) -> bool:
    return name.endswith(_KEPT_FLOAT32)
