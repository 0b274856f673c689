"""Quality and time of rankers over the number of candidates, from one collection's evaluations at several depths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from blockrank.config import to_plain
from blockrank.evaluation.figures import Point, plot_scaling
from blockrank.evaluation.held_out import HeldOut
from blockrank.evaluation.metrics import parse_measure
from blockrank.evaluation.recorded import SECONDS, recorded_numbers, recorded_values
from blockrank.evaluation.settings import EvalConfig, Published
from blockrank.evaluation.significance import bootstrap_interval
from blockrank.evaluation.tables import canonical_names

Cases = Sequence[tuple[HeldOut, EvalConfig]]


def by_collection(cases: Cases) -> dict[str | None, list[tuple[HeldOut, EvalConfig]]]:
    """The evaluations of each split that there is at two depths or more; the only such split goes by None.

    Others go by the names of collection and split.
    """
    groups: dict[str, list[tuple[HeldOut, EvalConfig]]] = {}
    for held_out, config in cases:
        key = str((to_plain(config.data), held_out.config.split))
        groups.setdefault(key, []).append((held_out, config))
    several = [found for found in groups.values() if len({held_out.config.depth for held_out, _ in found}) > 1]
    if len(several) == 1:
        return {None: several[0]}
    return {_name(found[0][0], index): found for index, found in enumerate(several)}


def scaling_points(held_out: HeldOut, row: str, measure: str, scale: float, seed: int) -> Point:
    """What one row reaches at the depth of `held_out`."""
    report, depth = held_out.reports.get(row), held_out.config.depth
    (seconds,) = recorded_numbers(SECONDS, recorded_values(held_out.records.get(row, {}), SECONDS))
    if report is None:
        return Point(depth, seconds=seconds)
    low, high = bootstrap_interval(list(report.values(measure).values()), seed=seed)
    return Point(depth, report.means[measure] * scale, (low * scale, high * scale), seconds)


def published_points(papers: Mapping[int, Published], measure: str) -> dict[str, list[Point]]:
    """row -> a paper's points; `papers`: depth -> its numbers."""
    found: dict[str, list[Point]] = {}
    for depth, rows in papers.items():
        for row, numbers in rows.items():
            named = canonical_names(numbers, (SECONDS,))
            if measure in named or SECONDS in named:
                found.setdefault(row, []).append(Point(depth, named.get(measure), None, named.get(SECONDS)))
    return found


def draw_scaling(cases: Cases, target: Path, scale: float, seed: int) -> None:
    """The figure of one collection by its main measure, shallow lists first."""
    ordered = sorted(cases, key=lambda case: case[0].config.depth)
    first = ordered[0][0]
    measure = str(parse_measure(first.config.measures[0]))
    rows = list(dict.fromkeys(row for held_out, _ in ordered for row in held_out.reports))
    plot_scaling(
        target,
        f"{measure}, %" if scale == 100 else measure,
        {row: [scaling_points(held_out, row, measure, scale, seed) for held_out, _ in ordered] for row in rows},
        published_points({held_out.config.depth: config.paper or {} for held_out, config in ordered}, measure),
        title=f"{first.name}, {first.config.split} split",
    )


def _name(held_out: HeldOut, index: int) -> str:
    return f"{index}_{held_out.name.replace('/', '_')}"
