"""What the numbers show: speed-ups, whether cost is linear in the list, and whether systems that must agree do."""

from __future__ import annotations

from typing import Any

import numpy as np

from blockrank.benchmark.records import Cell, Results
from blockrank.benchmark.settings import BenchConfig, System

LONG_LIST = 50
"""Lists from this length on are held to a constant time per document; shorter ones mostly read prefix and suffix."""


def summarise(config: BenchConfig, results: Results) -> dict[str, Any]:
    """JSON-ready.

    `speed_up` of packed BlockRank over each system by length, `scaling` of BlockRank systems, `agreement` of scores.
    """
    return {
        "speed_up": _speed_ups(config, results),
        "scaling": {name: _scaling(results.of(name)) for name in results.systems if name.startswith("blockrank")},
        "agreement": {n: _disagreement(results, n) for n in results.lengths},
    }


def fastest_kind(config: BenchConfig) -> System:
    """What the others are compared with: packed BlockRank up to the score layer, with the first backend."""
    backend = next(iter(config.backends), config.dense_backend)
    return System("blockrank", "attention", "packed", backend, "score_layer")


def _speed_ups(config: BenchConfig, results: Results) -> dict[str, dict[int, float]]:
    """How many times longer each system takes than packed BlockRank."""
    base = {cell.candidates: cell.median for cell in results.of(fastest_kind(config).name)}
    ratios = {
        name: {c.candidates: c.median / base[c.candidates] for c in results.of(name) if c.candidates in base}
        for name in results.systems
    }
    return {name: found for name, found in ratios.items() if found}


def _scaling(cells: list[Cell]) -> dict[str, Any]:
    """Time per document over long lists, and the line through peak memory over padded tokens."""
    long = [cell for cell in cells if cell.candidates >= LONG_LIST]
    per_document = {cell.candidates: cell.median / cell.candidates for cell in long}
    found: dict[str, Any] = {"seconds_per_document": per_document}
    if len(per_document) > 1:
        found["spread"] = max(per_document.values()) / min(per_document.values()) - 1
    if len({cell.facts["padded_tokens"] for cell in cells}) > 2:
        tokens = np.asarray([cell.facts["padded_tokens"] for cell in cells], float)
        peaks = np.asarray([cell.peak_bytes for cell in cells], float)
        slope, base = np.polyfit(tokens, peaks, 1)
        found["memory"] = {
            "base_bytes": float(base),
            "bytes_per_token": float(slope),
            "largest_deviation": float(np.max(np.abs(base + slope * tokens - peaks) / peaks)),
        }
    return found


def _disagreement(results: Results, candidates: int) -> dict[str, float]:
    """Largest difference of scores from the first system with the same visibility, by system."""
    first: dict[str, tuple[str, np.ndarray]] = {}
    found: dict[str, float] = {}
    for cell in results.measured():
        if cell.candidates != candidates or "-decode-" in cell.system:
            continue
        visibility, scores = cell.system.split("-")[0], np.asarray(cell.facts["result"])[:candidates]
        _, expected = first.setdefault(visibility, (cell.system, scores))
        found[cell.system] = float(np.abs(scores - expected).max())
    return found
