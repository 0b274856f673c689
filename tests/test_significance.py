"""Significance against brute force, scipy and textbook values."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from blockrank.errors import UserError
from blockrank.evaluation.significance import (
    bootstrap_interval,
    compare,
    holm_correction,
    paired_randomization_test,
)

UNIT = st.integers(0, 8).map(lambda n: n / 8)


def mean_of(differences: np.ndarray, axis: int) -> np.ndarray:
    return differences.mean(axis=axis)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(UNIT, UNIT), min_size=1, max_size=8))
def test_exact_test_is_the_enumeration(pairs: list[tuple[float, float]]) -> None:
    system, baseline = np.array(pairs).T
    differences = system - baseline
    observed = abs(differences.mean())
    means = [abs(np.mean(np.array(signs) * differences)) for signs in product((-1, 1), repeat=len(pairs))]
    expected = np.mean([mean >= observed - 1e-12 for mean in means])
    assert paired_randomization_test(system, baseline) == pytest.approx(expected)


def test_exact_and_sampled_tests_agree_with_scipy() -> None:
    rng = np.random.default_rng(3)
    system, baseline = rng.random(12), rng.random(12)
    options = {"permutation_type": "samples", "alternative": "two-sided", "vectorized": True}
    exact = scipy.stats.permutation_test((system - baseline,), mean_of, n_resamples=2**12, **options)
    assert paired_randomization_test(system, baseline) == pytest.approx(exact.pvalue)
    sampled = paired_randomization_test(system, baseline, exact_limit=0, samples=20_000, seed=1)
    assert sampled == pytest.approx(exact.pvalue, abs=0.015)
    system, baseline = rng.random(60) + 0.05, rng.random(60)
    drawn = scipy.stats.permutation_test((system - baseline,), mean_of, n_resamples=20_000, rng=rng, **options)
    assert paired_randomization_test(system, baseline, samples=20_000) == pytest.approx(drawn.pvalue, abs=0.015)


def test_known_p_values() -> None:
    assert paired_randomization_test([1, 1, 1, 1, 1], [0, 0, 0, 0, 0]) == 2 / 2**5
    assert paired_randomization_test([0.5, 0.25], [0.5, 0.25]) == 1.0
    assert paired_randomization_test([1.0] * 40, [0.0] * 40, samples=999) == 1 / 1000


def test_the_sampled_test_is_seeded_symmetric_and_counts_the_observed_assignment() -> None:
    rng = np.random.default_rng(0)
    system, baseline = rng.random(50), rng.random(50)
    p_value = paired_randomization_test(system, baseline, samples=500, seed=7)
    assert p_value == paired_randomization_test(system, baseline, samples=500, seed=7)
    assert p_value == paired_randomization_test(baseline, system, samples=500, seed=7)
    assert p_value * 501 == pytest.approx(round(p_value * 501))


def test_bootstrap_interval_against_scipy_and_the_normal_interval() -> None:
    values = np.random.default_rng(5).random(80)
    low, high = bootstrap_interval(values, samples=20_000)
    reference = scipy.stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=1)
    assert low == pytest.approx(reference.confidence_interval.low, abs=4e-3)
    assert high == pytest.approx(reference.confidence_interval.high, abs=4e-3)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / np.sqrt(80), rel=0.05)
    assert (low, high) == bootstrap_interval(values, samples=20_000)
    narrow = bootstrap_interval(values, confidence=0.5)
    assert low < narrow[0] < values.mean() < narrow[1] < high


def test_bootstrap_of_equal_values_is_a_point() -> None:
    assert bootstrap_interval([0.25]) == (0.25, 0.25)
    assert bootstrap_interval([1.0, 1.0, 1.0]) == (1.0, 1.0)


def test_holm_by_hand() -> None:
    np.testing.assert_allclose(holm_correction([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm_correction([0.5, 0.9]), [1.0, 1.0])
    assert holm_correction([]).shape == (0,)


def test_compare() -> None:
    system, baseline = {"q1": 1.0, "q2": 0.5, "q3": 0.0, "q4": 1.0}, {"q3": 0.5, "q4": 0.0, "q2": 0.5, "q1": 0.0}
    result = compare(system, baseline)
    assert (result.queries, result.wins, result.ties, result.losses) == (4, 2, 1, 1)
    assert (result.mean, result.baseline_mean, result.difference) == (0.625, 0.25, 0.375)
    assert result.p_value == 0.5
    assert result.interval[0] <= result.difference <= result.interval[1]


def test_bad_input() -> None:
    with pytest.raises(UserError, match=r"same queries.*\['q2'\]"):
        compare({"q1": 1.0, "q2": 1.0}, {"q1": 1.0})
    with pytest.raises(UserError, match="one value per query"):
        paired_randomization_test([1.0], [1.0, 2.0])
    for values in ([], [float("nan")], [[1.0]]):
        with pytest.raises(UserError, match="finite numbers"):
            bootstrap_interval(np.array(values))
    with pytest.raises(UserError, match="p-values"):
        holm_correction([0.5, float("nan")])
    with pytest.raises(UserError, match="confidence"):
        bootstrap_interval([0.0, 1.0], confidence=95)
    with pytest.raises(UserError, match="samples=0"):
        bootstrap_interval([0.0, 1.0], samples=0)
