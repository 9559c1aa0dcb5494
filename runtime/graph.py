"""The decode step without dispatch: recorded once (`graph_tape`), lowered (`graph_lower`), then run as a program of the
decode machine (`kernels/fused_vm`) with one call between two layers' experts. No model code is copied or patched.

`compile_decode` gives a `DecodeGraph`, or where this model cannot be captured a `PlainDecode` with the reason.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

import seqmoe.runtime.graph_dense
import seqmoe.runtime.graph_rows  # noqa: F401  (both fill the table of handlers)
from seqmoe.runtime.graph_lower import ExpertsCall, ExpertsStep, Lowering, Program, Stretch
from seqmoe.runtime.graph_tape import (
    Capture,
    CaptureLayer,
    ForwardNames,
    GraphUnsupported,
    Tape,
    same_step,
    stand_in,
    stand_in_experts,
)
from seqmoe.runtime.kernels import fused_isa as isa
from seqmoe.runtime.kernels.team import at_work

# Root mean square by which the captured step's logits may differ from the model's own, relative to their spread.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06}
_CHECK_STEPS = 3


class DecodeGraph:
    """One model's decode step for a fixed batch, at most `max_context` tokens a sequence.

    `load_cache` takes over what prefill left; `step` feeds one token per sequence. Memory: `cache_bytes` for keys and
    values, allocated lazily by the system as positions are used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        experts_call: ExpertsCall,
        program: Program,
        capture: Capture,
        caches: dict[int, tuple[torch.Tensor, torch.Tensor]],
        states: Cache,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        max_context: int,
    ) -> None:
        self.model, self.experts_call, self.program = model, experts_call, program
        self.experts_modules = capture.experts_modules
        self.max_context, self.batch = max_context, tokens.shape[0]
        self.length = 0
        self.build_s = 0.0
        self._caches, self._states = caches, states
        self._tokens, self._positions = tokens.numpy(), positions.numpy()
        self._padding = np.zeros((self.batch, 1), np.int64)
        self._checked: set[int] = set()

    @staticmethod
    def build(
        model: PreTrainedModel,
        experts_call: ExpertsCall,
        *,
        max_context: int,
        batch: int,
        check: bool = True,
    ) -> "DecodeGraph":
        """Captures and checks the step; raises GraphUnsupported with the reason. Runs no expert: see `stand_in_experts`."""
        started = time.perf_counter()
        if model.device.type != "cpu":
            raise GraphUnsupported(f"the decode machine runs on the CPU, the model is on {model.device}")
        try:
            graph = _build(model, experts_call, max_context, batch)
            if check:
                _check(graph)
            graph.program.choose_threads()
            graph.reset()
        except GraphUnsupported:
            raise
        except Exception as error:  # model code may do anything; the plain forward still works
            raise GraphUnsupported(f"{type(error).__name__}: {error}") from error
        graph.build_s = time.perf_counter() - started
        return graph

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values at full context."""
        return sum(tensor.numel() * tensor.itemsize for pair in self._caches.values() for tensor in pair)

    @torch.inference_mode()
    def reset(self) -> None:
        """Back to an empty cache."""
        self.length = 0
        self._padding[:] = 0
        self.program.run[isa.RUN_PADDING : isa.RUN_PADDING + self.batch] = 0
        for layer in self._states.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                for state in (*layer.conv_states.values(), *layer.recurrent_states.values()):
                    if state is not None:
                        state.zero_()

    @torch.inference_mode()
    def load_cache(self, cache: Cache, attention_mask: torch.Tensor | None = None) -> None:
        """Takes over a prefill's cache. `attention_mask` [batch, >= length] may have zeros on the left only.

        Layer by layer, keys and values are copied here and `cache`'s own are let go: it holds views of ours afterwards, so
        that the peak is one layer above one cache. They are good until the next `load_cache`.
        """
        length = cache.get_seq_length() if self._caches else 0
        if length >= self.max_context:
            raise ValueError(f"the cache holds {length} tokens, and this graph at most {self.max_context}")
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                self._load_states(layer, self._states.layers[index])
            if index in self._caches and isinstance(layer, CacheLayerMixin) and layer.keys is not None:
                for mine, name in zip(self._caches[index], ("keys", "values"), strict=True):
                    theirs = getattr(layer, name)
                    place = mine[:, :, length - theirs.shape[2] : length]  # a sliding layer holds the end only
                    place.copy_(theirs)
                    setattr(layer, name, place)
        self._padding[:] = 0
        if attention_mask is not None:
            mask = attention_mask[:, :length].bool()
            padding = (~mask).sum(1)
            if not bool((mask == (torch.arange(length)[None] >= padding[:, None])).all()):
                raise ValueError("the attention mask has zeros elsewhere than on the left: pad batches on the left")
            self._padding[:, 0] = padding.numpy()
        self.program.run[isa.RUN_PADDING : isa.RUN_PADDING + self.batch] = self._padding[:, 0]
        self.length = length

    def _load_states(self, theirs: Any, mine: Any) -> None:
        for kind in ("conv_states", "recurrent_states"):
            for key, state in getattr(mine, kind).items():
                given = getattr(theirs, kind)[key]
                if state is not None and given is not None:
                    state.copy_(given)

    def export_cache(self) -> DynamicCache:
        """A Transformers cache of what is held now (copies), so that the plain forward can go on from here."""
        cache = DynamicCache(config=self.model.config)
        for index, (keys, values) in self._caches.items():
            layer = cache.layers[index]
            seen = slice(0, self.length)
            layer.update(keys[:, :, seen].clone(), values[:, :, seen].clone())
        for mine, theirs in zip(self._states.layers, cache.layers, strict=True):
            if isinstance(mine, LinearAttentionCacheLayerMixin):
                for key, state in mine.conv_states.items():
                    if state is not None:
                        theirs.update_conv_state(state.clone(), key)
                for key, state in mine.recurrent_states.items():
                    if state is not None:
                        theirs.update_recurrent_state(state.clone(), key)
        return cache

    @torch.inference_mode()
    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Feeds one token per sequence, [batch, 1]; gives logits [batch, vocabulary], valid until the next step."""
        if self.length >= self.max_context:
            raise ValueError(f"this graph holds at most {self.max_context} tokens")
        program = self.program
        self._tokens[:] = token_ids.numpy()
        self._positions[:] = self.length - self._padding
        program.run[isa.RUN_POSITION] = self.length
        with at_work():
            program.execute(self.experts_call)
        self.length += 1
        return program.logits

    def describe(self) -> dict[str, Any]:
        """What was captured: instructions, calls left to aten, seconds it took."""
        program = self.program
        return {
            "instructions": len(program.code),
            "stretches": sum(isinstance(step, Stretch) for step in program.steps),
            "experts_layers": sum(isinstance(step, ExpertsStep) for step in program.steps),
            "aten_calls": len(program.aten_calls),
            "arena_bytes": program.alive[0].numel(),
            "cache_bytes": self.cache_bytes,
            "build_s": round(self.build_s, 3),
        }


class PlainDecode:
    """The model's own forward behind the same interface, for models that cannot be captured; `reason` says why."""

    def __init__(self, model: PreTrainedModel, reason: str) -> None:
        self.model, self.reason = model, reason
        self.names = ForwardNames(model)
        self.cache: Cache | None = None
        self._mask: torch.Tensor | None = None

    def load_cache(self, cache: Cache, attention_mask: torch.Tensor | None = None) -> None:
        """Goes on with the prefill's cache as it is."""
        self.cache = cache
        length = cache.get_seq_length()
        self._mask = None if attention_mask is None else attention_mask[:, :length]

    @torch.inference_mode()
    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Feeds one token per sequence, [batch, 1]; gives logits [batch, vocabulary]."""
        if self.cache is None:
            self.cache = DynamicCache(config=self.model.config)
        length = self.cache.get_seq_length()
        extra: dict[str, torch.Tensor] = {}
        positions = torch.full_like(token_ids, length)
        if self._mask is not None:
            positions = self._mask.sum(1, keepdim=True)
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
            extra["attention_mask"] = self._mask
        arguments = self.names.arguments(cache=self.cache, position_ids=positions)
        return self.model(input_ids=token_ids, use_cache=True, return_dict=True, **arguments, **extra).logits[:, -1]


def compile_decode(
    model: PreTrainedModel,
    experts_call: ExpertsCall,
    *,
    max_context: int,
    batch: int,
    notice: Callable[[str], None] | None = None,
) -> DecodeGraph | PlainDecode:
    """A `DecodeGraph` where this model can be captured, else a `PlainDecode`, after `notice` was told why."""
    try:
        return DecodeGraph.build(model, experts_call, max_context=max_context, batch=batch)
    except GraphUnsupported as unsupported:
        reason = f"decode runs through Transformers' own forward: {unsupported}"
        if notice is not None:
            notice(reason)
        return PlainDecode(model, reason)


@torch.inference_mode()
def _eager(
    graph_model: PreTrainedModel, names: ForwardNames, ids: torch.Tensor, cache: Cache, mask: torch.Tensor
) -> Any:
    """The model's own forward on [batch, n] new tokens after those in `cache`; logits of the last."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    extra = {} if bool(mask.all()) else {"attention_mask": mask}
    return graph_model(
        input_ids=ids, use_cache=True, return_dict=True, **names.arguments(cache=cache, position_ids=positions), **extra
    ).logits[:, -1]  # fmt: skip


def _prompt(model: PreTrainedModel, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids spread over the vocabulary and a mask in which all but the last sequence are padded on the left."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(batch * length).view(batch, length) * 7919 + 13) % max(2, vocabulary - 1)
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch - 1):
        mask[row, : (row % 3)] = 0
    return ids, mask


def _build(model: PreTrainedModel, experts_call: ExpertsCall, max_context: int, batch: int) -> DecodeGraph:
    if model.dtype not in _TOLERANCE:
        raise GraphUnsupported(f"the decode machine computes in float32 and bfloat16, the model is in {model.dtype}")
    names = ForwardNames(model)
    cache = DynamicCache(config=model.config)
    ids, mask = _prompt(model, batch, min(4, max_context - 1))
    with stand_in(model):
        _eager(model, names, ids, cache, torch.ones_like(mask))
    capture = Capture(model, max_context)
    with torch.inference_mode():
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, CacheLayerMixin):
                continue
            if type(layer).__name__ == "DummyLayer":
                continue
            if type(layer).__name__ not in ("DynamicLayer", "DynamicSlidingWindowLayer"):
                raise GraphUnsupported(f"its cache layers are {type(layer).__name__}")
            if layer.is_sliding:
                capture.windows[index] = layer.get_max_length()
            cache.layers[index] = CaptureLayer(capture, index, layer.is_sliding, layer.get_seq_length())
        tokens, positions = torch.full((batch, 1), 1), torch.full((batch, 1), 4)
    tape, token_ref, position_ref, logits = capture.run(tokens, positions, cache, names)
    if tape.reads:
        _refuse_if_values_matter(
            model, tape, {token_ref.storage, position_ref.storage}, cache, names, max_context, batch
        )
    caches = {
        layer: (
            torch.empty(batch, keys[1], max_context, keys[3], dtype=dtype),
            torch.empty(batch, values[1], max_context, values[3], dtype=dtype),
        )
        for layer, (keys, values, dtype) in capture.key_shapes.items()
    }
    lowering = Lowering(tape, token_ref, position_ref, logits, caches, batch)
    program = lowering.program()
    program.logits = program.logits[:, -1]
    if not any(isinstance(step, ExpertsStep) for step in program.steps):
        raise GraphUnsupported("no experts were called during decode")
    return DecodeGraph(model, experts_call, program, capture, caches, cache, tokens, positions, max_context)


def _refuse_if_values_matter(
    model: PreTrainedModel,
    tape: Tape,
    inputs: set[int],
    cache: Cache,
    names: ForwardNames,
    max_context: int,
    batch: int,
) -> None:
    """A model that reads values in Python (say to choose rope frequencies by length) must do the same at both ends."""
    other = Capture(model, max_context)
    layers = list(cache.layers)
    for index, layer in enumerate(layers):
        if isinstance(layer, CaptureLayer):
            cache.layers[index] = CaptureLayer(other, index, layer.is_sliding, max_context - 1)
    tokens, positions = torch.full((batch, 1), 2), torch.full((batch, 1), max_context - 1)
    second, *_ = other.run(tokens, positions, cache, names)
    cache.layers[:] = layers
    if not same_step(tape, second, inputs):
        raise GraphUnsupported(
            f"the model reads a tensor's value in Python, and decodes differently for it within {max_context} tokens"
        )


def _check(graph: DecodeGraph) -> None:
    """Runs a few steps beside the model's own forward, both with stand-in experts; GraphUnsupported where they part."""
    model, names = graph.model, ForwardNames(graph.model)
    ids, mask = _prompt(model, graph.batch, 5)
    cache = DynamicCache(config=model.config)
    real, graph.experts_call = graph.experts_call, lambda layer, *arguments: stand_in_experts(*arguments)
    try:
        with stand_in(model):
            logits = _eager(model, names, ids, cache, mask)
            graph.load_cache(cache, mask)
            for number in range(_CHECK_STEPS):
                token = logits.argmax(-1, keepdim=True)
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                logits = _eager(model, names, token, cache, mask)
                mine = graph.step(token).float()
                spread = float(logits.float().std()) or 1.0
                error = float((mine - logits.float()).square().mean().sqrt()) / spread
                if not error <= _TOLERANCE.get(logits.dtype, 0.05) * (1 + number):
                    raise GraphUnsupported(
                        f"its captured step differs from the model's own by {error:.2g} of the logits' spread (step {number + 1})"
                    )
    finally:
        graph.experts_call = real
        graph.reset()


__all__ = ["DecodeGraph", "ExpertsCall", "GraphUnsupported", "PlainDecode", "compile_decode"]
