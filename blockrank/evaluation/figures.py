"""Figures of an evaluation, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockrank.data.files import atomic_write
from blockrank.evaluation.deltas import Delta

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""The palette of Okabe and Ito, told apart by the colour-blind too."""

_MARKERS = "osD^vP*X"


@dataclass(frozen=True, slots=True)
class Point:
    """What a ranker reaches with `depth` candidates: quality with its interval, seconds for a list. None: not known."""

    depth: int
    quality: float | None = None
    interval: tuple[float, float] | None = None
    seconds: float | None = None


def plot_deltas(
    target: Path, found: Mapping[str, Mapping[str, Sequence[Delta]]], baseline: str, title: str = ""
) -> None:
    """Sorted differences from `baseline`: a panel for each measure (of `all_deltas`), a line for each row."""
    panels = [(measure, rows) for measure, rows in found.items() if rows]
    figure, axes = _figure(len(panels))
    for axis, (measure, rows) in zip(axes, panels, strict=True):
        for index, (row, values) in enumerate(rows.items()):
            differences = [delta.difference for delta in values]
            better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
            places = [(i + 0.5) / len(differences) for i in range(len(differences))]
            label = f"{row} (+{better}, -{worse})"
            axis.plot(places, differences, drawstyle="steps-mid", color=_colour(index), label=label)
        axis.axhline(0, color="0.5", linewidth=0.8)
        axis.set(xlim=(0, 1), xlabel="share of the queries, sorted", ylabel=f"{measure}: difference from {baseline}")
        axis.legend(fontsize="small", loc="upper right")
    _save(figure, target, title)


def plot_scaling(
    target: Path,
    measure: str,
    ours: Mapping[str, Sequence[Point]],
    paper: Mapping[str, Sequence[Point]] | None = None,
    title: str = "",
) -> None:
    """Quality and seconds for a list over the number of candidates: time is logarithmic on both axes.

    The paper's points are dashed, in the colour of the row of the same name.
    """
    figure, (quality, latency) = _figure(2)
    colours = {row: _colour(index) for index, row in enumerate(dict.fromkeys((*ours, *(paper or {}))))}
    for source, style, suffix in ((ours, "-", ""), (paper or {}, "--", " (paper)")):
        for index, (row, points) in enumerate(source.items()):
            shape: dict[str, Any] = {"linestyle": style, "color": colours[row], "label": row + suffix}
            shape["marker"] = _MARKERS[index % len(_MARKERS)]
            if suffix:
                shape["markerfacecolor"] = "white"
            with_quality = [(p.depth, p.quality, p.interval) for p in points if p.quality is not None]
            if with_quality:
                depths, values, intervals = zip(*with_quality, strict=True)
                quality.plot(depths, values, **shape)
                bars = [(n, found) for n, found in zip(depths, intervals, strict=True) if found is not None]
                if bars:
                    lows, highs = zip(*(found for _, found in bars), strict=True)
                    quality.fill_between([n for n, _ in bars], lows, highs, color=colours[row], alpha=0.12, linewidth=0)
            with_seconds = [(p.depth, p.seconds) for p in points if p.seconds]
            if with_seconds:
                latency.plot(*zip(*with_seconds, strict=True), **shape)
    depths = sorted({p.depth for source in (ours, paper or {}) for points in source.values() for p in points})
    quality.set(ylabel=measure)
    latency.set(yscale="log", ylabel="seconds for a list (median)")
    for axis in (quality, latency):
        _depth_axis(axis, depths)
        if axis.has_data():
            axis.legend(fontsize="small")
    _save(figure, target, title)


def _depth_axis(axis: Any, depths: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    axis.set(xscale="log", xlabel="candidates N")
    axis.xaxis.set_major_locator(FixedLocator(depths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(ScalarFormatter())


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * panels, 4.0), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis in axes:
        axis.grid(which="both", alpha=0.25)
    return figure, axes


def _save(figure: Any, target: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if title:
        figure.suptitle(title, fontsize="medium")
    with atomic_write(target) as file:
        FigureCanvasAgg(figure).print_png(file)
