"""Where the bytes of each expert lie, learnt by running Transformers' own conversion operations on symbols.

A checkpoint's tensors become an experts module's stacked parameters through operations such as "stack the experts,
then concatenate gate and up" (`transformers.conversion_mapping`). Here the very same operations run, but on
`SymbolicTensor`: no data, just which bytes of which file make which part of the result. So there is no table of
model families and no list of operations; what is not a rearrangement of whole pieces of bytes is refused by name.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from seqmoe.runtime.headers import ITEM_BYTES, TensorEntry


class InexpressibleError(Exception):
    """An operation whose result is no rearrangement of bytes on disk."""


@dataclass(frozen=True)
class View:
    """One contiguous piece of an expert's record, as it lies on disk.

    `param[e].narrow(dim, start, shape[dim])`, for expert e of the experts module's parameter `param`, is these bytes
    seen with `shape` and `strides` (in elements).
    """

    param: str
    dim: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class RecordLayout:
    """The pieces that make up any expert of the model, in the order of `Checkpoint.sources`' third axis."""

    views: tuple[View, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one record, without any alignment."""
        return sum(view.nbytes for view in self.views)


@dataclass(frozen=True)
class Part:
    """A box of a symbolic tensor and the bytes behind it; `strides` in elements, `offset` in bytes."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    file: int
    offset: int


class SymbolicTensor:
    """Stands for a tensor in Transformers' conversion operations: knows its bytes' places, not their values."""

    def __init__(self, shape: Sequence[int], dtype: str, parts: Sequence[Part]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.parts = tuple(parts)

    @classmethod
    def on_disk(cls, entry: TensorEntry) -> "SymbolicTensor":
        """The tensor that `entry` describes (row-major, as safetensors stores all)."""
        if entry.dtype not in ITEM_BYTES:
            raise InexpressibleError(f"elements of type {entry.dtype}")
        zero = (0,) * len(entry.shape)
        strides = tuple(math.prod(entry.shape[i + 1 :]) for i in range(len(entry.shape)))
        return cls(entry.shape, entry.dtype, [Part(zero, entry.shape, strides, entry.file, entry.offset)])

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        handler = cls._FUNCTIONS.get(getattr(func, "__name__", ""))
        if handler is None:
            raise InexpressibleError(f"torch.{getattr(func, '__name__', func)}")
        return handler(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InexpressibleError(f"Tensor.{name}")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self, *_: Any, **__: Any) -> "SymbolicTensor":
        return self  # where the bytes lie does not depend on how the result would be stored

    clone = detach = contiguous

    def permute(self, *dims: Any) -> "SymbolicTensor":
        order = [d % self.ndim for d in (dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)]

        def move(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[d] for d in order)

        parts = [replace(p, start=move(p.start), shape=move(p.shape), strides=move(p.strides)) for p in self.parts]
        return SymbolicTensor(move(self.shape), self.dtype, parts)

    def transpose(self, dim0: int, dim1: int) -> "SymbolicTensor":
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permute(order)

    def narrow(self, dim: int, start: int, length: int) -> "SymbolicTensor":
        dim %= self.ndim
        parts = [cut for part in self.parts if (cut := self._cut(part, dim, start, start + length)) is not None]
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return SymbolicTensor(shape, self.dtype, parts)

    def _cut(self, part: Part, dim: int, low: int, high: int) -> Part | None:
        first, last = max(part.start[dim], low), min(part.start[dim] + part.shape[dim], high)
        if first >= last:
            return None
        skipped = (first - part.start[dim]) * part.strides[dim] * ITEM_BYTES[self.dtype]
        return replace(
            part,
            start=(*part.start[:dim], first - low, *part.start[dim + 1 :]),
            shape=(*part.shape[:dim], last - first, *part.shape[dim + 1 :]),
            offset=part.offset + skipped,
        )

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple["SymbolicTensor", ...]:
        total = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
        if sum(sizes) != total:
            raise InexpressibleError(f"torch.split of {total} into {list(sizes)}")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple["SymbolicTensor", ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def squeeze(self, dim: int) -> "SymbolicTensor":
        dim %= self.ndim
        if self.shape[dim] != 1:
            return self

        def drop(values: Sequence[int]) -> tuple[int, ...]:
            return (*values[:dim], *values[dim + 1 :])

        parts = [replace(p, start=drop(p.start), shape=drop(p.shape), strides=drop(p.strides)) for p in self.parts]
        return SymbolicTensor(drop(self.shape), self.dtype, parts)

    def unsqueeze(self, dim: int) -> "SymbolicTensor":
        dim %= self.ndim + 1

        def add(values: Sequence[int], value: int) -> tuple[int, ...]:
            return (*values[:dim], value, *values[dim:])

        parts = [
            replace(p, start=add(p.start, 0), shape=add(p.shape, 1), strides=add(p.strides, 1)) for p in self.parts
        ]
        return SymbolicTensor(add(self.shape, 1), self.dtype, parts)

    @staticmethod
    def cat(tensors: Sequence["SymbolicTensor"], dim: int = 0) -> "SymbolicTensor":
        first = tensors[0]
        dim %= first.ndim
        parts: list[Part] = []
        at = 0
        for tensor in tensors:
            others = [(*t.shape[:dim], *t.shape[dim + 1 :]) for t in (first, tensor)]
            if tensor.dtype != first.dtype or others[0] != others[1]:
                raise InexpressibleError("torch.cat of tensors of different shapes or types")
            for part in tensor.parts:
                start = (*part.start[:dim], part.start[dim] + at, *part.start[dim + 1 :])
                parts.append(Part(start, part.shape, part.strides, part.file, part.offset))
            at += tensor.shape[dim]
        return SymbolicTensor((*first.shape[:dim], at, *first.shape[dim + 1 :]), first.dtype, parts)

    @staticmethod
    def stack(tensors: Sequence["SymbolicTensor"], dim: int = 0) -> "SymbolicTensor":
        return SymbolicTensor.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)

    _FUNCTIONS: ClassVar[dict[str, Callable]]


SymbolicTensor._FUNCTIONS = {
    name: getattr(SymbolicTensor, name)
    for name in ("cat", "stack", "transpose", "permute", "narrow", "split", "chunk", "squeeze", "unsqueeze", "clone")
} | {"concat": SymbolicTensor.cat, "detach": SymbolicTensor.contiguous}


Piece = tuple[View, int, int]
"""A view with the file and the byte offset where it begins for one expert."""


def split_by_expert(param: str, tensor: SymbolicTensor) -> list[list[Piece]]:
    """Pieces of `param` (`tensor`, [E, ...]) for each expert, by ascending start.

    Raises:
        InexpressibleError: a piece is not contiguous on disk, or is no slice along one dimension.
    """
    pieces: list[list[Piece]] = [[] for _ in range(tensor.shape[0])]
    inner = tuple(tensor.shape[1:])
    for part in tensor.parts:
        view = _view(param, inner, part, tensor.dtype)
        step = part.strides[0] * ITEM_BYTES[tensor.dtype]
        for i in range(part.shape[0]):
            pieces[part.start[0] + i].append((view, part.file, part.offset + i * step))
    for expert in pieces:
        expert.sort(key=lambda piece: piece[0].start)
    return pieces


def _view(param: str, inner: tuple[int, ...], part: Part, dtype: str) -> View:
    start, shape = part.start[1:], part.shape[1:]
    cut = [d for d in range(len(inner)) if shape[d] != inner[d]]
    if len(cut) > 1:
        raise InexpressibleError(f"{param}: a block that is cut along {len(cut)} dimensions")
    # Dimensions of size 1 are never stepped along: one value for all, so that equal views compare equal.
    strides = tuple(stride if size > 1 else 1 for stride, size in zip(part.strides[1:], shape, strict=True))
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != expected:
            raise InexpressibleError(f"{param}: the bytes of one expert are not contiguous on disk")
        expected *= size
    dim = cut[0] if cut else 0
    return View(param, dim, start[dim] if start else 0, shape, strides, dtype)
