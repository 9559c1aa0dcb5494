"""What training minimises and validation measures: one step ahead over whole sequences, and recursion from chunk ends."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from seqmoe.predictors.batches import Batch, Steps, assemble, pack
from seqmoe.predictors.losses import kl_loss, ranking_loss, ranks
from seqmoe.predictors.mamba2 import Boundaries, Mamba2State
from seqmoe.predictors.seq2seq import NO_TOKEN, GroupNet, Seq2SeqNet
from seqmoe.predictors.seq2seq_features import History, later_matches


@dataclass(frozen=True)
class Objective:
    """Weights of the loss's parts."""

    set_share: float = 0.5  # of the plain set in the truth, see losses.kl_loss
    ranking: float = 0.1  # weight of the ranking loss
    margin: float = 1.0
    negatives: int = 4  # hardest others of each row
    hide_tokens: float = 0.15  # share of steps whose token is hidden in training
    horizon: int = 8  # steps ahead that recursion is trained for
    recursion: float = 0.5  # weight of the loss two and more steps ahead


def batch_loss(net: Seq2SeqNet, batch: Batch, objective: Objective, own_share: float) -> tuple[torch.Tensor, float]:
    """(loss with gradient, KL one step ahead), means over valid steps and the layers of all groups.

    `own_share` is the share of inputs that recursion takes from the net itself; 0 trains one step ahead only.
    """
    rows = batch.rows
    if rows is not None and objective.hide_tokens:
        hidden = torch.rand(rows.shape, device=rows.device) < objective.hide_tokens
        rows = rows.masked_fill(hidden, NO_TOKEN)
    loss = torch.zeros((), device=batch.psi.device)
    kl = 0.0
    for group in net.nets():
        layers = slice(group.first, group.last)
        psi = batch.psi[:, :, layers]
        weight = group.layers / net.config.num_layers
        ids, shares = batch.ids[:, :, layers], batch.shares[:, :, layers]
        history = group.history(psi, rows, batch.segments, ids)
        if own_share:
            logits, boundaries = group.forward_with_boundaries(history, rows, batch.segments)
        else:
            logits, boundaries = group(history, rows, batch.segments), ()
        part, part_kl = _rows_loss(logits, ids, shares, batch.valid, objective)
        loss, kl = loss + weight * part, kl + weight * float(part_kl.detach())
        if own_share:
            ahead = unroll(group, history, logits, boundaries, batch, rows, objective.horizon, own_share)
            parts = [_rows_loss(a.logits, a.ids, a.shares, a.valid, objective)[0] for a in ahead]
            if parts:
                loss = loss + weight * objective.recursion * torch.stack(parts).mean()
    return loss, kl


def _rows_loss(
    logits: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, valid: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """Means over the valid rows: (whole loss, KL)."""
    count = valid.sum().clamp_min(1) * ids.shape[-2]
    kl = (kl_loss(logits.log_softmax(-1), ids, shares, objective.set_share).sum(-1) * valid).sum() / count
    if not objective.ranking:
        return kl, kl
    margins = ranking_loss(logits, ids, objective.negatives, objective.margin)
    return kl + objective.ranking * (margins.sum(-1) * valid).sum() / count, kl


@dataclass(frozen=True)
class Ahead:
    """Forecasts of one horizon from all anchors (a), with what came true."""

    logits: torch.Tensor  # [a, n, E]
    ids: torch.Tensor  # [a, n, k]
    shares: torch.Tensor  # [a, n, k]
    valid: torch.Tensor  # bool [a]


def unroll(
    group: GroupNet,
    history: History,
    logits: torch.Tensor,
    boundaries: Sequence[Boundaries],
    batch: Batch,
    rows: torch.Tensor | None,
    horizon: int,
    own_share: float,
) -> list[Ahead]:
    """Recursion from each chunk's end: forecasts for 2 to `horizon` steps ahead.

    The anchor is the last step of a chunk: its forecast (one step ahead) is in `logits`. Each further step is fed the
    forecast before it, or with probability 1 - own_share what really came (scheduled sampling).
    """
    chunk, steps = group.config.chunk, batch.ids.shape[1]
    if steps <= chunk:
        return []
    starts = torch.arange(chunk, steps, chunk, device=logits.device)  # the step after each anchor
    layers = slice(group.first, group.last)
    state = tuple(
        Mamba2State(b.conv[:, 1 : len(starts) + 1].flatten(0, 1), b.ssm[:, 1 : len(starts) + 1].flatten(0, 1))
        for b in boundaries
    )
    fed = logits[:, starts - 1].flatten(0, 1)  # [a, n, E]
    spec = group.spec
    anchor_segments = batch.segments[:, starts - 1]
    # the running means as the anchor saw them
    means = history.features[:, starts - 1, 1 : spec.first_match].flatten(0, 1)  # [a, decays, F]
    decays = torch.tensor(spec.decays, device=logits.device).unsqueeze(-1)
    out = []
    for ahead in range(1, horizon):
        at = starts + ahead - 1
        exists = at < steps
        at = at.clamp_max(steps - 1)
        same = (batch.segments[:, at] == anchor_segments) & exists
        valid = (batch.valid[:, at] & same).flatten()
        root = group.feed_back(fed.detach()).flatten(1).sqrt().unsqueeze(1)
        means = decays * means + (1 - decays) * root
        matches = later_matches(spec, history, starts - 1, ahead).flatten(0, 1)
        parts = [root, means, matches]
        if group.table is not None:
            parts.append(group.table[NO_TOKEN].expand_as(root))
        features = torch.cat(parts, dim=1)
        own: torch.Tensor | bool = True
        step_rows = None
        if own_share < 1:
            own = (torch.rand(valid.shape, device=valid.device) < own_share) | ~valid
            truth = history.features[:, at].flatten(0, 1)
            features = torch.where(own[:, None, None], features, truth)
            means = features[:, 1 : spec.first_match]
            if rows is not None:
                step_rows = rows[:, at].flatten().masked_fill(own, NO_TOKEN)
        fed, state = group.advance(features, step_rows, state, own)
        ids, shares = batch.ids[:, at, layers].flatten(0, 1), batch.shares[:, at, layers].flatten(0, 1)
        out.append(Ahead(fed, ids, shares, valid))
    return out


@dataclass(frozen=True)
class Recall:
    """Recall on whole sequences; a sequence's first step, forecast from nothing, is left out."""

    at: dict[int, float]  # m -> recall one step ahead, mean over steps, layers and the chosen k
    ahead: list[float]  # at k + 3, for 1, 2, .. steps ahead, from the chunks' ends only
    kl: float


@torch.inference_mode()
def measure(net: Seq2SeqNet, steps: Steps, horizon: int = 8, most_steps: int = 8192, tokens: bool = True) -> Recall:
    """Recall of the net on a trace's steps, at k to k + 8. `tokens` False hides them, as before they are known."""
    was_training = net.training
    device = next(net.parameters()).device
    net.eval()
    k, num_experts = net.config.top_k, net.config.num_experts
    most = [m for m in range(k, k + 9) if m <= num_experts]
    hits = torch.zeros(len(most), dtype=torch.float64)
    count, kl_sum, kl_count = 0, 0.0, 0
    ahead_hits, ahead_count = torch.zeros(horizon, dtype=torch.float64), torch.zeros(horizon, dtype=torch.float64)
    target = min(k + 3, num_experts)
    # rows long enough for every sequence, so that none is cut, and for several, so that chunks end within short ones too
    row_steps = max(512, int(steps.lengths.max()))
    packed = pack(steps.starts, steps.lengths, row_steps, np.random.default_rng(0))
    at_once = max(1, most_steps // row_steps)
    for begin in range(0, len(packed), at_once):
        batch = assemble(steps, packed[begin : begin + at_once], row_steps).to(device)
        later = batch.valid & batch.psi.flatten(2).any(-1)
        rows = batch.rows if tokens else None
        for group in net.nets():
            layers = slice(group.first, group.last)
            ids = batch.ids[:, :, layers]
            history = group.history(batch.psi[:, :, layers], rows, batch.segments)
            logits, boundaries = group.forward_with_boundaries(history, rows, batch.segments)
            place = ranks(logits[later], ids[later])
            hits += torch.tensor([float((place < m).sum()) for m in most], dtype=torch.float64)
            count += place.numel()
            values = kl_loss(logits[later].log_softmax(-1), ids[later], batch.shares[:, :, layers][later])
            kl_sum, kl_count = kl_sum + float(values.sum()), kl_count + values.numel()
            for number, future in enumerate(
                unroll(group, history, logits, boundaries, batch, rows, horizon, 1.0), start=1
            ):
                place = ranks(future.logits[future.valid], future.ids[future.valid])
                ahead_hits[number] += (place < target).sum()
                ahead_count[number] += place.numel()
    net.train(was_training)
    at = {m: float(h) / max(count, 1) for m, h in zip(most, hits.tolist(), strict=True)}
    further = zip(ahead_hits[1:].tolist(), ahead_count[1:].tolist(), strict=True)
    ahead = [at[target], *(hit / number for hit, number in further if number)]
    return Recall(at, ahead, kl_sum / max(kl_count, 1))
