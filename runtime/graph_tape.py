"""Records one decode step as a flat list of aten calls, without touching model code.

Transformers lets attention, masks and experts be chosen by name; during capture they are ours, and leave one record each
(`experts`, `append`, `attend`) in place of whatever they would run. Everything else is seen by a dispatch mode below
autograd: PyTorch's own calls, in order, with every tensor as (storage, offset, sizes, strides).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "seqmoe_capture"

# Composite calls that are kept whole; all others are taken apart into the calls they are made of.
_WHOLE = {"linear", "matmul", "softmax", "to", "reshape", "contiguous", "silu", "conv1d", "one_hot", "gather", "where", "chunk",
          "split", "unbind", "narrow", "squeeze", "unsqueeze", "flatten", "unflatten", "expand_as", "type_as", "float", "size"}  # fmt: skip


class GraphUnsupported(Exception):
    """This model's decode step cannot be captured; the message says why, and the plain forward is to be used."""


@dataclass(frozen=True)
class Ref:
    """A tensor of the recorded step: a view of one storage."""

    storage: int  # key into Tape.storages
    offset: int  # elements
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return int(torch.Size(self.size).numel())


@dataclass
class Node:
    """One recorded call. `name` is the aten overload ("aten.mul.Tensor") or "experts", "append", "attend"."""

    name: str
    func: Any
    args: tuple[Any, ...]  # Refs in place of tensors
    kwargs: dict[str, Any]
    outs: tuple[Any, ...]  # Refs, or None for what is no tensor
    fresh: tuple[int, ...] = ()  # storages that this call created
    writes: tuple[int, ...] = ()  # storages of arguments that it changes


@dataclass
class Tape:
    """A recorded step: `nodes` in order, one real tensor per storage seen, and what stands for what."""

    nodes: list[Node] = field(default_factory=list)
    storages: dict[int, torch.Tensor] = field(default_factory=dict)  # a byte view of each storage, keeps it alive
    created: set[int] = field(default_factory=set)
    guarded: dict[int, str] = field(default_factory=dict)  # storages that only an `attend` may read
    alive: list[torch.Tensor] = field(default_factory=list)
    reads: int = 0  # times that Python looked at a tensor's value

    def ref(self, tensor: torch.Tensor) -> Ref:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            if tensor.device.type == "cpu":
                whole.set_(storage, 0, (storage.nbytes(),), (1,))
            self.storages[key] = whole
            self.alive.append(tensor)
        return Ref(key, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        base = func._schema.name.split("::")[1]
        if (
            base not in _WHOLE
            and func._can_decompose()
            and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        ):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if base in ("_local_scalar_dense", "item", "is_nonzero"):
            self.tape.reads += 1
            return func(*args, **kwargs)
        tape = self.tape
        seen_args = _to_refs(tape, args)
        seen_kwargs = {key: _to_refs(tape, value) for key, value in kwargs.items()}
        known = set(tape.storages)
        result = func(*args, **kwargs)
        outs = _to_refs(tape, result if isinstance(result, (tuple, list)) else (result,))
        fresh = tuple({out.storage for out in _flat_refs(outs)} - known)
        tape.created.update(fresh)
        writes = []
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = seen_args[place] if place < len(seen_args) else seen_kwargs.get(argument.name)
                writes += [ref.storage for ref in _flat_refs((value,))]
        tape.nodes.append(Node(str(func), func, tuple(seen_args), seen_kwargs, tuple(outs), fresh, tuple(writes)))
        return result


def _to_refs(tape: Tape, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tape.ref(value)
    if isinstance(value, (list, tuple)):
        return tuple(_to_refs(tape, item) for item in value)
    return value


def same_step(one: Tape, other: Tape, inputs: set[int]) -> bool:
    """Whether two recordings are of the same calls on the same constants; `inputs`: storages that may differ in value."""
    pairs: dict[int, int] = {}

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Ref) and isinstance(b, Ref):
            looks = (a.offset, a.size, a.stride, a.dtype) == (b.offset, b.size, b.stride, b.dtype)
            return looks and pairs.setdefault(a.storage, b.storage) == b.storage
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return len(a) == len(b) and all(map(same, a, b))
        return bool(a == b)

    if len(one.nodes) != len(other.nodes):
        return False
    for a, b in zip(one.nodes, other.nodes, strict=True):
        if a.name != b.name or a.kwargs.keys() != b.kwargs.keys():
            return False
        if not same((a.args, tuple(a.kwargs.values()), a.outs), (b.args, tuple(b.kwargs.values()), b.outs)):
            return False
    for key, other_key in pairs.items():
        mine, theirs = one.storages[key], other.storages[other_key]
        if key in one.created or key in inputs or mine.data_ptr() == theirs.data_ptr():
            continue
        if not torch.equal(mine, theirs):
            return False
    return True


def _flat_refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat_refs(item)


def stand_in_experts(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What capture and its check use for experts: cheap, needs no weights, and depends on every index and weight."""
    scale = (weights.float() * (1.0 + 0.05 * torch.cos(index.float()))).sum(-1, keepdim=True)
    return (hidden.float() * scale).to(hidden.dtype)


@dataclass(frozen=True)
class MaskKind:
    """Which past positions a token sees: all (0, 0), the last `window`, or those of its own `chunk`."""

    window: int = 0
    chunk: int = 0


class CaptureLayer(CacheLayerMixin):
    """Stands for one attention layer's cache while a step is recorded: keys and values pass by and are noted."""

    def __init__(self, capture: "Capture", index: int, is_sliding: bool, seen: int) -> None:
        super().__init__()
        self.capture, self.index, self.is_sliding, self.seen = capture, index, is_sliding, seen
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        return None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.capture.append(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1


class Capture:
    """The hooks of one recording; `run` gives the tape, its input references and its output's."""

    def __init__(self, model: PreTrainedModel, max_context: int) -> None:
        self.model, self.max_context = model, max_context
        self.tape = Tape()
        self.experts_modules: list[torch.nn.Module] = []
        self.masks: dict[int, MaskKind | GraphUnsupported] = {}  # by id of the marker given out
        self.windows: dict[int, int] = {}  # layer -> positions that its Transformers cache keeps
        self.keys: dict[int, int] = {}  # id of a key or value tensor handed out -> layer
        self.key_shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}
        self._alive: list[Any] = []

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache, forward_names: "ForwardNames"
    ) -> tuple[Tape, Ref, Ref, Ref]:
        """Records one step of [batch, 1] `tokens` at `positions`; gives (tape, tokens, positions, logits)."""
        tape = self.tape
        with _registered(self), _implementations(self.model, NAME, NAME), torch.inference_mode():
            token_ref, position_ref = tape.ref(tokens), tape.ref(positions)
            with Recorder(tape):
                out = self.model(
                    input_ids=tokens, use_cache=True, return_dict=True,
                    **forward_names.arguments(cache=cache, position_ids=positions),
                )  # fmt: skip
        return tape, token_ref, position_ref, tape.ref(out.logits)

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _note(self, name: str, inputs: tuple[torch.Tensor, ...], out: torch.Tensor | None, **facts: Any) -> None:
        tape = self.tape
        refs = tuple(tape.ref(tensor) for tensor in inputs)
        outs: tuple[Ref, ...] = ()
        fresh: tuple[int, ...] = ()
        if out is not None:
            outs = (tape.ref(out),)
            fresh = (outs[0].storage,)
            tape.created.update(fresh)
        tape.nodes.append(Node(name, None, refs, facts, outs, fresh))

    def experts(
        self, module: torch.nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        with _disable_current_modes():
            layer = len(self.experts_modules)
            self.experts_modules.append(module)
            out = stand_in_experts(hidden, index, weights)
            self._note("experts", (hidden, index, weights), out, layer=layer)
            return out

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with _disable_current_modes():
            if keys.shape[-2] != 1 or keys.dim() != 4:
                raise GraphUnsupported(f"layer {layer} caches keys of shape {tuple(keys.shape)} in one step")
            self._note("append", (keys, values), None, layer=layer)
            self.key_shapes[layer] = (tuple(keys.shape), tuple(values.shape), keys.dtype)
            out = keys.clone(), values.clone()
            for tensor in out:
                self.tape.guarded[self.tape.ref(tensor).storage] = f"layer {layer}'s cached keys and values"
            self.keys[id(out[0])] = self.keys[id(out[1])] = layer
            self._alive.append(out)
            return out

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        with _disable_current_modes():
            latent = self._latent(module, key) if id(key) not in self.keys else None
            if id(key) not in self.keys and latent is None:
                raise GraphUnsupported(f"{type(module).__name__} attends to keys that did not come from the cache")
            if latent is None and self.keys[id(key)] != self.keys.get(id(value)):
                raise GraphUnsupported(f"{type(module).__name__} attends to values that did not come from the cache")
            for name, given in kwargs.items():
                if isinstance(given, torch.Tensor) and name not in ("position_ids", "cache_position"):
                    raise GraphUnsupported(f"{type(module).__name__} passes the tensor {name} to its attention")
            if attention_mask is None:
                kind = MaskKind()
            elif id(attention_mask) in self.masks:
                known = self.masks[id(attention_mask)]
                if isinstance(known, GraphUnsupported):
                    raise known
                kind = known
            else:
                raise GraphUnsupported(f"{type(module).__name__} attends under a mask that it computes itself")
            layer: int = getattr(module, "layer_idx", -1) if latent is not None else self.keys[id(key)]
            window = self.windows.get(layer, 0)
            if 0 < window < self.max_context and window != (kind.window or kind.chunk):
                raise GraphUnsupported(f"layer {layer} keeps {window} positions, its mask shows {kind}")
            scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            out = torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1], dtype=query.dtype)
            facts = {"scale": scale, "softcap": float(softcap or 0.0), "mask": kind}
            if latent is not None:
                if s_aux is not None or softcap:
                    raise GraphUnsupported(f"{type(module).__name__} has sinks or a soft cap on latent attention")
                self._note("attend_latent", (query, latent), out, layer=layer, **facts)
            else:
                inputs = (query,) if s_aux is None else (query, s_aux)
                self._note("attend", inputs, out, layer=layer, **facts)
            return out, None

    def _latent(self, module: Any, key: torch.Tensor) -> torch.Tensor | None:
        """The up-projection of a multi-head latent attention [heads * (nope + v), rank], or None if it is no such module.

        There the cache holds latents, and keys and values of the whole past are recomputed from them; we attend in latent
        space instead. Recognised by the parts' names and shapes, not by the class; the check would find a stranger.
        """
        layer = getattr(module, "layer_idx", None)
        projection = getattr(module, "kv_b_proj", None)
        if layer not in self.key_shapes or not isinstance(projection, torch.nn.Linear) or projection.bias is not None:
            return None
        latents, rotated, _ = self.key_shapes[layer]
        nope, v = getattr(module, "qk_nope_head_dim", 0), getattr(module, "v_head_dim", 0)
        shapes_fit = (
            latents[1:3] == (1, 1) and rotated[1:3] == (1, 1) and projection.in_features == latents[3]
            and key.shape[-1] == nope + rotated[3] and projection.out_features == key.shape[1] * (nope + v)
        )  # fmt: skip
        return projection.weight if shapes_fit else None

    def mask(self, *args: Any, mask_function: Callable[..., Any], q_offset: Any = 0, **kwargs: Any) -> torch.Tensor:
        with _disable_current_modes():
            marker = torch.zeros(1, 1, 1, 1)
            try:
                self.masks[id(marker)] = classify_mask(mask_function, self.max_context)
            except GraphUnsupported as unsupported:  # matters only where a layer uses this mask
                self.masks[id(marker)] = unsupported
            self._alive.append(marker)
            return marker


def classify_mask(mask_function: Callable[..., Any], max_context: int) -> MaskKind:
    """Which of the known kinds a Transformers mask function is, by asking it; GraphUnsupported where it is another."""
    try:
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
        last = max_context - 1
        queries = sorted({min(q, last) for q in (*range(6), last // 3, last // 2, last - 1, last)})
        rows = {}
        for q in queries:
            seen = mask_function(zero, zero, zero + q, torch.arange(q + 1).view(1, 1, 1, -1))
            seen = torch.as_tensor(seen).expand(1, 1, 1, q + 1).flatten()
            first = int(seen.int().argmax())
            if not bool(seen[first:].all()):
                raise GraphUnsupported("a mask that is neither causal, sliding nor chunked")
            rows[q] = first
    except GraphUnsupported:
        raise
    except Exception as error:  # a mask function is arbitrary code of the model
        raise GraphUnsupported(f"a mask function that cannot be asked: {error}") from error
    if all(first == 0 for first in rows.values()):
        return MaskKind()
    top, start = max((q, first) for q, first in rows.items())
    window = top - start + 1
    if all(first == max(0, q - window + 1) for q, first in rows.items()):
        return MaskKind(window=window)
    for chunk in {start} | {start // n for n in range(1, 65) if start % n == 0}:
        if chunk > 0 and all(first == q // chunk * chunk for q, first in rows.items()):
            return MaskKind(chunk=chunk)
    raise GraphUnsupported("a mask that is neither causal, sliding nor chunked")


class ForwardNames:
    """The keyword names that this model's forward takes (the cache's name changed in Transformers 5)."""

    def __init__(self, model: PreTrainedModel) -> None:
        names = inspect.signature(model.forward).parameters
        self.cache = "cache" if "cache" in names else "past_key_values"
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
        self.positions = "position_ids" in names or anything

    def arguments(self, cache: Any, position_ids: torch.Tensor | None) -> dict[str, Any]:
        """Keyword arguments for `model.forward`."""
        found: dict[str, Any] = {self.cache: cache}
        if self.positions and position_ids is not None:
            found["position_ids"] = position_ids
        return found


@contextmanager
def _registered(capture: Capture) -> Iterator[None]:
    """The hooks under `NAME` in Transformers' tables, for the time of a recording."""
    # Masks are made only for names in the class-wide table.
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, capture.mask)
    ALL_EXPERTS_FUNCTIONS[NAME] = capture.experts
    ALL_ATTENTION_FUNCTIONS[NAME] = capture.attention
    try:
        yield
    finally:
        del ALL_EXPERTS_FUNCTIONS[NAME], ALL_ATTENTION_FUNCTIONS[NAME]
        type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping.pop(NAME, None)


@contextmanager
def _implementations(model: PreTrainedModel, attention: str | None, experts: str) -> Iterator[None]:
    """Every config of the model set to these implementations (None: left), and back afterwards."""
    configs: dict[int, Any] = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation"):
            configs[id(config)] = config
    before = [
        (config, config._attn_implementation_internal, config._experts_implementation_internal)
        for config in configs.values()
    ]
    try:
        for config, _, _ in before:
            if attention is not None:
                config._attn_implementation_internal = attention
            config._experts_implementation_internal = experts
        yield
    finally:
        for config, had_attention, had_experts in before:
            config._attn_implementation_internal = had_attention
            config._experts_implementation_internal = had_experts


@contextmanager
def stand_in(model: PreTrainedModel) -> Iterator[None]:
    """The model's experts replaced by `stand_in_experts`, for eager runs of capture's check."""
    name = NAME + "_check"
    ALL_EXPERTS_FUNCTIONS[name] = lambda module, hidden, index, weights: stand_in_experts(hidden, index, weights)
    try:
        with _implementations(model, None, name):
            yield
    finally:
        del ALL_EXPERTS_FUNCTIONS[name]
