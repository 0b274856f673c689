"""Figures of confidence: reliability and risk against coverage; quality against the share of lists decoded."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockrank.data.files import atomic_write

_MEASURES = {"margin": ("#0072B2", "-"), "entropy": ("#D55E00", "--"), "max": ("#009E73", "-.")}
"""Okabe and Ito's colours, with a dash each."""


def plot_confidence(report: Mapping[str, Any], target: Path) -> Path:
    """A `confidence_report` as PNG: accuracy over confidence in bins of equal mass, and risk over coverage."""
    figure, (left, right) = _panels(2)
    left.plot([0, 1], [0, 1], color="0.6", linewidth=1, label="perfect")
    rows = [("shares", "share of the mass" if report["score_kind"] == "mass" else "softmax", "#0072B2", "o-")]
    if report["calibrated"] is not None:
        rows.append(("calibrated", f"softmax(S/τ), τ = {report['temperature']['temperature']:.3g}", "#D55E00", "s--"))
    for key, label, colour, style in rows:
        found = report[key]["equal_mass"]
        points = [b["confidence"] for b in found["bins"]], [b["accuracy"] for b in found["bins"]]
        left.plot(*points, style, color=colour, label=f"{label} (ECE {found['ece']:.3f})")
    left.set(xlabel="confidence", ylabel="P@1", xlim=(0, 1), ylim=(0, 1), title="Reliability")
    for measure, curve in report["risk_coverage"].items():
        colour, dash = _MEASURES[measure]
        label = f"{measure} (AURC {curve['aurc']:.3f})"
        right.plot(curve["coverage"], curve["risk"], dash, color=colour, label=label)
    right.axhline(report["error_rate"], color="0.6", linewidth=1, label=f"at random ({report['error_rate']:.3f})")
    right.set(xlabel="coverage", ylabel="risk (1 - P@1)", xlim=(0, 1), ylim=(0, None), title="Risk and coverage")
    return _save(figure, (left, right), target)


def plot_fallback(curves: Mapping[str, Any], target: Path) -> Path:
    """Fallback curves as PNG: each measure's mean over the share of lists decoded, by each measure of confidence."""
    names = list(curves["attention"])
    figure, panels = _panels(len(names))
    for axes, name in zip(panels, names, strict=True):
        ends = curves["attention"][name], curves["generative"][name]
        axes.plot([0, 1], ends, color="0.6", linewidth=1, label="chosen at random")
        for measure, points in curves["curves"].items():
            colour, dash = _MEASURES[measure]
            values = [p["share"] for p in points], [p["means"][name] for p in points]
            axes.plot(*values, dash, color=colour, label=f"by {measure}")
        axes.set(xlabel="share of lists decoded", ylabel=name, xlim=(0, 1))
    return _save(figure, panels, target)


def _panels(count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * count + 0.4, 3.6), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _save(figure: Any, panels: Any, target: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for axes in panels:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.set_dpi(150)
    FigureCanvasAgg(figure).print_png(buffer)
    with atomic_write(target) as file:
        file.write(buffer.getvalue())
    return target
