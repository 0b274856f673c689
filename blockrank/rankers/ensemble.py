"""Attention and decoding together: a weighted sum of both readouts' normalised scores."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeGuard, get_args

import numpy as np

from blockrank.errors import UserError, between
from blockrank.prompts.encode import PromptEncoder
from blockrank.rankers.attention import AttentionRanker, AttentionSettings
from blockrank.rankers.confidence import shares, with_text
from blockrank.rankers.generative import EMPTY_SCORE, GenerativeRanker
from blockrank.rankers.reading import one_of, whole
from blockrank.types import CandidateList, ListScores

Normalization = Literal["log_softmax", "min_max"]

LEAST_SHARE = 1e-46
"""A document's share where its attention mass is 0 in float32: below that of any mass above 0."""


@dataclass(frozen=True)
class EnsembleSettings:
    """`alpha` x decoded + (1 - `alpha`) x attention; None: an evaluation tunes it on its validation lists.

    `normalization` of each readout over the list's documents with text: `log_softmax` (attention: the logarithm of its
    share of the mass; decoded: the log-probabilities less their log-sum-exp) or `min_max` (both moved to [0, 1]).
    `beams` is the decoder's: a document that no beam reached counts as just below the worst beam
    (`generative.NOT_FOUND`), so attention alone orders these among themselves; null reaches all.
    `attention`: how prompts and attention are read, by both readouts; None is the checkpoint's, else the preset's.
    """

    alpha: float | None = None
    normalization: Normalization = "log_softmax"
    beams: int | None = 10
    attention: AttentionSettings | None = None
    kind: Literal["ensemble"] = "ensemble"

    def __post_init__(self) -> None:
        between(self, 0, 1, "alpha")
        one_of(self, "normalization", get_args(Normalization))
        if self.beams is not None:
            whole(self, "beams", 1)


class EnsembleRanker:
    """Scores candidate lists by both readouts of one set of weights (`sources.build_ranker`).

    With `alpha` 0 or 1 the order is that of attention or of decoding alone. Scores are on a logarithmic scale (with
    `min_max` on [0, 1]) and compare within their list only. `extra` is the decoder's, `parts` holds the scores of each.
    """

    def __init__(
        self,
        attention: AttentionRanker,
        generative: GenerativeRanker,
        settings: EnsembleSettings | None = None,
        name: str = "ensemble",
    ) -> None:
        self.name, self.attention, self.generative = name, attention, generative
        settings = settings or EnsembleSettings()
        self.settings = dataclasses.replace(settings, attention=attention.settings)

    @property
    def score_kind(self) -> Literal["log"] | None:
        return "log" if self.settings.normalization == "log_softmax" else None

    @property
    def model(self) -> Any:
        """The whole decoder that both readouts share."""
        return self.generative.model

    @property
    def encoder(self) -> PromptEncoder:
        return self.generative.encoder

    def with_alpha(self, alpha: float) -> EnsembleRanker:
        """The same ranker with another weight; models and programs are shared."""
        other = copy.copy(self)
        other.settings = dataclasses.replace(self.settings, alpha=alpha)
        return other

    def score(self, lists: Sequence[CandidateList]) -> list[ListScores]:
        """Scores of each list in its own order; documents without text score `generative.EMPTY_SCORE`."""
        settings = self.settings
        if settings.alpha is None:
            raise UserError("ranker=ensemble has no alpha: give one in [0, 1], or validation lists to tune it on")
        pairs = zip(lists, self.attention.score(lists), self.generative.score(lists), strict=True)
        return [self._result(*pair) for pair in pairs]

    def _result(self, candidates: CandidateList, attention: ListScores, decoded: ListScores) -> ListScores:
        assert self.settings.alpha is not None
        readable = with_text(candidates.documents)
        scores = np.full(len(candidates), EMPTY_SCORE, np.float32)
        try:
            scores[readable] = combine(
                attention.scores[readable], decoded.scores[readable], self.settings.alpha, self.settings.normalization
            )
        except UserError as error:
            raise UserError(f"query {candidates.query.id!r}, ranker {self.name!r}: {error}") from error
        return dataclasses.replace(
            decoded,
            scores=scores,
            tokens=attention.tokens + decoded.tokens,
            extra={**attention.extra, **decoded.extra},
            parts={"attention": attention.scores, "generative": decoded.scores},
        )


def is_untuned(ranker: Any) -> TypeGuard[EnsembleRanker]:
    """Whether it is an ensemble that waits for its `alpha`."""
    return isinstance(ranker, EnsembleRanker) and ranker.settings.alpha is None


def combine(attention: Any, decoded: Any, alpha: float, normalization: Normalization) -> np.ndarray:
    """float32 [N] from masses [N] and log-probabilities [N] of a list's documents with text.

    Different sums stay different, however near: the order is that of the float64 sums, and with `alpha` 0 or 1 that of
    the part. Raises `UserError` for scores that are not finite.
    """
    masses, logs = np.asarray(attention, np.float64), np.asarray(decoded, np.float64)
    if not len(masses):
        return np.zeros(0, np.float32)
    p, q = shares(masses, "mass"), shares(logs, "log")
    if normalization == "min_max":
        one, other = _min_max(masses), _min_max(logs)
    else:
        one = np.log(np.maximum(p, LEAST_SHARE))
        other = logs - logs.max() + np.log(q.max())
    sums = alpha * other + (1 - alpha) * one
    return _distinct(sums, masses if alpha == 0 else logs if alpha == 1 else sums)


def _min_max(values: np.ndarray) -> np.ndarray:
    """Moved to [0, 1]; 0 throughout where all are equal."""
    span = values.max() - values.min()
    return (values - values.min()) / span if span > 0 else np.zeros_like(values)


def _distinct(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """float32 values in the order of the float64 `order`: of two that differ there and would be one, the lower moves
    down."""
    result = values.astype(np.float32)
    places = np.argsort(-order, kind="stable")
    for before, at in pairwise(places):
        if order[at] == order[before]:
            result[at] = result[before]
        elif result[at] >= result[before]:
            result[at] = np.nextafter(result[before], np.float32(-np.inf))
    return result
