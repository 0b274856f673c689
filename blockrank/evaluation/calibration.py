"""Whether confidence means what it says: reliability, calibration error, risk against coverage, temperature scaling.

Q queries, one confidence in [0, 1] each, and whether the first document is relevant. docs/numerics.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from blockrank.errors import UserError

Binning = Literal["width", "mass"]

TEMPERATURES = (1e-6, 1e6)
"""The range that `fit_temperature` searches."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Queries whose confidence is in (`low`, `high`]: how many, their mean confidence, and the share that is right."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def reliability(confidence: Any, correct: Any, bins: int = 10, binning: Binning = "width") -> list[Bin]:
    """The bins that hold a query, by confidence.

    `width`: `bins` intervals of one width over [0, 1]; 0 is in the first. `mass`: as many queries in each as can be,
    where queries of one confidence are never parted. Raises `UserError` for values outside [0, 1].
    """
    values, right = _checked(confidence, correct)
    if bins < 1:
        raise UserError(f"bins={bins}: at least one")
    if binning == "width":
        edges = np.linspace(0, 1, bins + 1)
        place = np.searchsorted(edges[1:-1], values, side="left")
        spans = [(float(edges[b]), float(edges[b + 1]), place == b) for b in range(bins)]
    else:
        groups = np.split(np.argsort(values, kind="stable"), _equal_cuts(np.sort(values), bins))
        lows = [0.0] + [float(values[group].max()) for group in groups if len(group)]
        spans = [
            (low, float(values[group].max()), np.isin(np.arange(len(values)), group))
            for low, group in zip(lows, (group for group in groups if len(group)), strict=False)
        ]
    return [
        Bin(low, high, int(inside.sum()), float(values[inside].mean()), float(right[inside].mean()))
        for low, high, inside in spans
        if inside.any()
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """ECE: Σ_b n_b/Q |accuracy_b - confidence_b|, in [0, 1]."""
    total = sum(b.count for b in bins)
    if not total:
        raise UserError("no query has a confidence: there is nothing to calibrate")
    return sum(b.count / total * abs(b.accuracy - b.confidence) for b in bins)


def risk_coverage(confidence: Any, correct: Any) -> tuple[np.ndarray, np.ndarray]:
    """Coverage k/Q and risk for k = 1..Q, float64 [Q] each: the share that is wrong among the k surest queries.

    Of queries with one confidence, each order is as good as another: the risk is its mean over the orders.
    """
    values, right = _checked(confidence, correct)
    order = np.argsort(-values, kind="stable")
    wrong = 1.0 - right[order]
    _, group, size = np.unique(-values[order], return_inverse=True, return_counts=True)
    errors = np.bincount(group, wrong)[group] / size[group]
    count = np.arange(1, len(values) + 1)
    return count / len(values), np.cumsum(errors) / count


def area_under_risk_coverage(risk: Any) -> float:
    """AURC: the mean risk over k = 1..Q (lower is better; the error rate for a confidence that says nothing)."""
    return float(np.mean(risk))


@dataclass(frozen=True, slots=True)
class TemperatureFit:
    """`temperature` τ of softmax(S/τ) and the mean negative log-likelihood (nats) at it and at τ = 1.

    `lists`: those that decided; `left_out`: those without a positive, which no τ explains. `at_bound`: the likelihood
    rises to the end of `TEMPERATURES`: the scores order the lists perfectly, or the wrong way round.
    """

    temperature: float
    nll: float
    nll_at_one: float
    lists: int
    left_out: int
    at_bound: bool


def fit_temperature(lists: Sequence[tuple[Any, Any]]) -> TemperatureFit:
    """The τ that maximises the likelihood of the positives of lists of (scores [N], positive [N]).

    A list's loss is the mean of -log softmax(βS) over its positives, β = 1/τ: convex in β, and its derivative,
    E_softmax(βS)[S] less the mean of S over positives, rises with β; its root is found by bisection in log β. Raises
    `UserError` where no list has a positive, and for scores that are not finite.
    """
    usable = [(np.asarray(s, np.float64), np.asarray(p, bool)) for s, p in lists]
    usable = [(s, p) for s, p in usable if p.any()]
    if not usable:
        raise UserError(f"no temperature can be fitted: none of {len(lists)} validation lists has a positive document")
    if not all(np.isfinite(s).all() for s, _ in usable):
        raise UserError("no temperature can be fitted: some validation scores are not finite")
    objective = _Likelihood(usable)
    low, high = np.log(1 / TEMPERATURES[1]), np.log(1 / TEMPERATURES[0])
    outside = low if objective.slope(np.exp(low)) >= 0 else high if objective.slope(np.exp(high)) <= 0 else None
    if outside is not None:
        low = high = outside
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (low, middle) if objective.slope(np.exp(middle)) > 0 else (middle, high)
    beta = float(np.exp((low + high) / 2))
    losses = objective.loss(beta), objective.loss(1.0)
    return TemperatureFit(1 / beta, *losses, len(usable), len(lists) - len(usable), outside is not None)


class _Likelihood:
    """The mean over lists of the mean of -log softmax(βS) over positives, in nats, as a function of β."""

    def __init__(self, lists: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._scores = np.concatenate([s - s.max() for s, _ in lists])
        self._starts = np.cumsum([0, *(len(s) for s, _ in lists[:-1])])
        self._positive = np.asarray([(s[p] - s.max()).mean() for s, p in lists])

    def loss(self, beta: float) -> float:
        total = np.add.reduceat(np.exp(beta * self._scores), self._starts)
        return float(np.mean(np.log(total) - beta * self._positive))

    def slope(self, beta: float) -> float:
        """The derivative in β."""
        weights = np.exp(beta * self._scores)
        total, moment = (np.add.reduceat(x, self._starts) for x in (weights, weights * self._scores))
        return float(np.mean(moment / total - self._positive))


def softmax(scores: Any, temperature: float) -> np.ndarray:
    """softmax(S/τ), float64 [N]."""
    values = np.asarray(scores, np.float64)
    weights = np.exp((values - values.max()) / temperature)
    return weights / weights.sum()


def _equal_cuts(ordered: np.ndarray, bins: int) -> list[int]:
    """Where sorted values are cut into `bins` groups of equal size; a cut among equal values is moved before them."""
    cuts = np.searchsorted(ordered, ordered[[min(k * len(ordered) // bins, len(ordered) - 1) for k in range(1, bins)]])
    return sorted({int(cut) for cut in cuts} - {0})


def _checked(confidence: Any, correct: Any) -> tuple[np.ndarray, np.ndarray]:
    values, right = np.asarray(confidence, np.float64), np.asarray(correct, np.float64)
    if values.shape != right.shape or values.ndim != 1:
        raise ValueError(f"confidence of shape {values.shape} for answers of shape {right.shape}")
    if not len(values):
        raise UserError("no query has a confidence: there is nothing to calibrate")
    if not (values >= 0).all() or not (values <= 1 + 1e-9).all():
        raise UserError(f"confidence must lie in [0, 1], not {values[~((values >= 0) & (values <= 1 + 1e-9))][0]}")
    return np.minimum(values, 1.0), right
