"""A Hugging Face checkpoint on disk, opened for reading experts straight from its safetensors files."""

import copy
import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from seqmoe.profiles.errors import CheckpointError
from seqmoe.profiles.spec import ModelSpec
from seqmoe.runtime.facts import ModelFacts, observe
from seqmoe.runtime.headers import Headers, TensorEntry, read_headers
from seqmoe.runtime.kernels.experts_cpu import workspace_bytes
from seqmoe.runtime.kernels.plan import make_plan
from seqmoe.runtime.layout import InexpressibleError, Piece, RecordLayout, SymbolicTensor, View, split_by_expert
from seqmoe.runtime.meta import (
    build_meta_model,
    expert_parameters,
    find_experts_modules,
    read_config,
)

__all__ = ["Checkpoint", "RecordLayout", "View"]

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Checkpoint:
    """What lies where in a checkpoint's folder; made by `Checkpoint.open`, holds no weights and no open file.

    `sources` is int64 [L, E, n_views, 2]: file number (in `files`) and byte offset of each view of `layout`.
    `moe_modules` are the experts modules' names in layer order. `dense_tensors` are the tensors on disk that are not
    experts. `dtype` is what `from_pretrained` would load with. `digest` covers config.json and the files' names,
    sizes and headers.
    """

    folder: Path
    config: Any
    dtype: torch.dtype
    files: tuple[Path, ...]
    layout: RecordLayout
    sources: np.ndarray
    moe_modules: tuple[str, ...]
    dense_tensors: dict[str, TensorEntry]
    digest: str
    meta_model: Any = field(repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """Read config and headers, and find every expert's bytes.

        Raises:
            CheckpointError: the folder is not a whole, unquantised safetensors checkpoint of a Mixture-of-Experts
                model whose experts go through Transformers' experts interface; the line says what is wrong where.
        """
        folder = Path(folder)
        config = read_config(folder)
        headers = read_headers(folder)
        dtype = _auto_dtype(config, headers)
        model = build_meta_model(config, dtype)
        modules = find_experts_modules(model)
        symbols, expert_keys = _conversions(model, modules, headers)
        layout, sources = _records(folder, modules, symbols)
        config_bytes = (folder / "config.json").read_bytes()
        return cls(
            folder=folder,
            config=config,
            dtype=dtype,
            files=headers.files,
            layout=layout,
            sources=sources,
            moe_modules=tuple(modules),
            dense_tensors={name: entry for name, entry in headers.tensors.items() if name not in expert_keys},
            digest=hashlib.sha256(config_bytes + headers.digest.encode()).hexdigest(),
            meta_model=model,
        )

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.sources.shape[0])

    @property
    def num_experts(self) -> int:
        """Experts of each MoE layer."""
        return int(self.sources.shape[1])

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes in memory of everything but the experts: parameters (tied ones once) and buffers."""
        model = self.meta_model
        left_out = set(model.all_tied_weights_keys)
        for name in self.moe_modules:
            left_out.update(f"{name}.{param}" for param in expert_parameters(model.get_submodule(name)))
        loaded = model.state_dict().keys()
        # Some weights are kept in float32 whatever the model's type.
        plan = [(re.compile(key.replace("*", ".*")), to) for key, to in model._get_dtype_plan(self.dtype).items()]
        total = 0
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name not in left_out:
                kept = (to for pattern, to in plan if name in loaded and pattern.search(name))
                total += tensor.numel() * next(kept, tensor.dtype).itemsize
        return total

    @cached_property
    def facts(self) -> ModelFacts:
        """top_k, hidden size and cache bytes, from one forward pass on the meta device."""
        model = self.meta_model
        return observe(model, {name: model.get_submodule(name) for name in self.moe_modules})

    @property
    def max_context(self) -> int:
        """Tokens that the model's positions allow."""
        return int(getattr(self.config.get_text_config(), "max_position_embeddings", 0))

    def spec(self, slot_bytes: int) -> ModelSpec:
        """The sizes that budgets and profiles need; `slot_bytes` comes from the record plan.

        CheckpointError for experts that the kernels cannot compute.
        """
        facts, kernels = self.facts, self._kernel_bytes()
        return ModelSpec(
            name=self.folder.resolve().name,
            model_type=str(self.config.model_type),
            digest=self.digest,
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            top_k=facts.top_k,
            hidden_size=facts.hidden_size,
            record_bytes=self.layout.nbytes,
            slot_bytes=slot_bytes,
            dense_bytes=self.dense_bytes,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            state_bytes=facts.state_bytes,
            window_bytes_per_token=facts.window_bytes_per_token,
            kernel_bytes=kernels[0],
            kernel_bytes_per_token=kernels[1],
            dtype=str(self.dtype).removeprefix("torch."),
            max_context=self.max_context,
            vocab_size=int(getattr(self.config.get_text_config(), "vocab_size", 0)),
        )

    def _kernel_bytes(self) -> tuple[int, int]:
        """Working memory of the expert kernels: a part that is always there, and one for each token of a pass."""
        plans = [make_plan(self.layout, self.meta_model.get_submodule(name), self.dtype) for name in self.moe_modules]
        few, many = (
            max(workspace_bytes(plan, tokens, self.facts.top_k, torch.get_num_threads()) for plan in plans)
            for tokens in (4096, 8192)  # beyond what has a limit of its own
        )
        per_token = -(-(many - few) // 4096)
        return max(0, few - 4096 * per_token), per_token

    def full_digest(self) -> str:
        """SHA-256 of config.json and of all bytes of all files; reads everything."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for path in self.files:
            with open(path, "rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def _auto_dtype(config: Any, headers: Headers) -> torch.dtype:
    """As `from_pretrained(dtype="auto")`: the config's, else that of the first floating tensor."""
    for part in (config, config.get_text_config()):
        dtype = getattr(part, "dtype", None)
        if dtype is not None:
            return getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for entry in headers.tensors.values():
        dtype = TORCH_DTYPES.get(entry.dtype)
        if dtype is not None and dtype.is_floating_point:
            return dtype
    return torch.float32


def _conversions(
    model: Any, modules: dict[str, nn.Module], headers: Headers
) -> tuple[dict[str, SymbolicTensor], set[str]]:
    """Full experts parameter name -> where its bytes are; and the names on disk that go into experts.

    Follows `convert_and_load_state_dict_in_model`: the same renaming, the same grouping, the same operations.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    wanted = {f"{name}.{param}" for name, module in modules.items() for param in expert_parameters(module)}
    mappings: dict[str, Any] = {}
    keys: set[str] = set()
    for key in sorted(headers.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        if target not in wanted:
            continue
        if target not in mappings:
            mappings[target] = copy.deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(key, target)
        try:
            symbol = SymbolicTensor.on_disk(headers.tensors[key])
        except InexpressibleError as error:
            raise CheckpointError(f"{key}: {error} cannot be used") from None
        mappings[target].add_tensor(target, key, pattern or key, symbol)
        keys.add(key)
    symbols: dict[str, SymbolicTensor] = {}
    for target, mapping in mappings.items():
        try:
            realised = mapping.convert(target, model=model, config=model.config)
        except (InexpressibleError, ValueError, RuntimeError) as error:
            steps = ", ".join(repr(operation) for operation in getattr(mapping, "operations", []))
            raise CheckpointError(
                f"{target}: its conversion from the tensors on disk ({steps}) is no rearrangement of their bytes: {error}"
            ) from None
        for name, value in realised.items():
            symbols[name] = value[0] if isinstance(value, list) else value
    return symbols, keys


def _records(
    folder: Path, modules: dict[str, nn.Module], symbols: dict[str, SymbolicTensor]
) -> tuple[RecordLayout, np.ndarray]:
    first: tuple[str, tuple[View, ...]] | None = None
    sources: list[list[list[tuple[int, int]]]] = []
    for module_name, module in modules.items():
        params = expert_parameters(module)
        experts: list[list[Piece]] = [[] for _ in range(next(iter(params.values())).shape[0])]
        for param, meta in params.items():
            full = f"{module_name}.{param}"
            symbol = symbols.get(full)
            if symbol is None:
                raise CheckpointError(f"{folder}: no tensors on disk for {full}")
            if symbol.shape != meta.shape:
                raise CheckpointError(
                    f"{folder}: {full} has shape {list(symbol.shape)} on disk, the config says {list(meta.shape)}"
                )
            try:
                pieces = split_by_expert(param, symbol)
            except InexpressibleError as error:
                raise CheckpointError(f"{full}: cannot be read from the checkpoint's files: {error}") from None
            for expert, own in zip(experts, pieces, strict=True):
                expert.extend(own)
        for index, expert in enumerate(experts):
            views = tuple(piece[0] for piece in expert)
            if first is None:
                first = (module_name, views)
            elif views != first[1]:
                raise CheckpointError(
                    f"{folder}: experts of several layouts ({first[0]} and expert {index} of {module_name} differ)"
                )
        sources.append([[(file, offset) for _, file, offset in expert] for expert in experts])
        if len(sources[-1]) != len(sources[0]):
            raise CheckpointError(
                f"{folder}: layers with different numbers of experts ({len(sources[0])} in {next(iter(modules))}, "
                f"{len(sources[-1])} in {module_name})"
            )
    assert first is not None
    return RecordLayout(first[1]), np.array(sources, dtype=np.int64)
