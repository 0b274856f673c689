"""The learning curves of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blockrank.training.tracking import STEP, read_metrics


def plot_curves(metrics: str | Path, target: str | Path, smoothing: int = 20) -> Path | None:
    """Draws loss and P@1 over steps, training (a running mean of `smoothing` steps) and validation, as PNG.

    Returns the file, or None if `metrics` holds no training step.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    if not any("train/loss" in row for row in rows):
        return None
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    loss, precision = figure.subplots(1, 2)
    for name, label in (("train/loss", "loss"), ("train/ntp_loss", "next token"), ("train/aux_loss", "InfoNCE")):
        _line(loss, rows, name, label, smoothing)
    _line(precision, rows, "train/attention_p_at_1", "training", smoothing)
    steps, values = _series(rows, "validation/p_at_1")
    if len(steps):
        precision.plot(steps, values, "o-", label="validation", color="black")
    loss.set(xlabel="step", ylabel="loss", title="Loss")
    precision.set(xlabel="step", ylabel="P@1", title="P@1", ylim=(0, 1.02))
    for axes in (loss, precision):
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(target)
    return target


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(row[STEP], row[name]) for row in rows if isinstance(row.get(name), int | float)]
    return np.array([p[0] for p in points]), np.array([p[1] for p in points], float)


def _line(axes: Any, rows: Sequence[Mapping[str, Any]], name: str, label: str, smoothing: int) -> None:
    steps, values = _series(rows, name)
    if not len(steps):
        return
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start = np.maximum(np.arange(len(values)) - smoothing + 1, 0)
    stop = np.arange(1, len(values) + 1)
    axes.plot(steps, (sums[stop] - sums[start]) / (stop - start), label=label)
