"""Where training begins: the straight path through a network set to the ridge regression of a step on its features.

It takes seconds and saves the first epochs: input and output layer hold the regression's truncated singular vectors,
the Mamba2 blocks add what a linear look at the features cannot see.
"""

import numpy as np
import torch

from seqmoe.predictors.batches import Steps, assemble, pack
from seqmoe.predictors.seq2seq import GroupNet, Seq2SeqNet
from seqmoe.predictors.seq2seq_features import token_table

_ROWS = 8  # at a time
_ROW_STEPS = 512


def fill_tables(net: Seq2SeqNet, steps: Steps) -> None:
    """Sets the token tables of a net that uses tokens."""
    if steps.rows is None:
        return
    for group in net.nets():
        ids, config = steps.ids[:, group.first : group.last], net.config
        table, seen = token_table(steps.rows, ids, config.token_rows, config.num_experts)
        group.table, group.seen = table.to(group.recursed.device), seen.to(group.recursed.device)


@torch.no_grad()
def start_from_ridge(net: Seq2SeqNet, steps: Steps, penalty: float = 300.0, gain: float = 5.0) -> None:
    """Sets input and output layer of every group in place. `gain` turns regressed probabilities into logits."""
    for group in net.nets():
        weight, bias, sample = _ridge(group, steps, penalty)
        left, values, right = torch.linalg.svd(weight * gain, full_matrices=False)  # weight [features out, features in]
        rank = min(net.config.hidden, len(values))
        root = values[:rank].sqrt()
        device, kind = group.input.weight.device, group.input.weight.dtype
        group.input.weight[:rank] = (root[:, None] * right[:rank]).to(device, kind)
        group.input.weight[rank:] *= 0.3
        group.input.bias.zero_()
        hidden = group.input(sample.to(device, kind))
        length = hidden.square().mean(-1).sqrt().mean().clamp_min(1e-6)  # the norm before the output divides by it
        group.output.weight *= 0.1
        group.output.weight[:, :rank] = (left[:, :rank] * root).to(device, kind) * length
        for block in group.mixers():  # what is not yet learnt begins small
            block.mixer.out_proj.weight *= 0.1
        group.output.bias.copy_((bias * gain).to(device, kind))


def _ridge(group: GroupNet, steps: Steps, penalty: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Regression of the chosen set on the features: (float64 [out, in], [out], some features)."""
    layers = slice(group.first, group.last)
    inputs, outputs = group.input.in_features, group.output.out_features
    gram = torch.zeros(inputs + 1, inputs + 1)
    moment = torch.zeros(inputs + 1, outputs)
    rows = pack(steps.starts, steps.lengths, _ROW_STEPS, np.random.default_rng(0))
    sample = torch.zeros(1, inputs)
    for at in range(0, len(rows), _ROWS):
        batch = assemble(steps, rows[at : at + _ROWS], _ROW_STEPS)
        known = batch.valid & batch.psi.flatten(2).any(-1)
        if not bool(known.any()):
            continue
        device = group.recursed.device
        history = group.history(
            batch.psi[:, :, layers].to(device),
            None if batch.rows is None else batch.rows.to(device),
            batch.segments.to(device),
            batch.ids[:, :, layers].to(device),
        )
        features = history.features.cpu()[known].flatten(1)
        sample = features[:4096]
        chosen = torch.zeros(len(features), group.layers, group.config.num_experts)
        chosen.scatter_(-1, batch.ids[known][:, layers], 1.0)
        with_one = torch.cat([features, torch.ones(len(features), 1)], dim=1)
        gram.addmm_(with_one.T, with_one)
        moment.addmm_(with_one.T, chosen.flatten(1))
    ridge = torch.full((inputs + 1,), penalty, dtype=torch.float64)
    ridge[-1] = 1e-3
    solved = torch.cholesky_solve(moment.double(), torch.linalg.cholesky(gram.double() + torch.diag(ridge)))
    return solved[:-1].T, solved[-1], sample
