"""The benchmark's files: `results.json`, `bench.md` and `latency.png`."""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blockrank.benchmark.decomposition import Step, decompose
from blockrank.benchmark.records import Cell, Results
from blockrank.benchmark.settings import BenchConfig
from blockrank.benchmark.summary import LONG_LIST, fastest_kind, summarise
from blockrank.config import to_plain
from blockrank.evaluation.files import git_commit, versions, write_json, write_text
from blockrank.evaluation.tables import Cell as Entry
from blockrank.evaluation.tables import Table


def write_report(config: BenchConfig, results: Results) -> str:
    """Writes the files into `output_dir`; returns the Markdown."""
    steps = {n: found for n in results.lengths if (found := decompose(config, results, n))}
    summary = summarise(config, results)
    text = "\n".join(_sections(results, steps, summary, fastest_kind(config).name))
    write_json(
        config.output_dir / "results.json",
        {
            "cells": [cell.to_json() for cell in results.cells],
            "decomposition": {n: [asdict(step) for step in found] for n, found in steps.items()},
            **summary,
            "config": to_plain(config),
            "git_commit": git_commit(),
            "versions": versions(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )
    write_text(config.output_dir / "bench.md", text)
    if results.measured():
        plot_latency(results, config.output_dir / "latency.png")
    return text


def _sections(results: Results, steps: dict[int, list[Step]], summary: dict[str, Any], base: str) -> list[str]:
    parts = [cells_table(results, n).to_markdown() for n in results.lengths]
    parts += [decomposition_table(found, n).to_markdown() for n, found in steps.items()]
    if summary["speed_up"]:
        parts.append(speed_up_table(results, summary["speed_up"], base).to_markdown())
    parts += [line for name, found in summary["scaling"].items() for line in _scaling_lines(name, found)]
    worst = max((d for found in summary["agreement"].values() for d in found.values()), default=None)
    if worst is not None:
        parts.append(f"- Scores of systems with one visibility differ by at most {worst:.1e}.\n")
    return parts


def cells_table(results: Results, candidates: int) -> Table:
    """All systems on lists of one length."""
    columns = ("blocks", "tokens", "padded", "median s", "p5", "p95", "runs", "compile s", "peak GB", "GFLOP", "MFU")
    cells = [cell for cell in results.cells if cell.candidates == candidates]
    measured = [cell for cell in cells if cell.error is None]
    rate = max((cell.matmul_flops for cell in measured), default=0.0)
    where = sorted({f"{cell.facts['device']} ({cell.facts['platform']})" for cell in measured})
    notes = [
        f"MFU: needed operations at the median over the matrix products beside it, best {rate / 1e9:,.0f} GFLOP/s."
    ]
    notes += [f"{cell.system}: not measured: {cell.error}" for cell in cells if cell.error is not None]
    return Table(
        columns,
        tuple((cell.system, tuple(map(Entry, _row(cell)))) for cell in measured),
        title=f"N = {candidates}, {', '.join(where)}",
        row_header="system",
        notes=tuple(notes),
    )


def _row(cell: Cell) -> tuple[str | int, ...]:
    facts = cell.facts
    return (
        facts["blocks"],
        facts["tokens"],
        facts["padded_tokens"],
        *(f"{value:.3g}" for value in (cell.median, cell.percentile(5), cell.percentile(95))),
        len(cell.seconds),
        f"{facts['compile_seconds']:.1f}",
        f"{cell.peak_bytes / 1e9:.2f}",
        f"{facts['needed_flops'] / 1e9:,.4g}",
        f"{cell.utilisation:.0%}",
    )


def decomposition_table(steps: list[Step], candidates: int) -> Table:
    """Where the speed-up comes from; factors multiply to the last row."""
    rows = [(step.change, (Entry(f"{step.seconds:.3g}"), Entry(f"× {step.factor:.2f}"))) for step in steps]
    total = math.prod(step.factor for step in steps)
    rows.append(("all together", (Entry(f"{steps[-1].seconds:.3g}"), Entry(f"× {total:.2f}"))))
    title = f"Where the speed-up at N = {candidates} comes from"
    return Table(("median s", "faster"), tuple(rows), title=title, row_header="change")


def speed_up_table(results: Results, speed_ups: dict[str, dict[int, float]], base: str) -> Table:
    """How many times longer than packed BlockRank each system takes."""
    lengths = results.lengths
    rows = [
        (name, tuple(Entry(f"{found[n]:.2f}" if n in found else None) for n in lengths))
        for name, found in speed_ups.items()
    ]
    columns = tuple(f"N = {n}" for n in lengths)
    return Table(columns, tuple(rows), title=f"Time relative to {base}", row_header="system")


def _scaling_lines(name: str, found: dict[str, Any]) -> list[str]:
    lines = []
    if "spread" in found:
        times = ", ".join(f"{1e3 * s:.3g} ms at {n}" for n, s in found["seconds_per_document"].items())
        lines.append(f"- {name}: time per document from N = {LONG_LIST} on within {found['spread']:.1%} ({times}).\n")
    if "memory" in found:
        fit = found["memory"]
        lines.append(
            f"- {name}: peak memory {fit['base_bytes'] / 1e9:.2f} GB + {fit['bytes_per_token'] / 1e3:.1f} kB a padded "
            f"token, at most {fit['largest_deviation']:.1%} off that line.\n"
        )
    return lines


def plot_latency(results: Results, target: Path) -> None:
    """Median latency over the number of candidates, both logarithmic, with bars from p5 to p95."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    markers = "osD^vP*X"
    for index, name in enumerate(results.systems):
        cells = results.of(name)
        if not cells:
            continue
        middle = [cell.median for cell in cells]
        low = [cell.median - cell.percentile(5) for cell in cells]
        high = [cell.percentile(95) - cell.median for cell in cells]
        axes.errorbar(
            [cell.candidates for cell in cells],
            middle,
            yerr=[low, high],
            marker=markers[index % len(markers)],
            linestyle="--" if name.startswith("dense") else "-",
            capsize=3,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="candidates N", ylabel="seconds per list (median, p5 to p95)")
    axes.xaxis.set_major_locator(FixedLocator(results.lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize="small", loc="upper left")
    target.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(target)
