"""How sure the scores of a list are of its best document: one definition for results, fallbacks and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from blockrank.errors import UserError
from blockrank.types import Document

ScoreKind = Literal["mass", "log"]
"""What a ranker's scores are, told by its attribute `score_kind`: masses that are not negative, or logarithms."""

Measure = Literal["margin", "entropy", "max"]


@dataclass(frozen=True, slots=True)
class Confidence:
    """Of the shares p of a list of N documents with text.

    `margin`: the largest share less the second (with N = 1, less 0), in [0, 1]. `entropy`: -Σ p log2 p in bits, and
    `normalized_entropy` the same over log2 N, in [0, 1] (0 with N = 1). `max`: the largest share, in [1/N, 1].
    """

    margin: float
    entropy: float
    normalized_entropy: float
    max: float

    def value(self, measure: Measure) -> float:
        """The measure as a number in [0, 1] that is higher the surer the list is: `entropy` is 1 - normalised."""
        return 1.0 - self.normalized_entropy if measure == "entropy" else float(getattr(self, measure))


def shares(scores: Any, kind: ScoreKind = "mass") -> np.ndarray:
    """The list's distribution over documents, float64 [N] that sums to 1.

    Masses over their sum, whatever that is (so `sum` and `mean` over signal tokens give the same); logarithms by
    softmax. Without any mass nothing is preferred: every document has 1/N. Raises `UserError` for scores that are not
    finite, and for negative masses.
    """
    values = np.asarray(scores, np.float64)
    if values.ndim != 1:
        raise ValueError(f"scores of shape {values.shape}: one list has one axis")
    if not np.isfinite(values).all():
        raise UserError(f"a list has no confidence: {int((~np.isfinite(values)).sum())} of its scores are not finite")
    if not len(values):
        return values
    if kind == "log":
        values = np.exp(values - values.max())
    elif values.min() < 0:
        raise UserError(f"a list has no shares: the mass {values.min():g} is negative")
    total = values.sum()
    return values / total if total > 0 else np.full(len(values), 1 / len(values))


def confidence_of(scores: Any, kind: ScoreKind = "mass") -> Confidence | None:
    """The confidence of a list whose documents (those with text) have these scores, [N]; None for no document."""
    p = shares(scores, kind)
    if not len(p):
        return None
    second, first = np.sort(np.append(p, 0.0))[-2:]
    positive = p[p > 0]
    entropy = max(0.0, -float(np.sum(positive * np.log2(positive))))
    normalized = min(1.0, entropy / np.log2(len(p))) if len(p) > 1 else 0.0
    return Confidence(float(first - second), entropy, float(normalized), float(first))


def with_text(documents: Sequence[Document]) -> np.ndarray:
    """bool [N]: the documents that a distribution is over. Those without text have no number and no mass."""
    return np.asarray([not document.is_empty for document in documents], bool)
