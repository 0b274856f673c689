"""Where the speed-up comes from: one system after another, each with one thing less to do than the one before."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from blockrank.benchmark.records import Results
from blockrank.benchmark.settings import BenchConfig, System


@dataclass(frozen=True)
class Step:
    """`change` turns the system before into `system`; `factor` is how many times faster that made it."""

    change: str
    system: str
    seconds: float
    factor: float


def chain(config: BenchConfig) -> list[tuple[str, System]]:
    """From full fine-tuning's decoding to packed BlockRank, with the first backend."""
    dense, sparse = config.dense_backend, next(iter(config.backends), config.dense_backend)
    return [
        ("dense prefill of all blocks, then decoding", System("dense", "decode", "packed", dense, "all")),
        ("read attention instead of decoding", System("dense", "attention", "packed", dense, "all")),
        ("stop at the score layer", System("dense", "attention", "packed", dense, "score_layer")),
        (
            "block-sparse attention, a row per document",
            System("blockrank", "attention", "chunked", sparse, "score_layer"),
        ),
        ("documents packed into rows", System("blockrank", "attention", "packed", sparse, "score_layer")),
    ]


def decompose(config: BenchConfig, results: Results, candidates: int) -> list[Step]:
    """The chain's steps at one length of list, from medians; the factors' product is the ratio of last to first.

    Empty unless every system of the chain was measured.
    """
    steps: list[Step] = []
    cells = [(change, results.find(system.name, candidates)) for change, system in chain(config)]
    found = [(change, cell) for change, cell in cells if cell is not None]
    if len(found) < len(cells):
        return steps
    change, first = found[0]
    steps.append(Step(change, first.system, first.median, 1.0))
    for (_, before), (change, cell) in pairwise(found):
        steps.append(Step(change, cell.system, cell.median, before.median / cell.median))
    return steps
