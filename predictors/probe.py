"""A small causal transformer over the steps: not meant to be run beside a model, but to show what the past can say.

One head for each step ahead, trained directly for it (KL against Psi), with and without the fed tokens in one model.
"""

import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.rivals import Rival, Scores, Tokens
from seqmoe.predictors.trace import Trace

_UNKNOWN, _RARE = 0, 1  # embedding rows: token not known; token that training saw less than twice
_WINDOW = 512  # steps that attention reaches back


class _Attend(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x [b, s, width], bias [heads, s, s] added to the attention's logits."""
        b, s, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, s, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(b, s, width)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), self.dropout, self.training)


class ProbeNet(nn.Module):
    """Psi of the step before and the token about to be fed -> logits [b, s, horizon, L, E]."""

    def __init__(
        self, shape: tuple[int, int], horizon: int, rows: int, width: int, depth: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.shape, self.horizon, self.heads, self.dropout = shape, horizon, 4, dropout
        size = shape[0] * shape[1]
        self.psi, self.token = nn.Linear(size, width), nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(_Attend(width, self.heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, horizon * size)
        nn.init.normal_(self.token.weight, std=0.05)

    def forward(self, psi: torch.Tensor, rows: torch.Tensor, ahead: list[int]) -> torch.Tensor:
        """psi [b, s, L * E], rows int64 [b, s] -> logits of these steps ahead, [b, s, len(ahead), L, E]."""
        b, s, _ = psi.shape
        x = self.psi(psi * math.sqrt(psi.shape[2] / 32)) + self.token(rows)
        x = F.dropout(x, self.dropout, self.training)
        # attention fades with distance, at another rate in each head (ALiBi): it works for any length
        back = torch.arange(s)[:, None] - torch.arange(s)[None, :]
        slope = torch.tensor([2.0 ** -(2 * i + 1) for i in range(self.heads - 1)] + [0.0])
        fade = -slope[:, None, None] * back
        fade = fade.masked_fill((back < 0) | (back >= _WINDOW), -torch.inf)
        for block in self.blocks:
            x = block(x, fade)
        weight = self.head.weight.view(self.horizon, -1, x.shape[2])[ahead].flatten(0, 1)
        bias = self.head.bias.view(self.horizon, -1)[ahead].flatten()
        return F.linear(self.norm(x), weight, bias).view(b, s, len(ahead), *self.shape)


class TransformerProbe(Rival):
    """The upper bound that a transformer of this size finds in the training trace."""

    name = "probe"
    uses_tokens = True

    def __init__(
        self,
        horizon: int = 8,
        width: int = 512,
        depth: int = 2,
        epochs: int = 6,
        seed: int = 0,
        progress: Callable[[int, int, float], None] | None = None,
    ) -> None:
        super().__init__()
        self.horizon, self.width, self.depth, self.epochs, self.seed = horizon, width, depth, epochs, seed
        self._progress = progress
        self._ids: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._net: ProbeNet | None = None

    def fit(self, trace: Trace) -> Self:
        """See Rival. Six epochs over 90,000 steps of 768 experts take a quarter of an hour on one core."""
        super().fit(trace)
        torch.manual_seed(self.seed)
        if trace.tokens is not None:
            ids, uses = np.unique(trace.tokens, return_counts=True)
            self._ids = ids[uses > 1]
        shape = (trace.num_layers, trace.num_experts)
        self._net = net = ProbeNet(shape, self.horizon, len(self._ids) + 2, self.width, self.depth)
        with torch.no_grad():  # begins as popularity
            net.head.bias.copy_(torch.from_numpy(np.log(self.popularity)).flatten().repeat(self.horizon))
            net.head.weight.mul_(0.2)
        rest = [p for name, p in net.named_parameters() if name != "token.weight"]
        groups: list[dict[str, Any]] = [
            {"params": rest},
            {"params": [net.token.weight], "lr": 4e-3, "weight_decay": 0.0},  # a row is seen seldom
        ]
        optimizer = torch.optim.AdamW(groups, lr=1.2e-3, weight_decay=0.02, betas=(0.9, 0.98))
        batches = _batches(trace, 600)
        total = max(1, self.epochs * len(batches))
        rng = np.random.default_rng(self.seed)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min((i + 1) / 60, 0.5 * (1 + math.cos(math.pi * i / total)) + 1e-3)
        )
        net.train()
        done = 0
        for _ in range(self.epochs):
            for place in rng.permutation(len(batches)):
                psi, rows, mask = self._packed(trace, batches[place], rng)
                others = rng.permutation(np.arange(1, self.horizon))[:2].tolist()
                ahead = [
                    0,
                    *(h for h in others if h < psi.shape[1]),
                ]  # all of them at each step would cost twice as much
                loss = _loss(net(_before(psi), rows, ahead), psi, mask, ahead, shape)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                done += 1
                if self._progress:
                    self._progress(done, total, float(loss.detach()))
        net.eval()
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, without the embedding's rows that one step does not read."""
        if self._net is None:
            return 0
        return 4 * sum(p.numel() for name, p in self._net.named_parameters() if name != "token.weight")

    def _packed(
        self, trace: Trace, batch: list[int], rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Psi [b, s, L * E], embedding rows [b, s] and mask [b, s] of some sequences; tokens are hidden in part."""
        sequences = [trace.sequence(i) for i in batch]
        steps = max(s.num_steps for s in sequences)
        psi = torch.zeros(len(batch), steps, trace.num_layers * trace.num_experts)
        rows = torch.zeros(len(batch), steps, dtype=torch.int64)
        mask = torch.zeros(len(batch), steps, dtype=torch.bool)
        for i, sequence in enumerate(sequences):
            n = sequence.num_steps
            values = psi_numpy(sequence.expert_ids, sequence.expert_weights, sequence.num_experts)
            psi[i, :n] = torch.from_numpy(values.reshape(n, -1))
            mask[i, :n] = True
            if sequence.tokens is not None and rng.random() > 0.25:
                rows[i, :n] = torch.from_numpy(self._rows(sequence.tokens))
        return psi, rows, mask

    def _rows(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        if not len(self._ids):
            return np.full(len(tokens), _RARE, dtype=np.int64)
        at = np.minimum(np.searchsorted(self._ids, tokens), len(self._ids) - 1)
        return np.where(self._ids[at] == tokens, at + 2, _RARE).astype(np.int64)

    def _begin(self, batch: int) -> Any:
        layers, experts = self.popularity.shape
        return np.zeros((batch, 0, layers * experts), dtype=np.float32), np.zeros((batch, 0), dtype=np.int64)

    def _advance(self, state: Any, activations: Scores, tokens: Tokens) -> Any:
        psi, rows = state
        fed = np.full(len(psi), _UNKNOWN, dtype=np.int64) if tokens is None else self._rows(np.asarray(tokens))
        flat = activations.reshape(len(psi), 1, -1)
        return np.concatenate([psi, flat], axis=1), np.concatenate([rows, fed[:, None]], axis=1)

    def _scores(self, state: Any, horizon: int, tokens: Tokens) -> Scores:
        psi, rows = self._advance(state, np.zeros((len(state[0]), *self.popularity.shape), np.float32), tokens)
        return self._run(psi, rows, horizon)[:, -1]

    def forecast_trace(self, sequence: Trace, horizon: int, with_tokens: bool) -> Scores:
        """See Predictor."""
        self._check_trace(sequence)
        psi = psi_numpy(sequence.expert_ids, sequence.expert_weights, sequence.num_experts)
        known = with_tokens and sequence.tokens is not None
        rows = self._rows(sequence.tokens) if known else np.full(len(psi), _UNKNOWN)  # type: ignore[arg-type]
        return self._run(psi.reshape(1, len(psi), -1), rows[None].astype(np.int64), horizon)[0]

    def _run(self, psi: Scores, rows: NDArray[np.int64], horizon: int) -> Scores:
        self._check_horizon(horizon, self.horizon)
        assert self._net is not None
        with torch.inference_mode():
            logits = self._net(_before(torch.from_numpy(psi)), torch.from_numpy(rows), list(range(horizon)))
            return logits.softmax(-1).numpy()


def _before(psi: torch.Tensor) -> torch.Tensor:
    """Each step's input is the Psi of the step before it."""
    return F.pad(psi, (0, 0, 1, 0))[:, :-1]


def _loss(
    logits: torch.Tensor, psi: torch.Tensor, mask: torch.Tensor, ahead: list[int], shape: tuple[int, int]
) -> torch.Tensor:
    """Cross entropy against the Psi of step s + h, summed over the steps ahead, mean over all else."""
    total = logits.new_zeros(())
    steps = psi.shape[1]
    for place, h in enumerate(ahead):
        target = psi[:, h:].view(*psi[:, h:].shape[:2], *shape)
        logs = logits[:, : steps - h, place].log_softmax(-1)
        inside = mask[:, h:].float()
        total = total - ((target * logs).sum(-1).mean(-1) * inside).sum() / inside.sum().clamp_min(1)
    return total


def _batches(trace: Trace, steps: int) -> list[list[int]]:
    """Sequences of like length together, about `steps` steps a batch."""
    batches: list[list[int]] = [[]]
    for i in np.argsort(trace.seq_len, kind="stable").tolist():
        if batches[-1] and (len(batches[-1]) + 1) * int(trace.seq_len[i]) > steps:
            batches.append([])
        batches[-1].append(i)
    return batches
