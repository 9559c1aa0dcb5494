"""The hook into Transformers: its experts modules call `ALL_EXPERTS_FUNCTIONS["seqmoe"]`, which finds the engine bound to
the module. No model code is patched or copied; a module without a binding is refused with a plain message."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = "seqmoe"
_BINDING = "_seqmoe_binding"


class ExpertsCall(Protocol):
    """Runs the chosen experts of one MoE layer.

    hidden [tokens, hidden_size], index int64 [tokens, k], weights [tokens, k] -> [tokens, hidden_size] in hidden's dtype.
    """

    def __call__(
        self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor: ...


def bind(model: PreTrainedModel, modules: Sequence[torch.nn.Module], call: ExpertsCall) -> None:
    """Routes the experts `modules` of `model` (in layer order) to `call`; the model then runs as any other."""
    for layer, module in enumerate(modules):
        # Set past Module.__setattr__: the binding is no part of the model's state.
        module.__dict__[_BINDING] = _bound(call, layer)
        config: Any = module.config
        config._experts_implementation = IMPLEMENTATION
    model.config._experts_implementation = IMPLEMENTATION


def unbind(modules: Sequence[torch.nn.Module]) -> None:
    """Takes the bindings off again, so that the engine can be freed although the model lives on."""
    for module in modules:
        module.__dict__.pop(_BINDING, None)


def _bound(call: ExpertsCall, layer: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    def run(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return call(layer, hidden, index, weights)

    return run


def seqmoe_experts_forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function registered with Transformers; RuntimeError where the module belongs to no open engine."""
    binding = module.__dict__.get(_BINDING)
    if binding is None:
        raise RuntimeError("this model's seqmoe engine is closed, or was never opened: use seqmoe.runtime.engine.Engine")
    return binding(hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = seqmoe_experts_forward
