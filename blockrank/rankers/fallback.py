"""Attention scores, and decoding where they are unsure: most lists cost one short pass, the others both readouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from blockrank.errors import FieldError, UserError
from blockrank.prompts.encode import PromptEncoder
from blockrank.rankers.attention import AttentionRanker, AttentionSettings
from blockrank.rankers.confidence import Confidence, Measure, confidence_of, with_text
from blockrank.rankers.generative import GenerativeRanker
from blockrank.rankers.reading import one_of, whole
from blockrank.types import CandidateList, ListScores


@dataclass(frozen=True)
class FallbackSettings:
    """A list is decoded where its confidence is below `threshold`.

    `measure` is one of `Confidence.value`: a number in [0, 1], higher when surer (`entropy` is 1 - normalised entropy).
    `threshold` is in [0, 1] too; `never` decodes no list and `always` every list. `beams` is the decoder's.
    `attention`: how prompts and attention are read, by both readouts; None is the checkpoint's, else the preset's.
    """

    threshold: float | Literal["never", "always"] = 0.1
    measure: Measure = "margin"
    beams: int | None = 10
    attention: AttentionSettings | None = None
    kind: Literal["fallback"] = "fallback"

    def __post_init__(self) -> None:
        one_of(self, "measure", get_args(Measure))
        known = self.threshold in ("never", "always") if isinstance(self.threshold, str) else 0 <= self.threshold <= 1
        if not known:
            raise FieldError("threshold", f"{self.threshold!r} must be between 0 and 1, or be never or always")
        if self.beams is not None:
            whole(self, "beams", 1)

    def falls_back(self, confidence: Confidence) -> bool:
        """Whether a list of this confidence is decoded."""
        if isinstance(self.threshold, str):
            return self.threshold == "always"
        return confidence.value(self.measure) < self.threshold


class FallbackRanker:
    """The attention ranker's scores, or the generative ranker's for lists whose confidence is below the threshold.

    Both read one set of weights (`sources.build_ranker`). Scores compare within their list only, as always: a decoded
    list has log-probabilities. `extra` holds `fallback` (1 where the list was decoded) and the confidence; `parts` the
    scores of each readout that ran. `tokens` counts what both read. A list without text in any document is not decoded.
    """

    def __init__(
        self,
        attention: AttentionRanker,
        generative: GenerativeRanker,
        settings: FallbackSettings | None = None,
        name: str = "fallback",
    ) -> None:
        self.name, self.attention, self.generative = name, attention, generative
        settings = settings or FallbackSettings()
        self.settings = dataclasses.replace(settings, attention=attention.settings)

    @property
    def model(self) -> Any:
        """The whole decoder that both readouts share."""
        return self.generative.model

    @property
    def encoder(self) -> PromptEncoder:
        return self.generative.encoder

    def score(self, lists: Sequence[CandidateList]) -> list[ListScores]:
        """Scores of each list in its own order. Raises `UserError` naming the query for scores that are not finite."""
        results = self.attention.score(lists)
        confidences = [self._confidence(c, result) for c, result in zip(lists, results, strict=True)]
        unsure = [i for i, found in enumerate(confidences) if found is not None and self.settings.falls_back(found)]
        decoded = dict(zip(unsure, self.generative.score([lists[i] for i in unsure]) if unsure else (), strict=True))
        return [
            _result(result, found, decoded.get(i))
            for i, (result, found) in enumerate(zip(results, confidences, strict=True))
        ]

    def _confidence(self, candidates: CandidateList, result: ListScores) -> Confidence | None:
        try:
            return confidence_of(result.scores[with_text(candidates.documents)])
        except UserError as error:
            raise UserError(f"query {candidates.query.id!r}, ranker {self.attention.name!r}: {error}") from error


def _result(attention: ListScores, confidence: Confidence | None, decoded: ListScores | None) -> ListScores:
    extra = {} if confidence is None else {f"confidence_{k}": v for k, v in dataclasses.asdict(confidence).items()}
    extra = {
        **attention.extra,
        **({} if decoded is None else decoded.extra),
        **extra,
        "fallback": float(decoded is not None),
    }
    parts = {"attention": attention.scores} | ({} if decoded is None else {"generative": decoded.scores})
    chosen = attention if decoded is None else decoded
    tokens = attention.tokens + (0 if decoded is None else decoded.tokens)
    return dataclasses.replace(chosen, tokens=tokens, extra=extra, parts=parts)
