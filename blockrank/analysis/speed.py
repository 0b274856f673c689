"""A benchmark's `results.json` in figures: latency over N, and where the speed-up comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockrank.analysis.figures import plot_decomposition, plot_scaling
from blockrank.errors import UserError
from blockrank.evaluation.tables import Cell, Table
from blockrank.models.hf_fields import read_json


@dataclass(frozen=True)
class SpeedResults:
    """What `python -m blockrank.bench` measured.

    `latency`: system -> (candidates, median seconds), by candidates; `steps`: candidates -> the decomposition's steps
    as (change, seconds, factor over the one before).
    """

    latency: dict[str, tuple[list[int], list[float]]]
    steps: dict[int, list[tuple[str, float, float]]]

    @staticmethod
    def read(path: str | Path) -> SpeedResults:
        """Raises `UserError` for a file that is not there, or no benchmark's."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"{path}: no such file; `python -m blockrank.bench` writes results.json")
        values = read_json(path)
        if not isinstance(values, Mapping) or "cells" not in values or "decomposition" not in values:
            raise UserError(f"{path}: not a results.json of `python -m blockrank.bench`")
        latency: dict[str, list[tuple[int, float]]] = {}
        for cell in values["cells"]:
            if not cell.get("error"):
                latency.setdefault(cell["system"], []).append((cell["candidates"], cell["p50_seconds"]))
        steps = {
            int(n): [(step["change"], step["seconds"], step["factor"]) for step in found]
            for n, found in values["decomposition"].items()
        }
        points: dict[str, Any] = {name: tuple(map(list, zip(*sorted(v), strict=True))) for name, v in latency.items()}
        return SpeedResults(points, steps)

    def table(self) -> Table:
        """Median seconds of a list, systems by candidates."""
        lengths = sorted({n for found, _ in self.latency.values() for n in found})
        rows = []
        for name, found in self.latency.items():
            seconds = dict(zip(*found, strict=True))
            rows.append((name, tuple(Cell(f"{seconds[n]:.3g}" if n in seconds else None) for n in lengths)))
        columns = tuple(f"N = {n}" for n in lengths)
        return Table(columns, tuple(rows), title="Median seconds a list", row_header="system")

    def draw_latency(self, target: str | Path) -> Path:
        """Median latency over the number of candidates."""
        return plot_scaling(self.latency, target)

    def draw_decomposition(self, target: str | Path, candidates: int | None = None) -> Path:
        """Where the speed-up at so many candidates (None: the most) comes from. `UserError` if it was not measured."""
        known = ", ".join(map(str, sorted(self.steps))) or "none"
        if not self.steps or (candidates is not None and candidates not in self.steps):
            raise UserError(f"no decomposition at N = {candidates}; the benchmark has it at {known}")
        n = max(self.steps) if candidates is None else candidates
        return plot_decomposition(self.steps[n], target, title=f"Where the speed-up at N = {n} comes from")
