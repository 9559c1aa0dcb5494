"""A model's routers as plain arrays, for predictors that apply a layer's router to another layer's input."""

from typing import Any

import numpy as np
import torch

from seqmoe.predictors.routers import Routers
from seqmoe.profiles.errors import CheckpointError
from seqmoe.runtime.engine import Engine

_NORMS = ("post_attention_layernorm", "ffn_norm", "mlp_norm")  # what families call the norm before the experts


def model_routers(engine: Engine) -> Routers:
    """Weight [L, E, H], and where every layer has one a bias [L, E] and the scale of the norm before it [L, H].

    A router is the one parameter [E, H] beside a layer's experts that is no projection of a shared expert. Raises CheckpointError where there is none, or more.
    """
    spec = engine.spec
    shape = (spec.num_experts, spec.hidden_size)
    weights, biases, norms = [], [], []
    for name in engine.checkpoint.moe_modules:
        block_name = name.rpartition(".")[0]
        block = engine.model.get_submodule(block_name)
        inside = name.removeprefix(f"{block_name}.") + "."
        found = {
            key: parameter
            for key, parameter in block.named_parameters()
            if tuple(parameter.shape) == shape and not key.startswith(inside) and "_proj" not in key
        }
        if len(found) != 1:
            raise CheckpointError(
                f"{block_name}: {len(found)} parameters look like a router {list(shape)}, expected one"
            )
        ((key, weight),) = found.items()
        weights.append(_array(weight))
        bias = dict(block.named_parameters()).get(key.removesuffix("weight") + "bias")
        biases.append(None if bias is None or tuple(bias.shape) != shape[:1] else _array(bias))
        layer = engine.model.get_submodule(block_name.rpartition(".")[0])
        scale: Any = next((getattr(getattr(layer, n), "weight", None) for n in _NORMS if hasattr(layer, n)), None)
        norms.append(None if scale is None or tuple(scale.shape) != shape[1:] else _array(scale))
    return Routers(np.stack(weights), _all(biases), _all(norms))


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy().copy()


def _all(rows: list[np.ndarray | None]) -> np.ndarray | None:
    """Stacked, if every layer has one."""
    there = [row for row in rows if row is not None]
    return np.stack(there) if len(there) == len(rows) else None
