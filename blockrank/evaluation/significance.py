"""Is a difference between two systems more than chance? Randomisation test, bootstrap intervals, Holm's correction.

The paired randomisation (permutation) test is the one Smucker, Allan and Carterette (CIKM 2007) recommend for IR.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from blockrank.errors import UserError

EXACT_LIMIT = 16
_CHUNK_VALUES = 4_000_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """System against baseline over the same queries; `difference` and `interval` are system minus baseline."""

    queries: int
    mean: float
    baseline_mean: float
    difference: float
    interval: tuple[float, float]
    p_value: float
    wins: int
    ties: int
    losses: int


def paired_randomization_test(
    system: Sequence[float] | np.ndarray,
    baseline: Sequence[float] | np.ndarray,
    *,
    samples: int = 10_000,
    seed: int = 0,
    exact_limit: int = EXACT_LIMIT,
) -> float:
    """Two-sided p-value of the paired randomisation test on the mean difference of two float [n] arrays.

    Under the null hypothesis each query's difference is as likely to have the other sign. When at most `exact_limit`
    differences are not zero, all sign assignments are enumerated (p = share with a mean difference at least as
    large in absolute value); otherwise `samples` seeded ones are drawn and p = (count + 1) / (samples + 1).
    """
    differences = _differences(system, baseline)
    differences = differences[differences != 0]
    if differences.size == 0:
        return 1.0
    total = np.abs(differences).sum()
    threshold = abs(differences.sum()) - 1e-12 * total
    if differences.size <= exact_limit:
        bits = np.arange(2**differences.size)[:, None] >> np.arange(differences.size) & 1
        return float(np.mean(np.abs((2 * bits - 1) @ differences) >= threshold))
    _positive("samples", samples)
    rng = np.random.default_rng(seed)
    count, left = 0, samples
    while left:
        size = min(left, max(1, _CHUNK_VALUES // differences.size))
        flips = rng.integers(0, 2, size=(size, differences.size), dtype=np.int8)
        sums = 2.0 * (flips @ differences) - differences.sum()
        count += int(np.count_nonzero(np.abs(sums) >= threshold))
        left -= size
    return (count + 1) / (samples + 1)


def bootstrap_interval(
    values: Sequence[float] | np.ndarray, *, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap confidence interval (low, high) of the mean of float [n] values, resampling queries."""
    values = _finite("values", values)
    if not 0 < confidence < 1:
        raise UserError(f"confidence={confidence}: a share between 0 and 1, e.g. 0.95")
    if values.min() == values.max():
        _positive("samples", samples)
        return float(values[0]), float(values[0])
    means = bootstrap_means(values, samples=samples, seed=seed)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def bootstrap_means(
    values: Sequence[float] | np.ndarray, *, samples: int = 10_000, seed: int | Sequence[int] = 0
) -> np.ndarray:
    """Means, float64 [samples], of as many samples with replacement of float [n] values."""
    values = _finite("values", values)
    _positive("samples", samples)
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_VALUES // values.size)
    return np.concatenate(
        [
            values[rng.integers(0, values.size, size=(min(chunk, samples - start), values.size))].mean(axis=1)
            for start in range(0, samples, chunk)
        ]
    )


def holm_correction(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm-Bonferroni adjusted p-values, float64 [m] in the given order: reject at level a where the value is <= a."""
    values = np.asarray(p_values, dtype=np.float64)
    if values.ndim != 1 or np.isnan(values).any() or (values < 0).any() or (values > 1).any():
        raise UserError(f"p-values must be a flat list of numbers in [0, 1], got {p_values!r}")
    order = np.argsort(values, kind="stable")
    factors = values.size - np.arange(values.size)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(values[order] * factors))
    return adjusted


def compare(
    system: Mapping[str, float],
    baseline: Mapping[str, float],
    *,
    confidence: float = 0.95,
    samples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Two systems' per-query values of one measure (query id -> value). Both must cover the same queries."""
    if system.keys() != baseline.keys():
        odd = sorted(system.keys() ^ baseline.keys())
        raise UserError(
            f"a paired test needs the same queries on both sides; {len(odd)} are on one side only, e.g. {odd[:3]}: "
            "evaluate both runs with the same qrels and missing='zero'"
        )
    first = _finite("values", list(system.values()))
    second = np.asarray([baseline[query] for query in system], dtype=np.float64)
    differences = _differences(first, second)
    return Comparison(
        queries=differences.size,
        mean=float(first.mean()),
        baseline_mean=float(second.mean()),
        difference=float(differences.mean()),
        interval=bootstrap_interval(differences, confidence=confidence, samples=samples, seed=seed),
        p_value=paired_randomization_test(first, second, samples=samples, seed=seed),
        wins=int((differences > 0).sum()),
        ties=int((differences == 0).sum()),
        losses=int((differences < 0).sum()),
    )


def _finite(name: str, values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise UserError(f"{name} must be a flat, non-empty list of finite numbers (one per query)")
    return array


def _differences(system: Sequence[float] | np.ndarray, baseline: Sequence[float] | np.ndarray) -> np.ndarray:
    first, second = _finite("system", system), _finite("baseline", baseline)
    if first.size != second.size:
        raise UserError(f"a paired test needs one value per query on both sides, got {first.size} and {second.size}")
    return first - second


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name}={value}: at least 1 is needed")
