"""What a model caches and routes, seen from one pass over its meta-device copy: no family's formula is needed."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ModelFacts:
    """Cache sizes are for one sequence.

    `kv_bytes_per_token` is the cache's growth per token in a long context, `state_bytes` the part that does not
    grow: recurrent states and full sliding windows. For a shorter context the sum is an upper bound.
    `window_bytes_per_token` is what a token takes in the sliding-window layers, of which the captured decode step
    (`graph.py`) keeps the whole context.
    """

    top_k: int
    hidden_size: int
    kv_bytes_per_token: int
    state_bytes: int
    window_bytes_per_token: int = 0


def observe(model: Any, experts: dict[str, nn.Module]) -> ModelFacts:
    """Run `model` (on the meta device) on two lengths of tokens and look at its cache.

    Experts are replaced by a stub, and of decoder layers that are alike only the first runs: the pass costs
    milliseconds per kind of layer, not per layer.
    """
    shapes: dict[str, int] = {}

    def stub(hidden: torch.Tensor, top_k_index: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        shapes["top_k"], shapes["hidden"] = top_k_index.shape[-1], hidden.shape[-1]
        return hidden

    config = model.config.get_text_config()
    layers = _decoder_layers(model, next(iter(experts)))
    stands_for = _alike(layers, config)
    # Longer than any sliding window, whose cache stops growing there. One short of a multiple of 128, so that caches
    # which compress blocks of tokens hold the longest rest that they can.
    window = getattr(config, "sliding_window", None) or 0
    longest = getattr(config, "max_position_embeddings", None) or 512
    tokens = max(2, min(max(256, 2 * window), longest // 2))
    try:
        for module in experts.values():
            module.forward = stub
        _skip_repeated(layers, stands_for)
        (short, _), (long, window_bytes) = (
            _cache_bytes(model, count, stands_for) for count in (tokens - 1, 2 * tokens - 1)
        )
    finally:
        for module in (*experts.values(), *layers):
            vars(module).pop("forward", None)
    growth = -(-(long - short) // tokens)
    return ModelFacts(
        top_k=shapes["top_k"],
        hidden_size=shapes["hidden"],
        kv_bytes_per_token=growth,
        state_bytes=max(0, short - (tokens - 1) * growth),
        window_bytes_per_token=window_bytes,
    )


def _decoder_layers(model: Any, experts_name: str) -> list[nn.Module]:
    """The list of layers that the experts module lies in."""
    path = experts_name.split(".")
    for end in range(len(path)):
        module = model.get_submodule(".".join(path[:end]))
        if isinstance(module, nn.ModuleList):
            return list(module)
    return []


def _alike(layers: list[nn.Module], config: Any) -> list[int]:
    """For each layer the first layer that is built the same way."""
    per_layer = [v for v in vars(config).values() if isinstance(v, (list, tuple)) and len(v) == len(layers)]
    first: dict[Any, int] = {}
    kinds = []
    for index, layer in enumerate(layers):
        signature = [str(values[index]) for values in per_layer]
        for name, module in layer.named_modules():
            values = {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, (int, float, str, bool)) and "idx" not in key and "index" not in key
            }
            shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
            signature.append(f"{name} {type(module)} {sorted(values.items())} {shapes}")
        kinds.append(first.setdefault(tuple(signature), index))
    return kinds


def _skip_repeated(layers: list[nn.Module], stands_for: list[int]) -> None:
    rest: dict[int, tuple] = {}  # what a layer returns after the hidden states, where it returns a tuple

    def recorder(index: int, forward: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if isinstance(output, tuple):
                rest[index] = output[1:]
            return output

        return run

    def skipper(kind: int) -> Callable:
        def run(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            return (hidden_states, *rest[kind]) if kind in rest else hidden_states

        return run

    for index, layer in enumerate(layers):
        kind = stands_for[index]
        layer.forward = recorder(index, layer.forward) if kind == index else skipper(kind)


def _cache_bytes(model: Any, tokens: int, stands_for: list[int]) -> tuple[int, int]:
    """Bytes of the cache after `tokens` tokens, and of one token in its sliding-window layers."""
    ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cache = next(value for value in output.values() if hasattr(value, "layers"))
    own = [sum(tensor.nbytes for tensor in _tensors(vars(layer))) for layer in cache.layers]
    window = [_window_bytes_per_token(layer) for layer in cache.layers]
    if len(own) > len(stands_for):
        return sum(own), sum(window)
    kinds = [kind for kind in stands_for if kind < len(own)]
    return sum(own[kind] for kind in kinds), sum(window[kind] for kind in kinds)


def _window_bytes_per_token(layer: Any) -> int:
    if not getattr(layer, "is_sliding", False) or not isinstance(getattr(layer, "keys", None), torch.Tensor):
        return 0
    return sum(tensor.nbytes // max(1, tensor.shape[-2]) for tensor in (layer.keys, layer.values))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
