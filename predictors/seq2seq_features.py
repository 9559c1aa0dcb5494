"""What the sequence predictor's input layer reads: the last step, and fixed summaries of the steps before it.

Routing repeats itself within a sequence. A recurrent state of some thousand numbers cannot hold which of hundreds of
steps looked like the last one, so this is looked up: each past step is compared with the last one, and what followed
the similar ones is a forecast (matching, as in the paper's related work, but as an input of the trained predictor).
Features of a group, each [n * E], all of roots of Psi (each layer then has length 1):

  last        the step before
  decays      running means over the sequence, one for each decay
  matches     for each sharpness beta: mean of what followed step j - 1, weighted by exp(beta (cos(j - 1, last) - 1))
  with tokens the same match, where steps that were fed the token about to be fed count more; and the table of what
              training saw chosen for that token

Nothing here is learned or has a gradient.
"""

from typing import NamedTuple

import torch

SLACK = 1e-3  # added to the sum of a match's weights: without a similar step the feature fades
TABLE_PRIOR = 3.0  # steps of the popularity that a token's table row begins with


class FeatureSpec(NamedTuple):
    """Which features there are."""

    decays: tuple[float, ...] = (0.7, 0.95)
    betas: tuple[float, ...] = (8.0, 20.0)
    token_beta: float = 8.0
    token_weight: float = 100.0  # how much more a step with the same token counts
    window: int = 512  # steps that a match looks back

    def count(self, tokens: bool) -> int:
        """Features of a group, each of n * E numbers."""
        return 1 + len(self.decays) + len(self.betas) + 2 * tokens

    def matches(self, tokens: bool) -> int:
        """Those that are matches."""
        return len(self.betas) + tokens

    @property
    def first_match(self) -> int:
        """Index of the first match; the table comes last."""
        return 1 + len(self.decays)


class History(NamedTuple):
    """Features of whole rows of sequences, and what recursion needs to go on from any of their steps."""

    features: torch.Tensor  # [b, s, D, F]
    roots: torch.Tensor  # [b, s, F], of the step before
    weights: torch.Tensor  # [matches, b, s, s], not normalised: of step j (column) for step i (row)


def row_features(
    spec: FeatureSpec,
    psi: torch.Tensor,
    rows: torch.Tensor | None,
    segments: torch.Tensor | None,
    table: torch.Tensor | None,
    uses_tokens: bool,
) -> History:
    """psi [b, s, n, E] of the step before each, token rows [b, s], segments [b, s] -> features of each step.

    `table` [rows, F] is the token table; without `rows` its row 0 stands for a token that is not known.
    """
    roots = psi.flatten(2).sqrt()
    b, s, size = roots.shape
    at = torch.arange(s, device=psi.device)
    lag = at[:, None] - at[None, :]  # i - j
    same = torch.ones(1, s, s, dtype=torch.bool, device=psi.device)
    if segments is not None:
        same = segments.unsqueeze(-1) == segments.unsqueeze(-2)
    features = [roots]
    for decay in spec.decays:
        kernel = torch.where(lag >= 0, (1 - decay) * decay ** lag.clamp_min(0).float(), 0.0)
        features.append((kernel * same) @ roots)
    cosine = roots @ roots.transpose(1, 2) / psi.shape[2]
    past = same & (lag >= 1) & (lag <= spec.window)
    weights = [torch.exp(beta * (cosine - 1)) * past for beta in spec.betas]
    if uses_tokens:
        weight = torch.exp(spec.token_beta * (cosine - 1)) * past
        if rows is not None:
            known = (rows.unsqueeze(-1) == rows.unsqueeze(-2)) & (rows > 0).unsqueeze(-1)
            weight = weight * (1 + spec.token_weight * known)
        weights.append(weight)
    stacked = torch.stack(weights)
    followed = torch.cat([roots[:, 1:], torch.zeros_like(roots[:, :1])], dim=1)  # what step j itself chose
    for weight in weights:
        features.append(weight @ followed / (weight.sum(-1, keepdim=True) + SLACK))
    if uses_tokens:
        assert table is not None
        features.append(table[rows] if rows is not None else table[0].expand(b, s, size))
    return History(torch.stack(features, dim=2), roots, stacked)


def later_matches(spec: FeatureSpec, history: History, at: torch.Tensor, ahead: int) -> torch.Tensor:
    """The matches of the steps `at` [a], followed `ahead` steps further: [b, a, matches, F], from what `at` had seen."""
    s = history.roots.shape[1]
    out = []
    for weight in history.weights:
        # column j is followed by what step j + ahead chose, which is the root at j + ahead + 1, and that is at most `at`
        w = weight[:, at, : s - ahead - 1]
        j = torch.arange(w.shape[-1], device=w.device)
        w = w * (j + ahead + 1 <= at[:, None])
        out.append(w @ history.roots[:, ahead + 1 :] / (w.sum(-1, keepdim=True) + SLACK))
    return torch.stack(out, dim=2)


class StepMemory(NamedTuple):
    """The part of a network's state that features need; see seq2seq.NetState."""

    memory: torch.Tensor  # [b, C, F], C = window + 1
    tokens: torch.Tensor  # [b, C]
    filled: torch.Tensor  # [b]
    fed: torch.Tensor  # [b]
    means: torch.Tensor  # [b, decays, F]


def step_features(
    spec: FeatureSpec,
    root: torch.Tensor,
    rows: torch.Tensor,
    before: StepMemory,
    table: torch.Tensor | None,
    layers: int,
    uses_tokens: bool,
) -> tuple[torch.Tensor, tuple[StepMemory, torch.Tensor]]:
    """`row_features` for one step: root [b, F] of the step before -> ([b, D, F], (memory after, weights [b, matches, C]))."""
    slots = before.memory.shape[1]
    slot = torch.arange(slots, device=root.device)
    # the step before goes into the memory, unless there was none
    there = (slot == before.filled.clamp_min(0).unsqueeze(1) % slots) & (before.filled >= 0).unsqueeze(1)
    memory = torch.where(there.unsqueeze(-1), root.unsqueeze(1), before.memory)
    tokens = torch.where(there, before.fed.unsqueeze(1), before.tokens)
    count = before.filled + 1
    last = count.unsqueeze(1) - 1
    position = last - (last - slot) % slots  # of the step in each slot
    inside = (position >= 0) & (position >= count.unsqueeze(1) - spec.window)
    # a step is compared by the one before it; the first has none
    cosine = (memory @ root.unsqueeze(-1)).squeeze(-1).roll(1, 1) / layers * (position > 0)
    weights = [torch.exp(beta * (cosine - 1)) * inside for beta in spec.betas]
    if uses_tokens:
        known = (tokens == rows.unsqueeze(1)) & (rows > 0).unsqueeze(1)
        weights.append(torch.exp(spec.token_beta * (cosine - 1)) * inside * (1 + spec.token_weight * known))
    stacked = torch.stack(weights, dim=1)
    matches = stacked @ memory / (stacked.sum(-1, keepdim=True) + SLACK)
    decays = torch.tensor(spec.decays, device=root.device).unsqueeze(-1)
    means = decays * before.means + (1 - decays) * root.unsqueeze(1)
    parts = [root.unsqueeze(1), means, matches]
    if table is not None:
        parts.append(table[rows].unsqueeze(1))
    return torch.cat(parts, dim=1), (StepMemory(memory, tokens, count, rows, means), stacked)


def recursed_features(
    spec: FeatureSpec,
    root: torch.Tensor,
    ahead: torch.Tensor,
    memory: StepMemory,
    weights: torch.Tensor,
    table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in recursion, `ahead` [b] steps after the last one with news -> ([b, D, F], means after)."""
    slots = memory.memory.shape[1]
    slot = torch.arange(slots, device=root.device)
    last = memory.filled.unsqueeze(1) - 1
    position = last - (last - slot) % slots
    # what a step's slot is followed by `ahead` steps later, as far as that has been seen
    weights = weights * (position + ahead.unsqueeze(1) <= last).unsqueeze(1)
    at = (slot + ahead.unsqueeze(1)) % slots
    later = memory.memory.gather(1, at.unsqueeze(-1).expand(-1, -1, memory.memory.shape[-1]))
    matches = weights @ later / (weights.sum(-1, keepdim=True) + SLACK)
    decays = torch.tensor(spec.decays, device=root.device).unsqueeze(-1)
    means = decays * memory.means + (1 - decays) * root.unsqueeze(1)
    parts = [root.unsqueeze(1), means, matches]
    if table is not None:
        parts.append(table[:1].expand_as(root).unsqueeze(1))
    return torch.cat(parts, dim=1), means


def leave_one_out(table: torch.Tensor, seen: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Table rows without the step itself, which training must not be shown: rows [...], chosen [..., F] of 0 and 1."""
    count = seen[rows].unsqueeze(-1)
    without = (table[rows] * (count + TABLE_PRIOR) - chosen) / (count + TABLE_PRIOR - 1)
    return torch.where(count > 0, without.clamp_min(0), table[rows])


def token_table(
    rows: torch.Tensor, ids: torch.Tensor, num_rows: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of steps in which experts were chosen, by token row: rows [S], ids [S, n, k] -> ([rows, n * E], steps [rows]).

    Rows 0 (not known) and of tokens that were never seen hold the popularity.
    """
    layers = ids.shape[1]
    flat = ids.long() + torch.arange(layers).unsqueeze(-1) * num_experts  # [S, n, k]
    size = layers * num_experts
    counts = torch.zeros(num_rows * size)
    where = rows[:, None, None] * size + flat
    counts.index_add_(0, where.flatten(), torch.ones(where.numel()))
    counts = counts.view(num_rows, size)
    seen = torch.bincount(rows, minlength=num_rows).float()
    popularity = counts.sum(0) / seen.sum().clamp_min(1)
    return (counts + TABLE_PRIOR * popularity) / (seen + TABLE_PRIOR).unsqueeze(-1), seen
