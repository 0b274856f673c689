"""One table of results, rendered as Markdown, LaTeX, CSV or HTML from the same cells."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blockrank.errors import UserError
from blockrank.evaluation.files import write_text
from blockrank.evaluation.metrics import MetricsReport, parse_measure
from blockrank.evaluation.recorded import recorded_columns, recorded_numbers
from blockrank.evaluation.significance import bootstrap_interval, compare, holm_correction

Format = Literal["markdown", "latex", "csv", "html"]
SUFFIXES: dict[str, Format] = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".html": "html"}
"""The suffix of a file for each format."""

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~$&])")
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "†": r"$^{\dagger}$",
    "‡": r"$^{\ddagger}$",
    "–": "--",
    "\n": " ",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A number with, where known, its interval, the number the paper gives, its p-value and significance marks.

    `digits` after the point; None: the table's.
    """

    value: float | int | str | None
    interval: tuple[float, float] | None = None
    paper: float | None = None
    p_value: float | None = None
    marks: str = ""
    digits: int | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns.

    A column that holds any paper's number gets a second column beside it; one that holds nothing else is that column.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    title: str = ""
    row_header: str = "ranker"
    notes: tuple[str, ...] = ()
    digits: int = 4

    def __post_init__(self) -> None:
        for name, cells in self.rows:
            if len(cells) != len(self.columns):
                raise UserError(f"table row {name!r} has {len(cells)} cells for {len(self.columns)} columns")

    def render(self, form: Format) -> str:
        """The whole table as text, ending in a newline."""
        renderers = {"markdown": self.to_markdown, "latex": self.to_latex, "csv": self.to_csv, "html": self.to_html}
        if form not in renderers:
            raise UserError(f"unknown table format {form!r}; one of {', '.join(renderers)}")
        return renderers[form]()

    def write(self, path: str | Path) -> None:
        """Writes the table atomically in the format of the file's suffix: .md, .tex, .csv or .html."""
        path = Path(path)
        if path.suffix not in SUFFIXES:
            raise UserError(f"{path}: no table format for suffix {path.suffix!r}; one of {', '.join(SUFFIXES)}")
        write_text(path, self.render(SUFFIXES[path.suffix]))

    def write_all(self, stem: str | Path) -> list[Path]:
        """Writes the table in every format, to `stem` with the suffix of each; returns the files."""
        paths = [Path(f"{stem}{suffix}") for suffix in SUFFIXES]
        for path in paths:
            self.write(path)
        return paths

    def to_markdown(self) -> str:
        grid = [[_markdown(text) for text in row] for row in self._grid()]
        lines = [f"**{_markdown(self.title)}**", ""] if self.title else []
        rule = ["---", *("---:" for _ in grid[0][1:])]
        lines += ["| " + " | ".join(row) + " |" for row in [grid[0], rule, *grid[1:]]]
        lines += [line for note in self.notes for line in ("", _markdown(note))]
        return "\n".join(lines) + "\n"

    def to_latex(self) -> str:
        """A booktabs `table` environment (needs `\\usepackage{booktabs}`)."""
        grid = [[_latex(text) for text in row] for row in self._grid()]
        body = [" & ".join(row) + r" \\" for row in grid]
        lines = [r"\begin{table}", r"\centering"]
        lines += [rf"\caption{{{_latex(self.title)}}}"] if self.title else []
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(grid[0]) - 1)}}}", r"\toprule", body[0], r"\midrule", *body[1:]]
        lines += [r"\bottomrule", r"\end{tabular}"]
        lines += [rf"\par\smallskip\footnotesize {_latex(note)}" for note in self.notes]
        return "\n".join([*lines, r"\end{table}"]) + "\n"

    def to_html(self) -> str:
        grid = [[_html(text) for text in row] for row in self._grid()]
        lines = ["<table>"]
        lines += [f"  <caption>{_html(self.title)}</caption>"] if self.title else []
        head = "".join(f'<th scope="col">{text}</th>' for text in grid[0])
        lines += [f"  <thead><tr>{head}</tr></thead>", "  <tbody>"]
        for name, *cells in grid[1:]:
            lines.append(
                f'    <tr><th scope="row">{name}</th>' + "".join(f"<td>{text}</td>" for text in cells) + "</tr>"
            )
        lines += ["  </tbody>", "</table>", *(f"<p>{_html(note)}</p>" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """Full-precision numbers, one column each for value, low, high, p and paper (only those that are used)."""
        parts = ("low", "high", "p", "paper")
        rows = [(name, [_csv_parts(cell) for cell in cells]) for name, cells in self.rows]
        used = [
            [part for part in parts if any(cells[i][part] is not None for _, cells in rows)]
            for i in range(len(self.columns))
        ]
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        header = [
            name
            for column, extra in zip(self.columns, used, strict=True)
            for name in (column, *(f"{column} {part}" for part in extra))
        ]
        writer.writerow([self.row_header, *header])
        for name, cells in rows:
            flat = [cell[part] for cell, extra in zip(cells, used, strict=True) for part in ("value", *extra)]
            writer.writerow([name, *("" if value is None else value for value in flat)])
        return buffer.getvalue()

    def _grid(self) -> list[list[str]]:
        """Header and rows as plain text, papers' columns put in, nothing escaped yet."""
        columns = [[cells[i] for _, cells in self.rows] for i in range(len(self.columns))]
        header, texts = [self.row_header], [[name for name, _ in self.rows]]
        for name, cells in zip(self.columns, columns, strict=True):
            published = any(cell.paper is not None for cell in cells)
            if not published or any(cell.value is not None for cell in cells):
                header.append(name)
                texts.append([self._text(cell) for cell in cells])
            if published:
                header.append(f"{name} (paper)")
                texts.append([self._number(cell.paper, cell.digits) for cell in cells])
        return [header, *map(list, zip(*texts, strict=True))]

    def _text(self, cell: Cell) -> str:
        text = self._number(cell.value, cell.digits) + cell.marks
        if cell.interval is not None:
            low, high = cell.interval
            text += f" [{self._number(low, cell.digits)}, {self._number(high, cell.digits)}]"
        return text

    def _number(self, value: float | int | str | None, digits: int | None) -> str:
        if value is None:
            return "–"
        return f"{value:.{self.digits if digits is None else digits}f}" if isinstance(value, float) else str(value)


def metrics_table(
    reports: Mapping[str, MetricsReport],
    measures: Sequence[str],
    *,
    baseline: str | None = None,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    recorded: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    intervals: bool = True,
    scale: float = 1.0,
    digits: int = 4,
    title: str = "",
    alpha: float = 0.05,
    samples: int = 10_000,
    seed: int = 0,
) -> Table:
    """Rankers by measures, with bootstrap 95 % intervals and query counts.

    `baseline` names the row the others are tested against: † marks a paired randomisation test that rejects equality at
    `alpha` after Holm's correction over all tests of the table. `paper` is row -> measure -> the published number, on
    the table's scale; a row that is only there is shown without numbers of ours. `scale` multiplies our values (100 for
    percentages), but not those of `recorded`: name -> row -> values by list, whose mean and deviation (or median) are
    columns too.
    """
    if not reports:
        raise UserError("a table needs at least one row")
    names = [str(parse_measure(measure)) for measure in measures]
    recorded = recorded or {}
    published = {row: canonical_names(numbers, recorded) for row, numbers in (paper or {}).items()}
    tested: dict[tuple[str, str], float] = {}
    if baseline is not None:
        if baseline not in reports:
            raise UserError(f"baseline {baseline!r} is not a row of the table; rows: {', '.join(reports)}")
        pairs = [(row, measure) for row in reports if row != baseline for measure in names]
        raw = [
            compare(reports[row].values(m), reports[baseline].values(m), samples=samples, seed=seed).p_value
            for row, m in pairs
        ]
        tested = dict(zip(pairs, holm_correction(raw).tolist(), strict=True))

    def cell(row: str, measure: str) -> Cell:
        if row not in reports:
            return Cell(None, paper=published[row].get(measure))
        report = reports[row]
        interval = None
        if intervals:
            low, high = bootstrap_interval(list(report.values(measure).values()), samples=samples, seed=seed)
            interval = (low * scale, high * scale)
        p_value = tested.get((row, measure))
        marks = "†" if p_value is not None and p_value <= alpha else ""
        return Cell(report.means[measure] * scale, interval, published.get(row, {}).get(measure), p_value, marks)

    def counts(row: str) -> tuple[Cell, Cell]:
        found = reports[row].counts if row in reports else None
        return (Cell(None), Cell(None)) if found is None else (Cell(found.averaged), Cell(found.missing))

    def extra(row: str) -> list[Cell]:
        numbers = published.get(row, {})
        return [
            cell
            for name, values in recorded.items()
            for cell in recorded_cells(name, values.get(row, ()), numbers.get(name))
        ]

    shown = {*names, *recorded}
    known = [row for row in published if row not in reports and shown & published[row].keys()]
    rows = tuple((row, (*(cell(row, m) for m in names), *extra(row), *counts(row))) for row in (*reports, *known))
    columns = (*names, *(column for name in recorded for column in recorded_columns(name)), "queries", "missing")
    notes = []
    if intervals:
        notes.append(f"In brackets: 95 % bootstrap interval of the mean ({samples} samples, seed {seed}).")
    if tested:
        notes.append(
            f"† differs from {baseline} (paired randomisation test, p <= {alpha} after Holm's correction over "
            f"{len(tested)} tests)."
        )
    return Table(columns, rows, title=title, notes=tuple(notes), digits=digits)


def recorded_cells(name: str, values: Sequence[float], paper: float | None = None) -> tuple[Cell, ...]:
    """Cells under `recorded_columns(name)`; a paper's number is that of the first."""
    first, *rest = recorded_numbers(name, values)
    return Cell(first, paper=paper, digits=3), *(Cell(number, digits=3) for number in rest)


def canonical_names(numbers: Mapping[str, float], recorded: Container[str] = ()) -> dict[str, float]:
    """Numbers by the canonical names of measures; those of `recorded` keep theirs."""
    return {name if name in recorded else str(parse_measure(name)): float(v) for name, v in numbers.items()}


def _csv_parts(cell: Cell) -> dict[str, float | int | str | None]:
    low, high = cell.interval if cell.interval is not None else (None, None)
    return {"value": cell.value, "low": low, "high": high, "p": cell.p_value, "paper": cell.paper}


def _markdown(text: str) -> str:
    return re.sub(r"\s*\n\s*", "<br>", _MARKDOWN.sub(r"\\\1", text))


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return rf"{{{escaped}}}" if escaped.startswith("[") else escaped


def _html(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")
