"""An analysis in tables, sentences and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from blockrank.analysis import figures
from blockrank.analysis.search import Estimate, Readout
from blockrank.analysis.study import SignalReport
from blockrank.evaluation.tables import Cell, Table

LISTED_WINS = 5


def best_tokens_table(report: SignalReport, title: str) -> Table:
    """The best single tokens, and how often each is the best of all when queries are resampled."""
    rows = []
    for (layer, token), interval in report.single_intervals.items():
        wins = report.finding.resampled_wins.get((layer, token), 0.0)
        value = float(report.singles[layer, token])
        rows.append((str(report.tokens[token]), (Cell(layer), Cell(value, interval), Cell(f"{wins:.0%}"))))
    notes = (
        f"{report.queries} queries. In brackets: 95 % bootstrap interval of the mean.",
        "best of all: share of bootstrap samples of the queries in which this layer and token have the highest mean; a "
        "sample in which several have it is shared among them.",
    )
    return Table(("layer", report.measure, "best of all"), tuple(rows), title=title, row_header="token", notes=notes)


def readouts_table(report: SignalReport) -> Table:
    """The readout found beside the present one, and what choosing is worth."""
    finding = report.finding
    rows = [("found", _row(report, finding.best, finding.value))]
    if finding.cross_validated is not None:
        rows.append(("found, cross-validated", (Cell(None), Cell(None), _cell(finding.cross_validated))))
    rows.append(("present", _row(report, finding.present, finding.present_value)))
    return Table(("layer", "signal tokens", report.measure), tuple(rows), title="Readouts", row_header="readout")


def layers_table(report: SignalReport) -> Table:
    """The present signals at every layer."""
    rows = tuple((str(layer), (_cell(value),)) for layer, value in enumerate(report.layers))
    return Table((report.measure,), rows, title="The present signals at every layer", row_header="layer")


def shares_table(shares: np.ndarray, lists: int) -> Table:
    """Where documents' attention goes under dense attention, per layer."""
    rows = tuple((str(layer), tuple(Cell(float(x)) for x in row)) for layer, row in enumerate(shares))
    return Table(
        ("prefix", "own document", "other documents"),
        rows,
        title=f"Documents' attention under dense attention, {lists} lists",
        row_header="layer",
        digits=3,
    )


def steps_table(steps: Mapping[int, Sequence[Estimate]], measure: str, score_layer: int) -> Table:
    """The present signals at the score layer and at the best layer of every checkpoint."""
    rows = []
    for step, values in steps.items():
        best = int(np.argmax([value.mean for value in values]))
        rows.append((str(step), (_cell(values[score_layer]), Cell(best), _cell(values[best]))))
    columns = (f"{measure} at layer {score_layer}", "best layer", f"{measure} there")
    return Table(columns, tuple(rows), title="Checkpoints", row_header="step")


def verdict(report: SignalReport) -> str:
    """What the search came to, in sentences that do not claim more than the queries say."""
    finding = report.finding
    wins = list(finding.resampled_wins.items())
    (layer, token), share = wins[0]
    lines = [
        f"Best: layer {finding.best.layer}, {_and(report.names(finding.best))}; {report.measure} "
        f"{_text(finding.value)} on {report.queries} queries that it was chosen on."
    ]
    if share < 0.5:
        others = len([1 for _, s in wins if s >= 0.01])
        lines.append(
            f"The best single token is uncertain: the most frequent one (layer {layer}, {report.tokens[token]}) "
            f"wins {share:.0%} of the resampled query sets, and {others} win at least 1 %."
        )
    else:
        lines.append(
            f"The best single token (layer {layer}, {report.tokens[token]}) wins {share:.0%} of the resampled query "
            "sets."
        )
    if finding.cross_validated is None:
        lines.append("One query cannot be cross-validated: take more.")
    else:
        lines.append(
            f"Cross-validated (chosen on most of the queries, measured on the others, in turn): "
            f"{_text(finding.cross_validated)}."
        )
    if finding.difference is not None:
        low, high = finding.difference.interval
        sure = "better beyond chance" if finding.is_better else "not better beyond chance"
        lines.append(
            f"Present: layer {finding.present.layer}, {_and(report.names(finding.present))}; "
            f"{_text(finding.present_value)}. Choosing anew is {sure}: {finding.difference.mean:+.4f} "
            f"[{low:+.4f}, {high:+.4f}], p = {finding.p_value:.3f}."
        )
    return "\n".join(lines)


def draw_signals(report: SignalReport, folder: Path) -> list[Path]:
    """The measure over layers, and of each token at each layer."""
    finding = report.finding
    curves = {"present signals": _curve(report.layers)}
    readouts = {"found": finding.best, "present": finding.present}
    cells = {name: [(found.layer, token) for token in found.tokens] for name, found in readouts.items()}
    labels = [str(token) for token in report.tokens]
    return [
        figures.plot_layers(
            curves, report.measure, folder / "layers.png", score_layer=finding.present.layer, best=finding.best.layer
        ),
        figures.plot_tokens(report.singles, labels, report.measure, folder / "tokens.png", marks=cells),
    ]


def draw_steps(steps: Mapping[int, Sequence[Estimate]], measure: str, score_layer: int, target: Path) -> Path:
    """The measure over layers, a line for each checkpoint."""
    curves = {f"step {step}": _curve(values) for step, values in steps.items()}
    return figures.plot_layers(curves, measure, target, score_layer=score_layer)


def _curve(values: Sequence[Estimate]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lows, highs = zip(*(value.interval for value in values), strict=True)
    return np.array([value.mean for value in values]), np.array(lows), np.array(highs)


def _row(report: SignalReport, readout: Readout, value: Estimate) -> tuple[Cell, ...]:
    return Cell(readout.layer), Cell(_and(report.names(readout))), _cell(value)


def _cell(value: Estimate) -> Cell:
    return Cell(value.mean, value.interval)


def _text(value: Estimate) -> str:
    return f"{value.mean:.4f} [{value.interval[0]:.4f}, {value.interval[1]:.4f}]"


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)
