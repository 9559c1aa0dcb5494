"""Eviction by forecast: the probabilistic Belady score, and Belady's own rule on what is forecast. Loads without torch.

Of every expert two scores are kept: one that counts this step's use of its layer, one that does not. The first holds until
the layer has routed in the step that runs, the second from then on, until the next forecast.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from seqmoe.runtime.schedule import Admission

Scores = NDArray[np.float64]
# scores [..., horizon, L, E], first row to use, how many at most, lambda -> worth [..., L, E], not negative
Rule = Callable[[NDArray[np.floating], int, int, float], Scores]


def expected_worth(scores: NDArray[np.floating], first: int, rows: int, discount: float) -> Scores:
    """Design section 4: sum_j lambda^j p_j / sum_j lambda^j over the next `rows` uses of the layer, as far as forecast."""
    total = np.zeros((*scores.shape[:-3], *scores.shape[-2:]))
    norm = 0.0
    for j in range(min(rows, scores.shape[-3] - first)):
        total += discount**j * scores[..., first + j, :, :].astype(np.float64)
        norm += discount**j
    return total / norm if norm else total


def first_use_worth(scores: NDArray[np.floating], first: int, rows: int, discount: float) -> Scores:
    """Expected lambda^(steps until the next use): what Belady looks at, as far as it is forecast."""
    total = np.zeros((*scores.shape[:-3], *scores.shape[-2:]))
    unused = np.ones_like(total)
    for j in range(min(rows, scores.shape[-3] - first)):
        p = scores[..., first + j, :, :].astype(np.float64)
        total += discount**j * unused * p
        unused *= 1.0 - p
    return total


def hard_worth(scores: NDArray[np.floating], first: int, rows: int, discount: float, *, k: int) -> Scores:
    """Belady's rule with the forecast's best k of each layer taken as certain (Belady-F8): the sooner, the more, from 2
    up; what is in none of them has its expected worth, below 1."""
    worth = 0.5 * expected_worth(scores, first, rows, discount)
    for j in reversed(range(min(rows, scores.shape[-3] - first))):
        best = np.argsort(-scores[..., first + j, :, :], axis=-1, kind="stable")[..., :k]
        np.put_along_axis(worth, best, 2.0 + rows - j, axis=-1)
    return worth


class ForecastEviction:
    """Evicts the candidate with the least worth by the latest forecast, of equals the lowest flat id.

    `update` for each forecast. With `by_position` a worth is discounted for the part of a step until the layer is reached
    too, since what will be used in half a step is as good as gone later than what is used at once.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        horizon: int = 8,
        discount: float = 0.5,
        rule: Rule = expected_worth,
        by_position: bool = True,
    ) -> None:
        """`horizon` c and `discount` lambda as in the paper; a forecast of c + 1 steps serves layers that have routed too."""
        self.num_layers, self.num_experts = num_layers, num_experts
        self.horizon, self.discount, self.rule = horizon, discount, rule
        shape = (num_layers, num_experts)
        self._soon, self._later = np.zeros(shape), np.zeros(shape)
        self._chance_soon, self._chance_later = np.zeros(shape), np.zeros(shape)
        self._now, self._chance = np.zeros(shape), np.zeros(shape)
        self._is_candidate = np.zeros(num_layers * num_experts, dtype=bool)
        self._count = 0
        self._step = 0  # that the forecast was made for
        self._position = -1  # last layer that has routed
        self._factor = position_factors(num_layers, discount if by_position else 1.0)
        self._worth: Scores | None = None

    def update(self, scores: NDArray[np.floating], step: int) -> None:
        """A forecast: inclusion probabilities [horizon, L, E], row h for step `step` + h."""
        self._soon = self.rule(scores, 0, self.horizon, self.discount)
        self._later = self.rule(scores, 1, self.horizon, self.discount)
        self._chance_soon = scores[0].astype(np.float64)
        self._chance_later = scores[min(1, len(scores) - 1)].astype(np.float64)
        self._step = step
        self._now, self._chance = self._soon.copy(), self._chance_soon.copy()
        reached = min(self.num_layers, max(0, self._position - step * self.num_layers + 1))
        self._now[:reached], self._chance[:reached] = self._later[:reached], self._chance_later[:reached]
        self._worth = None

    @property
    def worth(self) -> Scores:
        """[L * E] by expert, as of now."""
        if self._worth is None:
            layers = self.num_layers
            ahead = (np.arange(layers) - self._position - 1) % layers
            self._worth = (self._now * self._factor[ahead][:, None]).ravel()
        return self._worth

    def next_use(self, expert: int) -> int:
        """The next position at which the expert's layer routes."""
        after = self._position + 1
        return after + (expert // self.num_experts - after) % self.num_layers

    def admission(self) -> Admission | None:
        """What the next victim is worth; None where there is no candidate."""
        victim = self.peek()
        if victim < 0:
            return None
        worth = self.worth
        return Admission(worth, float(worth[victim]), self.next_use(victim), float(self._chance.ravel()[victim]))

    def peek(self) -> int:
        """Who would be the victim; -1 without candidates."""
        if not self._count:
            return -1
        return int(np.where(self._is_candidate, self.worth, np.inf).argmin())

    def touch(self, experts: Sequence[int], position: int) -> None:
        """See Eviction."""
        if position != self._position:
            self._position = position
            self._worth = None
            layer = position % self.num_layers
            if position >= self._step * self.num_layers + layer:
                self._now[layer], self._chance[layer] = self._later[layer], self._chance_later[layer]
        for expert in experts:
            if self._is_candidate[expert]:
                self._is_candidate[expert] = False
                self._count -= 1

    def release(self, experts: Sequence[int], position: int) -> None:
        """See Eviction."""
        self._is_candidate[list(experts)] = True
        self._count += len(experts)

    def victim(self) -> int:
        """See Eviction."""
        expert = self.peek()
        assert expert >= 0, "no candidate"
        self._is_candidate[expert] = False
        self._count -= 1
        return expert

    def __len__(self) -> int:
        return self._count


def position_factors(num_layers: int, discount: float) -> Scores:
    """lambda^(d / L) for layers that are d layers ahead."""
    return np.array([discount ** (d / num_layers) for d in range(num_layers)])
