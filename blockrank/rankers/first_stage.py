"""The first stage's own order as a ranker: the baseline every table starts from."""

from __future__ import annotations

import logging

import numpy as np

from blockrank.errors import UserError
from blockrank.types import CandidateList, ListScores

log = logging.getLogger(__name__)


class FirstStageRanker:
    """Scores a list of N candidates N, N-1, ..., 1 in its given order; reads no text.

    A list of two or more documents whose first-stage scores are all equal, or unknown (None), has its order by accident
    of the file. When that holds for every list of a call and no earlier call had others, reporting it as a baseline is
    an error unless `allow_constant_scores`; such a list among informative ones is logged.
    """

    scores_empty_documents = True
    score_scale = "N - rank + 1 of the first stage; says nothing but the order"

    def __init__(self, name: str = "first_stage", *, allow_constant_scores: bool = False) -> None:
        self.name = name
        self.allow_constant_scores = allow_constant_scores
        self._informative = False

    def score(self, lists: list[CandidateList]) -> list[ListScores]:
        """float32 [N] descending scores for each list."""
        several = [candidates for candidates in lists if len(candidates) > 1]
        constant = [c for c in several if c.scores is None or len(set(c.scores)) == 1]
        self._informative |= len(constant) < len(several)
        if constant:
            self._report_constant(constant)
        return [
            ListScores(np.arange(len(c), 0, -1, dtype=np.float32), np.zeros(len(c), dtype=bool), tokens=0)
            for c in lists
        ]

    def _report_constant(self, constant: list[CandidateList]) -> None:
        first = constant[0]
        what = "no first-stage scores" if first.scores is None else f"first-stage score {first.scores[0]:g} throughout"
        message = f"{len(constant)} lists (first: query {first.query.id!r}) have {what}"
        if not self._informative and not self.allow_constant_scores:
            raise UserError(
                f"{message}: that carries no information and their order is the file's, not a ranking; "
                "give a run with scores, or set allow_constant_scores=true to report the file order as the baseline"
            )
        log.warning("%s; the file's order is kept", message)
