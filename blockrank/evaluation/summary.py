"""One table over several collections (or depths): a row for each with each measure, a column for each ranker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from blockrank.evaluation.held_out import HeldOut
from blockrank.evaluation.metrics import MetricsReport, parse_measure
from blockrank.evaluation.recorded import recorded_columns, recorded_values
from blockrank.evaluation.significance import bootstrap_interval, bootstrap_means, compare, holm_correction
from blockrank.evaluation.tables import Cell, Table, canonical_names, recorded_cells

SAMPLES = 10_000


def summary_table(
    cases: Mapping[str, HeldOut],
    baseline: str,
    *,
    published: Mapping[str, Mapping[str, Mapping[str, float]]],
    recorded: Sequence[str] = (),
    average: Mapping[str, Mapping[str, float]] | None = None,
    scale: float = 1.0,
    seed: int = 0,
    samples: int = SAMPLES,
) -> Table:
    """Collections by rankers, with bootstrap 95 % intervals.

    † marks what differs from `baseline` on a collection, after Holm's correction over all tests of the table.
    `published`: collection -> row -> measure -> a paper's number, on the table's scale. `recorded`: rows of what was
    recorded of each list. `average` adds the mean over collections (each counts the same, whatever its queries) of the
    rankers that have all of them, and has the paper's: row -> measure -> number. Its interval resamples the queries of
    each collection.
    """
    papers = {
        case: {row: canonical_names(numbers, recorded) for row, numbers in rows.items()}
        for case, rows in published.items()
    }
    overall = {row: canonical_names(numbers, recorded) for row, numbers in (average or {}).items()}
    rankers = list(dict.fromkeys(row for held_out in cases.values() for row in held_out.reports))
    others = [row for rows in (*papers.values(), overall) for row in rows]
    columns = list(dict.fromkeys([*rankers, *others]))
    measures = {case: [str(parse_measure(m)) for m in held_out.config.measures] for case, held_out in cases.items()}
    names = list(dict.fromkeys(name for found in measures.values() for name in found))
    tested = _tests(cases, measures, baseline, samples, seed)

    def label(case: str, measure: str) -> str:
        return case if len(names) == 1 and not recorded else f"{case} {measure}"

    def cell(case: str, row: str, measure: str) -> Cell:
        paper = papers[case].get(row, {}).get(measure)
        report = cases[case].reports.get(row)
        if report is None:
            return Cell(None, paper=paper)
        low, high = bootstrap_interval(_values(report, measure), samples=samples, seed=seed)
        p_value = tested.get((case, row, measure))
        marks = "†" if p_value is not None and p_value <= 0.05 else ""
        return Cell(report.means[measure] * scale, (low * scale, high * scale), paper, p_value, marks)

    rows = [
        (label(case, measure), (*(cell(case, row, measure) for row in columns), Cell(_queries(cases[case]))))
        for case, found in measures.items()
        for measure in found
    ]
    rows += [
        (f"{case} {column}", (*cells, Cell(None)))
        for case, held_out in cases.items()
        for name in recorded
        for column, cells in _recorded_rows(held_out, columns, name, papers[case])
    ]
    if average is not None:
        for measure in names:
            with_it = [case for case, found in measures.items() if measure in found]
            cells = []
            for row in columns:
                reports = [cases[case].reports.get(row) for case in with_it]
                cells.append(_average(reports, measure, overall.get(row, {}).get(measure), scale, samples, seed))
            rows.append((label("average", measure), (*cells, Cell(None))))
    notes = [f"In brackets: 95 % bootstrap interval of the mean ({samples} samples, seed {seed})."]
    if tested:
        notes.append(
            f"† differs from {baseline} (paired randomisation test, p <= 0.05 after Holm's correction over "
            f"{len(tested)} tests)."
        )
    lacking = [
        f"{row} on {case}: {report.counts.missing}"
        for case, held_out in cases.items()
        for row, report in held_out.reports.items()
        if report.counts.missing
    ]
    if lacking:
        fate = {report.missing for held_out in cases.values() for report in held_out.reports.values()}
        notes.append(f"Judged queries without a list ({', '.join(sorted(fate))}): {'; '.join(lacking)}.")
    title = names[0] if len(names) == 1 and not recorded else ""
    return Table(
        (*columns, "queries"),
        tuple(rows),
        title=title,
        row_header="collection",
        notes=tuple(notes),
        digits=1 if scale == 100 else 4,
    )


def _values(report: MetricsReport, measure: str) -> list[float]:
    return list(report.values(measure).values())


def _queries(held_out: HeldOut) -> int:
    return max((report.counts.averaged for report in held_out.reports.values()), default=0)


def _tests(
    cases: Mapping[str, HeldOut], measures: Mapping[str, list[str]], baseline: str, samples: int, seed: int
) -> dict[tuple[str, str, str], float]:
    """(collection, row, measure) -> p-value of the paired test against `baseline`, after Holm's correction over all."""
    raw = {
        (case, row, measure): compare(
            report.values(measure), held_out.reports[baseline].values(measure), samples=samples, seed=seed
        ).p_value
        for case, held_out in cases.items()
        if baseline in held_out.reports
        for row, report in held_out.reports.items()
        if row != baseline
        for measure in measures[case]
    }
    return dict(zip(raw, holm_correction(list(raw.values())).tolist(), strict=True))


def _recorded_rows(
    held_out: HeldOut, columns: Sequence[str], name: str, papers: Mapping[str, Mapping[str, float]]
) -> list[tuple[str, tuple[Cell, ...]]]:
    """For each of `recorded_columns(name)` its cells by ranker."""
    by_ranker = [
        recorded_cells(name, recorded_values(held_out.records.get(row, {}), name), papers.get(row, {}).get(name))
        for row in columns
    ]
    return list(zip(recorded_columns(name), zip(*by_ranker, strict=True), strict=True))


def _average(
    reports: list[MetricsReport | None], measure: str, paper: float | None, scale: float, samples: int, seed: int
) -> Cell:
    found = [report for report in reports if report is not None]
    if len(found) < len(reports) or not found:
        return Cell(None, paper=paper)
    means = np.mean(
        [bootstrap_means(_values(r, measure), samples=samples, seed=(seed, i)) for i, r in enumerate(found)], axis=0
    )
    low, high = np.quantile(means, [0.025, 0.975])
    value = float(np.mean([report.means[measure] for report in found]))
    return Cell(value * scale, (float(low) * scale, float(high) * scale), paper)
