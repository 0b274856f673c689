"""What the benchmark finds: one record per system and length of list."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Cell:
    """One system on one list: `seconds` of the repetitions, `facts` from the worker, or the `error` that left none.

    `matmul_flops` is the best rate of the matrix products that ran between its repetitions, per second.
    """

    system: str
    candidates: int
    seconds: tuple[float, ...] = ()
    peak_bytes: int = 0
    matmul_flops: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def median(self) -> float:
        return self.percentile(50)

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.seconds, q))

    @property
    def utilisation(self) -> float:
        """MFU: needed operations per second of the median, over the matrix products' rate."""
        return self.facts["needed_flops"] / self.median / self.matmul_flops

    def to_json(self) -> dict[str, Any]:
        """Everything measured, and what follows from it."""
        if self.error is not None:
            return {"system": self.system, "candidates": self.candidates, "error": self.error}
        summary = {f"p{q}_seconds": self.percentile(q) for q in (5, 50, 95)}
        return {**asdict(self), **summary, "utilisation": self.utilisation}


@dataclass(frozen=True)
class Results:
    """All cells of a run, in the order measured."""

    cells: tuple[Cell, ...]

    def measured(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.error is None]

    def find(self, system: str, candidates: int) -> Cell | None:
        """The cell of a system (by name), if it was measured."""
        return next((c for c in self.measured() if (c.system, c.candidates) == (system, candidates)), None)

    def of(self, system: str) -> list[Cell]:
        """A system's cells by length of list."""
        return sorted((c for c in self.measured() if c.system == system), key=lambda c: c.candidates)

    @property
    def systems(self) -> list[str]:
        return list(dict.fromkeys(cell.system for cell in self.cells))

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.candidates for cell in self.cells})
