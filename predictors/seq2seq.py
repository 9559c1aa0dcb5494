"""The sequence predictor's networks: per group of layers Linear, Mamba2, Linear (design section 4; the paper's section 5.2).

Shapes: b batch, s steps, n layers of the group, E experts, m hidden. Input at step s is Psi of step s - 1 (zeros before
the first), and where tokens are used the row of the token that step s is fed; output at step s are logits for step s.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from seqmoe.predictors.mamba2 import Boundaries, Mamba2, Mamba2State
from seqmoe.predictors.psi import psi_of_scores
from seqmoe.predictors.seq2seq_features import (
    FeatureSpec,
    History,
    StepMemory,
    leave_one_out,
    recursed_features,
    row_features,
    step_features,
)
from seqmoe.profiles.errors import UsageError

NO_TOKEN = 0  # embedding row of a token that is not known yet, as in recursion
RARE_TOKEN = 1  # row of all tokens that training saw too seldom
if TYPE_CHECKING:
    from seqmoe.predictors.seq2seq_predictor import Seq2SeqPredictor

FEEDBACKS = ("psi", "soft")


@dataclass(frozen=True)
class Seq2SeqConfig:
    """What a predictor was made for, and its size. UsageError, naming the field, for what cannot be."""

    num_layers: int  # L
    num_experts: int  # E
    top_k: int  # k
    split: tuple[int, ...]  # trigger layers: group i is the layers from split[i - 1] (or 0) to split[i] - 1
    hidden: int = 512  # m
    blocks: int = 1
    d_state: int = 64
    headdim: int = 64
    expand: int = 2
    d_conv: int = 4
    chunk: int = 64  # steps of a chunk of the parallel scan
    token_rows: int = 0  # rows of the token embedding, the two special ones included; 0 = tokens are not used
    decays: tuple[float, ...] = (0.7, 0.95)  # these four: see seq2seq_features.FeatureSpec
    betas: tuple[float, ...] = (8.0, 20.0)
    token_weight: float = 100.0
    window: int = 512
    feedback: str = "psi"  # what recursion feeds back: "psi" (the best k, renormalised) or "soft" (all probabilities)

    def __post_init__(self) -> None:
        check_split(self.split, self.num_layers)
        if not 1 <= self.top_k <= self.num_experts:
            raise UsageError(f"top_k must be 1 to num_experts={self.num_experts}, got {self.top_k}")
        for name in ("hidden", "blocks", "d_state", "headdim", "expand", "d_conv", "chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.feedback not in FEEDBACKS:
            raise UsageError(f"feedback must be one of {', '.join(FEEDBACKS)}, got {self.feedback!r}")
        if self.hidden * self.expand % self.headdim:
            raise UsageError(f"hidden * {self.expand} must be a multiple of {self.headdim}, got hidden {self.hidden}")

    @property
    def uses_tokens(self) -> bool:
        return self.token_rows > 0

    @property
    def features(self) -> FeatureSpec:
        """What the input layer reads."""
        return FeatureSpec(self.decays, self.betas, token_weight=self.token_weight, window=self.window)

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(first layer, layer after the last) of each group."""
        return tuple(zip((0, *self.split[:-1]), self.split, strict=True))

    def replace(self, **changes: Any) -> "Seq2SeqConfig":
        return dataclasses.replace(self, **changes)


def check_split(split: Sequence[int], num_layers: int) -> None:
    """UsageError unless `split` is ascending trigger layers that end with the number of layers."""
    if not split or list(split) != sorted(set(split)) or split[0] < 1 or split[-1] != num_layers:
        example = f"{num_layers // 2},{num_layers}" if num_layers > 1 else "1"
        raise UsageError(
            f"trigger layers must ascend from 1 and end with the number of layers, such as {example} "
            f"for {num_layers} layers; got {','.join(str(layer) for layer in split) or 'none'}"
        )


class NetState(NamedTuple):
    """What a batch of sequences has left behind. Never changed in place; shapes never change."""

    memory: torch.Tensor  # [b, C, F], roots of Psi of the steps seen, step p at p % C
    tokens: torch.Tensor  # int64 [b, C], token rows fed in those steps
    filled: torch.Tensor  # int64 [b], steps in the memory; -1 before the first
    fed: torch.Tensor  # int64 [b], row of the token fed in the step that was forecast last
    means: torch.Tensor  # [b, decays, F]
    weights: torch.Tensor  # [b, matches, C], of the steps in the memory for the last step that was not recursion
    ahead: torch.Tensor  # int64 [b], recursions since
    blocks: tuple[Mamba2State, ...]


class Block(nn.Module):
    """x + Mamba2(RMSNorm(x))."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.mixer = Mamba2(
            config.hidden,
            d_state=config.d_state,
            d_conv=config.d_conv,
            expand=config.expand,
            headdim=config.headdim,
            chunk_size=config.chunk,
        )


class Dropout(NamedTuple):
    """Shares left out in training; all zero in use."""

    input: float = 0.0  # of the experts of Psi
    hidden: float = 0.0  # of a block's output, and of what the output layer reads
    token: float = 0.0  # of the embedding


class GroupNet(nn.Module):
    """The predictor of the layers [first, last): logits [.., n, E] of a step from the steps before it."""

    def __init__(self, config: Seq2SeqConfig, first: int, last: int) -> None:
        super().__init__()
        self.config, self.first, self.last = config, first, last
        self.layers = last - first
        size = self.layers * config.num_experts
        self.spec = config.features
        self.input = nn.Linear(self.spec.count(config.uses_tokens) * size, config.hidden)
        self.recursed = nn.Parameter(torch.zeros(config.hidden))  # added where the input is a forecast of our own
        self.token = nn.Embedding(config.token_rows, config.hidden) if config.uses_tokens else None
        self.table: torch.Tensor | None
        self.seen: torch.Tensor | None
        if self.token is not None:
            nn.init.normal_(self.token.weight, std=0.02)
        self.register_buffer("table", torch.zeros(config.token_rows, size) if config.uses_tokens else None)
        self.register_buffer("seen", torch.zeros(config.token_rows) if config.uses_tokens else None)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.output = nn.Linear(config.hidden, size)
        self.dropout = Dropout()

    def start(self, batch: int) -> NetState:
        """The state of `batch` sequences that have seen nothing."""
        device, size = self.recursed.device, self.layers * self.config.num_experts
        slots, spec = self.spec.window + 1, self.spec
        zeros = torch.zeros(batch, dtype=torch.int64, device=device)
        return NetState(
            torch.zeros(batch, slots, size, device=device),
            zeros.unsqueeze(1).repeat(1, slots),
            zeros - 1,
            zeros,
            torch.zeros(batch, len(spec.decays), size, device=device),
            torch.zeros(batch, spec.matches(self.config.uses_tokens), slots, device=device),
            zeros,
            tuple(block.mixer.start(batch) for block in self.mixers()),
        )

    def step(self, psi: torch.Tensor, rows: torch.Tensor | None, state: NetState) -> tuple[torch.Tensor, NetState]:
        """The next step: Psi [b, n, E] of the step before (zeros at the first), the rows [b] of the tokens that are fed
        or None -> (logits [b, n, E], state)."""
        if rows is None:
            rows = torch.zeros_like(state.fed)
        root = psi.flatten(1).sqrt()
        features, (memory, weights) = step_features(
            self.spec, root, rows, StepMemory(*state[:5]), self.table, self.layers, self.config.uses_tokens
        )
        logits, blocks = self.advance(features, rows, state.blocks)
        return logits, NetState(
            memory.memory, memory.tokens, memory.filled, rows, memory.means, weights, torch.zeros_like(rows), blocks
        )

    def recurse(self, psi: torch.Tensor, state: NetState) -> tuple[torch.Tensor, NetState]:
        """One step further without anything new, fed what was forecast: psi [b, n, E] -> (logits [b, n, E], state)."""
        root, ahead = psi.flatten(1).sqrt(), state.ahead + 1
        memory = StepMemory(*state[:5])
        features, means = recursed_features(self.spec, root, ahead, memory, state.weights, self.table)
        logits, blocks = self.advance(features, None, state.blocks, True)
        return logits, state._replace(means=means, ahead=ahead, blocks=blocks)

    def mixers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    @torch.no_grad()
    def history(
        self,
        psi: torch.Tensor,
        rows: torch.Tensor | None,
        segments: torch.Tensor | None,
        ids: torch.Tensor | None = None,
    ) -> History:
        """Features of whole rows (see seq2seq_features); with `ids` [b, s, n, k] the token table leaves each step out."""
        history = row_features(self.spec, psi, rows, segments, self.table, self.token is not None)
        if ids is not None and rows is not None and self.table is not None and self.seen is not None:
            chosen = torch.zeros_like(psi).scatter_(-1, ids, 1.0).flatten(2)
            history.features[:, :, -1] = leave_one_out(self.table, self.seen, rows, chosen)
        return history

    def embed(
        self, features: torch.Tensor, rows: torch.Tensor | None, recursed: torch.Tensor | bool = False
    ) -> torch.Tensor:
        """features [..., D, F], token rows int64 [...] (None: not known), `recursed` bool or [...] -> [..., m]."""
        flat = features.flatten(-2)
        x = self.input(F.dropout(flat, self.dropout.input, self.training and self.dropout.input > 0))
        if self.token is not None:
            embedded = self.token.weight[NO_TOKEN] if rows is None else self.token(rows)
            x = x + F.dropout(embedded, self.dropout.token, self.training and self.dropout.token > 0)
        if isinstance(recursed, torch.Tensor):
            return x + recursed.unsqueeze(-1) * self.recursed
        return x + self.recursed if recursed else x

    def forward(self, history: History, rows: torch.Tensor | None, segments: torch.Tensor | None) -> torch.Tensor:
        """Features of rows, token rows [b, s] or None, segments [b, s] or None (Mamba2.forward) -> logits [b, s, n, E]."""
        x = self.embed(history.features, rows)
        for block in self.mixers():
            x = x + self._drop(block.mixer(block.norm(x), segments))
        return self.read_out(x)

    def forward_with_boundaries(
        self, history: History, rows: torch.Tensor | None, segments: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[Boundaries, ...]]:
        """`forward`, and each block's states before every chunk."""
        x = self.embed(history.features, rows)
        boundaries = []
        for block in self.mixers():
            y, states = block.mixer.forward_with_boundaries(block.norm(x), segments)
            boundaries.append(states)
            x = x + self._drop(y)
        return self.read_out(x), tuple(boundaries)

    def advance(
        self,
        features: torch.Tensor,
        rows: torch.Tensor | None,
        states: tuple[Mamba2State, ...],
        recursed: torch.Tensor | bool = False,
    ) -> tuple[torch.Tensor, tuple[Mamba2State, ...]]:
        """One step of the network: features [b, D, F], rows [b] or None -> (logits [b, n, E], states after)."""
        x = self.embed(features, rows, recursed)
        after = []
        for block, before in zip(self.mixers(), states, strict=True):
            y, new = block.mixer.step(block.norm(x), before)
            after.append(new)
            x = x + self._drop(y)
        return self.read_out(x), tuple(after)

    def feed_back(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., n, E] -> the input of the next step in recursion, [..., n, E]."""
        probabilities = logits.float().softmax(-1)
        return psi_of_scores(probabilities, self.config.top_k) if self.config.feedback == "psi" else probabilities

    def read_out(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden [..., m] -> logits [..., n, E]."""
        return self.output(self._drop(self.norm(x))).unflatten(-1, (self.layers, self.config.num_experts))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout.hidden, self.training and self.dropout.hidden > 0)


class Seq2SeqNet(nn.Module):
    """The networks of all groups of a split."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        self.groups = nn.ModuleList(GroupNet(config, first, last) for first, last in config.groups)

    def nets(self) -> list[GroupNet]:
        return [net for net in self.groups if isinstance(net, GroupNet)]

    def set_dropout(self, dropout: Dropout) -> None:
        for net in self.nets():
            net.dropout = dropout


def parameter_count(config: Seq2SeqConfig) -> int:
    """Numbers that the groups together hold, the token tables included."""
    with torch.device("meta"):
        return sum(value.numel() for value in Seq2SeqNet(config).state_dict().values())


def hidden_for_budget(config: Seq2SeqConfig, budget_bytes: int, bytes_per_weight: int = 2, most: int = 512) -> int:
    """The widest hidden size up to `most`, a multiple of 64, whose groups together stay under the budget.

    64 when none does: a predictor must at least work. Wider than 512 takes longer for a step than a forecast may.
    """
    widths = range(64, most + 1, 64)
    fitting = [w for w in widths if parameter_count(config.replace(hidden=w)) * bytes_per_weight <= budget_bytes]
    return max(fitting, default=64)


def load_predictor(folder: str | Path) -> "Seq2SeqPredictor":
    """The predictor that `seqmoe train` wrote to a folder, ready to forecast. CheckpointError for a bad one."""
    from seqmoe.predictors.seq2seq_predictor import Seq2SeqPredictor

    return Seq2SeqPredictor.load(folder)
