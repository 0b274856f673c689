"""Which layer, and which tokens of the suffix, rank best on validation lists, and how sure that is.

The search tries many readouts on few queries, so the best mean is an optimistic one. Three things say how much it is
worth: how often the same layer and token win when queries are resampled, a cross-validated mean (chosen on some
queries, measured on others), and a paired test of the cross-validated values against the present readout.

n queries, L layers, S signal tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from blockrank.analysis.measures import ListMeasure
from blockrank.analysis.readings import ListReading
from blockrank.errors import UserError
from blockrank.evaluation.significance import bootstrap_interval, paired_randomization_test

FOLDS = 5
_CHUNK = 4_000_000


@dataclass(frozen=True)
class Readout:
    """A layer and the signal tokens, as indices into those read."""

    layer: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """A mean over queries with its 95 % bootstrap interval."""

    mean: float
    interval: tuple[float, float]

    @staticmethod
    def of(values: np.ndarray, seed: int) -> Estimate:
        return Estimate(float(values.mean()), bootstrap_interval(values, seed=seed))


@dataclass(frozen=True)
class Finding:
    """The best readout, what else is as good, and what choosing it is worth.

    `resampled_wins`: layer and token -> the share of bootstrap samples of the queries in which that single token is the
    best of all. `cross_validated`, its `difference` from the present readout and the `p_value` of that are None for a
    single query.
    """

    best: Readout
    value: Estimate
    resampled_wins: dict[tuple[int, int], float]
    present: Readout
    present_value: Estimate
    cross_validated: Estimate | None
    difference: Estimate | None
    p_value: float | None

    @property
    def is_better(self) -> bool:
        """Whether choosing beats the present readout beyond chance (p <= 0.05)."""
        return (
            self.difference is not None
            and self.difference.mean > 0
            and self.p_value is not None
            and self.p_value <= 0.05
        )


class Search:
    """Values of every single token at every layer, and of any readout, over `queries` queries.

    `missing` judged queries without a list count 0, as they do in an evaluation. `exponent`: length normalisation.
    """

    def __init__(
        self, readings: Sequence[ListReading], measure: str, *, exponent: float = 0.0, missing: int = 0
    ) -> None:
        if not readings:
            raise UserError("no list of the split has a judged query: there is nothing to search on")
        self.measure = ListMeasure.parse(measure)
        self._readings, self._exponent, self._missing = readings, exponent, missing
        self.singles: Float[np.ndarray, "n L S"] = self._values(lambda masses: masses)

    @property
    def queries(self) -> int:
        return len(self._readings) + self._missing

    def layer_values(self, tokens: Sequence[int]) -> Float[np.ndarray, "n L"]:
        """Of the sum of some tokens, at every layer."""
        return self._values(lambda masses: masses[:, list(tokens)].sum(axis=1))

    def values(self, readout: Readout) -> Float[np.ndarray, " n"]:
        """Of one readout."""
        return self._values(lambda masses: masses[readout.layer, list(readout.tokens)].sum(axis=0))

    def _values(self, take: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        rows = [self._one(reading, take(reading.masses)) for reading in self._readings]
        return np.stack(rows + [np.zeros_like(rows[0])] * self._missing)

    def _one(self, reading: ListReading, masses: np.ndarray) -> np.ndarray:
        scores = reading.scores(masses, self._exponent)
        return self.measure.of(scores, reading.grades, reading.readable, reading.ideal)

    def choose(self, max_signals: int, queries: np.ndarray | None = None) -> Readout:
        """The best single token of any layer, then tokens of that layer as long as each adds to the mean.

        Judged on `queries` (indices; None: all). Ties go to the lower layer and the earlier token.
        """
        rows = np.arange(self.queries) if queries is None else queries
        means = np.round(self.singles[rows].mean(axis=0), 12)
        layer, first = np.unravel_index(int(np.argmax(means)), means.shape)
        tokens, best = [int(first)], float(means[layer, first])
        while len(tokens) < max_signals:
            added = np.round(self._added(int(layer), tokens)[rows].mean(axis=0), 12)
            added[tokens] = -np.inf
            if added.max() <= best:
                break
            tokens, best = [*tokens, int(np.argmax(added))], float(added.max())
        return Readout(int(layer), tuple(sorted(tokens)))

    def _added(self, layer: int, tokens: list[int]) -> Float[np.ndarray, "n S"]:
        """Of each token beside those given, at one layer."""
        return self._values(lambda masses: masses[layer] + masses[layer, tokens].sum(axis=0))

    def find(self, present: Readout, *, max_signals: int = 2, samples: int = 2000, seed: int = 0) -> Finding:
        """The best readout with all that says how sure it is."""
        best = self.choose(max_signals)
        honest = self._cross_validated(max_signals, seed)
        now = self.values(present)
        return Finding(
            best=best,
            value=Estimate.of(self.values(best), seed),
            resampled_wins=resampled_wins(self.singles, samples, seed),
            present=present,
            present_value=Estimate.of(now, seed),
            cross_validated=None if honest is None else Estimate.of(honest, seed),
            difference=None if honest is None else Estimate.of(honest - now, seed),
            p_value=None if honest is None else paired_randomization_test(honest, now, seed=seed),
        )

    def _cross_validated(self, max_signals: int, seed: int) -> Float[np.ndarray, " n"] | None:
        """Each query's value by the readout that the queries of the other folds choose."""
        if self.queries < 2:
            return None
        order = np.random.default_rng(seed).permutation(self.queries)
        result = np.zeros(self.queries)
        for fold in np.array_split(order, min(FOLDS, self.queries)):
            others = np.setdiff1d(order, fold)
            result[fold] = self.values(self.choose(max_signals, others))[fold]
        return result


def resampled_wins(values: Float[np.ndarray, "n L S"], samples: int, seed: int) -> dict[tuple[int, int], float]:
    """(layer, token) -> the share of bootstrap samples of queries in which it has the highest mean, highest first.

    A sample in which several are highest is shared among them.
    """
    n, _, tokens = values.shape
    flat = values.reshape(n, -1)
    rng = np.random.default_rng(seed)
    wins = np.zeros(flat.shape[1])
    chunk = max(1, _CHUNK // flat.shape[1])
    for start in range(0, samples, chunk):
        weights = rng.multinomial(n, np.full(n, 1 / n), size=min(chunk, samples - start))
        means = np.round(weights @ flat / n, 12)
        highest = means == means.max(axis=1, keepdims=True)
        wins += (highest / highest.sum(axis=1, keepdims=True)).sum(axis=0)
    order = [int(i) for i in np.argsort(-wins, kind="stable") if wins[i]]
    return {(i // tokens, i % tokens): float(wins[i] / samples) for i in order}
