"""Finds chains of recorded calls that the decode machine runs as one instruction: RMS norms, however a family writes them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from seqmoe.runtime.graph_tape import Node, Ref

_CASTS = ("aten.to.dtype", "aten._to_copy.default", "aten.type_as.default", "aten.float.default", "aten.to.other")
_MULS = ("aten.mul.Tensor",)
_FLOATS = (torch.float32, torch.bfloat16)


def refs_in(value: Any) -> list[Ref]:
    """Every Ref in nested tuples."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, (tuple, list)):
        return [ref for item in value for ref in refs_in(item)]
    return []


class _Uses:
    """Who creates and who reads each storage; None where a storage is also written in place."""

    def __init__(self, nodes: Sequence[Node], kept: set[int]) -> None:
        self.nodes, self.kept = nodes, kept
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.writers: dict[int, list[int]] = defaultdict(list)
        for place, node in enumerate(nodes):
            for key in {ref.storage for ref in refs_in((node.args, tuple(node.kwargs.values())))}:
                self.readers[key].append(place)
            for key in {*node.fresh, *node.writes}:
                self.writers[key].append(place)

    def only_reader(self, place: int) -> int | None:
        """The one node that reads what node `place` makes, and reads exactly that."""
        out = self.nodes[place].outs[0]
        readers = self.readers[out.storage]
        if len(readers) != 1 or self.writers[out.storage] != [place] or out.storage in self.kept:
            return None
        return readers[0] if out in refs_in(self.nodes[readers[0]].args) else None

    def maker(self, ref: Ref) -> int | None:
        """The node whose whole result `ref` is."""
        writers = self.writers[ref.storage]
        return writers[0] if len(writers) == 1 and ref in self.nodes[writers[0]].outs else None


def fuse_norms(nodes: list[Node], kept: set[int]) -> list[Node]:
    """`nodes` with every RMS norm replaced by one node "norm" (args: input, weight or None; kwargs: eps, rounded).

    `kept`: storages that must exist after the step, such as the logits'.
    """
    uses = _Uses(nodes, kept)
    gone: set[int] = set()
    made: dict[int, Node] = {}
    for place, node in enumerate(nodes):
        found = _norm_at(place, node, uses) if node.name == "aten.rsqrt.default" else None
        if found is not None:
            used, last, fused = found
            gone.update(used)
            made[last] = fused
    return [made.get(place, node) for place, node in enumerate(nodes) if place not in gone or place in made]


def _norm_at(place: int, node: Node, uses: _Uses) -> tuple[set[int], int, Node] | None:
    nodes = uses.nodes
    add = uses.maker(node.args[0])
    if add is None or nodes[add].name not in ("aten.add.Tensor", "aten.add.Scalar") or uses.only_reader(add) != place:
        return None
    if not isinstance(nodes[add].args[1], float) or not isinstance(nodes[add].args[0], Ref):
        return None
    mean = uses.maker(nodes[add].args[0])
    if mean is None or nodes[mean].name != "aten.mean.dim" or uses.only_reader(mean) != add:
        return None
    power = uses.maker(nodes[mean].args[0])
    if power is None or uses.only_reader(power) != mean:
        return None
    squared = nodes[power]
    x = squared.args[0]
    is_square = (squared.name == "aten.pow.Tensor_Scalar" and squared.args[1] == 2) or (
        squared.name in (*_MULS, "aten.square.default") and squared.args[-1] == x
    )
    dims = nodes[mean].args[1]
    if not is_square or x.dtype is not torch.float32 or tuple(d % len(x.size) for d in dims) != (len(x.size) - 1,):
        return None
    scale = uses.only_reader(place)
    if scale is None or nodes[scale].name not in _MULS or set(nodes[scale].args) != {x, node.outs[0]}:
        return None

    used, last = {place, add, mean, power, scale}, scale
    source, rounded, weight = x, torch.float32, None
    cast = uses.maker(x)
    if cast is not None and nodes[cast].name in _CASTS and nodes[cast].args[0].dtype in _FLOATS:
        inner = nodes[cast].args[0]
        untouched = not any(cast < writer for writer in uses.writers[inner.storage])
        if inner.size == x.size and untouched:
            source = inner
            if set(uses.readers[x.storage]) <= used and x.storage not in uses.kept:
                used.add(cast)
    following = uses.only_reader(last)
    if following is not None and nodes[following].name in _CASTS and nodes[following].outs[0].dtype in _FLOATS:
        rounded = nodes[following].outs[0].dtype
        used.add(following)
        last = following
        following = uses.only_reader(last)
    if following is not None and nodes[following].name in _MULS:
        current = nodes[last].outs[0]
        others = [value for value in nodes[following].args if value != current]
        row = others[0] if len(others) == 1 and isinstance(others[0], Ref) else None
        if (
            row is not None and row.size == (x.size[-1],) and row.stride == (1,) and row.dtype in _FLOATS
            and nodes[following].outs[0].size == x.size
        ):  # fmt: skip
            weight = row
            used.add(following)
            last = following
            following = uses.only_reader(last)
            is_cast = following is not None and nodes[following].name in _CASTS
            if following is not None and is_cast and nodes[last].outs[0].dtype is torch.float32:
                used.add(following)
                last = following
    out = nodes[last].outs[0]
    if out.dtype not in _FLOATS or out.size != x.size:
        return None
    facts = {"eps": float(nodes[add].args[1]), "rounded": rounded}
    return used, last, Node("norm", None, (source, weight), facts, (out,), (out.storage,))
