"""A training's checkpoint: weights, their average, the optimiser's moments and all counters, in one safetensors file."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from seqmoe.predictors.seq2seq import Seq2SeqNet
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import CheckpointError, UsageError
from seqmoe.profiles.files import replacing

CHECKPOINT = "checkpoint.safetensors"
_FORMAT = "seqmoe-train-1"


@dataclass
class Progress:
    """Where a training is. All randomness follows from the seed and these counters, so nothing else need be kept."""

    step: int = 0
    total: int = 0  # steps planned; 0 = not yet known
    epoch: int = 0
    position: int = 0  # batches taken of this epoch
    skipped: int = 0  # steps of teacher forcing that its early end saved
    recursion_from: int | None = None  # first step of the second phase, once it is decided
    best_score: float = -1.0
    stale: int = 0  # validations since the best
    seconds: float = 0.0  # spent so far, over all sessions
    finished: str = ""  # why it ended
    history: list[dict[str, Any]] = field(default_factory=list)


def trace_digest(trace: Trace) -> str:
    """Identifies the steps that a training used."""
    digest = hashlib.sha256(trace.expert_ids.tobytes())
    digest.update(trace.seq_len.tobytes())
    return digest.hexdigest()[:16]


def save_checkpoint(
    folder: Path,
    net: Seq2SeqNet,
    average: Seq2SeqNet,
    best: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    identity: dict[str, Any],
) -> None:
    """Replaces the folder's checkpoint. `identity` is what a resumed training must share."""
    tensors = {f"net.{name}": value for name, value in net.state_dict().items()}
    tensors |= {f"average.{name}": value for name, value in average.state_dict().items()}
    tensors |= {f"best.{name}": value for name, value in best.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    header = {"format": _FORMAT, "progress": json.dumps(asdict(progress)), "identity": json.dumps(identity)}
    whole = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with replacing(folder / CHECKPOINT) as temporary:
        save_file(whole, temporary, header)


def load_checkpoint(
    folder: Path,
    net: Seq2SeqNet,
    average: Seq2SeqNet,
    optimizer: torch.optim.Optimizer,
    identity: dict[str, Any],
) -> tuple[Progress, dict[str, torch.Tensor]]:
    """Restores a training in place -> (progress, best weights). CheckpointError or UsageError naming what differs."""
    path = folder / CHECKPOINT
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, there is nothing to resume; leave --resume out to begin")
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        progress = Progress(**json.loads(header["progress"]))
        saved = json.loads(header["identity"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a checkpoint of seqmoe train ({' '.join(str(error).split())})") from None
    for name, value in identity.items():
        if saved.get(name) != value:
            raise UsageError(f"{path}: was trained with {name} {saved.get(name)}, this call has {value}")
    parts: dict[str, dict[str, torch.Tensor]] = {"net": {}, "average": {}, "best": {}, "optimizer": {}}
    for name, value in tensors.items():
        head, _, rest = name.partition(".")
        parts[head][rest] = value
    try:
        net.load_state_dict(parts["net"])
        average.load_state_dict(parts["average"])
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {' '.join(str(error).split())}") from None
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in parts["optimizer"].items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return progress, parts["best"]
