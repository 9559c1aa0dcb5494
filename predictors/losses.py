"""Losses of the sequence predictor: KL to what the router chose, and a margin between chosen and the hardest others."""

import torch


def kl_loss(log_probs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, set_share: float = 0.5) -> torch.Tensor:
    """KL(truth || forecast) of each row: log_probs [..., E], ids int64 [..., k], shares [..., k] -> [...].

    The truth is Psi (the normalised router weights) mixed with the plain set: (1 - set_share) Psi + set_share / k.
    Psi alone ranks experts by expected weight; which are among the chosen is what counts for fetching them.
    """
    target = shares * (1 - set_share) + set_share / ids.shape[-1]
    entropy = torch.special.entr(target).sum(-1)
    return -(target * log_probs.gather(-1, ids)).sum(-1) - entropy


def ranking_loss(logits: torch.Tensor, ids: torch.Tensor, negatives: int, margin: float = 1.0) -> torch.Tensor:
    """Mean hinge over pairs of a chosen expert and one of the hardest `negatives` others (the paper's section 5.4).

    logits [..., E], ids int64 [..., k] -> [...]; each chosen expert should be `margin` above each.
    """
    chosen = logits.gather(-1, ids)
    others = logits.scatter(-1, ids, -torch.inf)
    hardest = others.topk(min(negatives, logits.shape[-1] - ids.shape[-1]), dim=-1).values
    return (margin - chosen.unsqueeze(-1) + hardest.unsqueeze(-2)).clamp_min(0).mean((-1, -2))


def ranks(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """How many experts score above each chosen one: scores [..., E], ids [..., k] -> int64 [..., k]; ties count half."""
    own = scores.gather(-1, ids).unsqueeze(-1)
    others = scores.unsqueeze(-2)
    return ((others > own).sum(-1) * 2 + (others == own).sum(-1) - 1) // 2
