"""Ranking measures of many readings of one list at once; equal to `evaluation.metrics.evaluate` on each of them.

A search over layers and tokens measures thousands of orders a list, too many for runs and qrels as dicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from blockrank.errors import UserError
from blockrank.evaluation.metrics import parse_measure


@dataclass(frozen=True)
class ListMeasure:
    """P@k, RR, RR@k, nDCG or nDCG@k, of any grade from 1 on (`Success` and others are not computed here)."""

    name: str
    kind: str
    cutoff: int | None

    @staticmethod
    def parse(name: str) -> ListMeasure:
        """Raises `UserError` for anything else."""
        measure = parse_measure(name)
        given = {key: value for key, value in measure.params.items() if key != "cutoff"}
        if measure.NAME not in ("P", "RR", "nDCG") or given:
            raise UserError(f"measure {name!r}: the analysis knows P@k, RR@k and nDCG@k, e.g. RR@10")
        return ListMeasure(str(measure), measure.NAME, measure.params.get("cutoff"))

    def of(
        self,
        scores: Float[np.ndarray, "*n N"],
        grades: Int[np.ndarray, " N"],
        readable: Bool[np.ndarray, " N"],
        ideal: tuple[int, ...],
    ) -> Float[np.ndarray, "*n"]:
        """The measure, float64, of each of several score arrays of one list.

        Ranked by `evaluation.ranking.RANKING_RULE`. `ideal`: the query's positive grades, best first, whether the list
        has their documents or not.
        """
        if not scores.shape[-1]:
            return np.zeros(scores.shape[:-1])
        order = np.argsort(np.where(readable, -scores, np.inf), axis=-1, kind="stable")[..., : self.cutoff]
        gains = np.maximum(grades[order], 0).astype(np.float64)
        ranks = np.arange(1, order.shape[-1] + 1)
        if self.kind == "P":
            return (gains > 0).sum(axis=-1) / float(self.cutoff or 1)
        if self.kind == "RR":
            return ((gains > 0) / ranks).max(axis=-1)
        best = np.asarray(ideal[: self.cutoff], np.float64)
        most = (best / np.log2(np.arange(2, len(best) + 2))).sum()
        return (gains / np.log2(ranks + 1)).sum(axis=-1) / most if most > 0 else np.zeros(scores.shape[:-1])
