"""One table, four formats: the numbers, the marks and the escaping."""

from __future__ import annotations

import csv
import io
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrank.errors import UserError
from blockrank.evaluation.metrics import evaluate
from blockrank.evaluation.tables import Cell, Table, metrics_table

TABLE = Table(
    columns=("nDCG@10", "queries"),
    rows=(
        ("BM25", (Cell(0.50577, interval=(0.44, 0.571)), Cell(43))),
        ("ours_v2 50% & <b>", (Cell(0.75, interval=(0.7, 0.8), paper=0.74, p_value=0.012, marks="†"), Cell(43))),
    ),
    title="DL19 | test",
    notes=("† differs from BM25.",),
)


class Cells(HTMLParser):
    """The text of each table row, entities decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_markdown() -> None:
    assert TABLE.to_markdown() == (
        "**DL19 \\| test**\n\n"
        "| ranker | nDCG@10 | nDCG@10 (paper) | queries |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| BM25 | 0.5058 \\[0.4400, 0.5710\\] | – | 43 |\n"
        "| ours\\_v2 50% \\& \\<b\\> | 0.7500† \\[0.7000, 0.8000\\] | 0.7400 | 43 |\n"
        "\n† differs from BM25.\n"
    )


def test_latex() -> None:
    text = TABLE.to_latex()
    assert r"\caption{DL19 \textbar{} test}" in text
    assert r"\begin{tabular}{lrrr}" in text
    assert r"BM25 & 0.5058 [0.4400, 0.5710] & -- & 43 \\" in text
    name = r"ours\_v2 50\% \& \textless{}b\textgreater{}"
    assert name + r" & 0.7500$^{\dagger}$ [0.7000, 0.8000] & 0.7400 & 43 \\" in text


def test_latex_escapes_every_special_character() -> None:
    table = Table(("x",), ((r"[\&%$#_{}~^]", (Cell(1),)),))
    expected = r"{[\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}]} & 1 \\"
    assert expected in table.to_latex()


def test_html() -> None:
    text = TABLE.to_html()
    assert "ours_v2 50% &amp; &lt;b&gt;" in text
    assert "<caption>DL19 | test</caption>" in text
    parser = Cells()
    parser.feed(text)
    assert parser.rows == [
        ["ranker", "nDCG@10", "nDCG@10 (paper)", "queries"],
        ["BM25", "0.5058 [0.4400, 0.5710]", "–", "43"],
        ["ours_v2 50% & <b>", "0.7500† [0.7000, 0.8000]", "0.7400", "43"],
    ]


def test_csv_has_a_column_for_each_number_in_full_precision() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.to_csv())))
    assert rows == [
        ["ranker", "nDCG@10", "nDCG@10 low", "nDCG@10 high", "nDCG@10 p", "nDCG@10 paper", "queries"],
        ["BM25", "0.50577", "0.44", "0.571", "", "", "43"],
        ["ours_v2 50% & <b>", "0.75", "0.7", "0.8", "0.012", "0.74", "43"],
    ]


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_names_survive_csv_and_html(name: str) -> None:
    table = Table(("x",), ((name, (Cell(0.5),)),))
    assert list(csv.reader(io.StringIO(table.to_csv())))[1] == [name, "0.5"]
    parser = Cells()
    parser.feed(table.to_html())
    assert parser.rows[1][0] == name
    assert len(parser.rows[1]) == 2


@given(st.text("ab|\\`*_<>\n", max_size=8))
def test_a_name_cannot_break_a_markdown_row(name: str) -> None:
    lines = Table(("x",), ((name, (Cell(0.5),)),)).to_markdown().splitlines()
    assert len(lines) == 3
    bars = [
        i for i, c in enumerate(lines[2]) if c == "|" and (len(lines[2][:i]) - len(lines[2][:i].rstrip("\\"))) % 2 == 0
    ]
    assert len(bars) == 3


@pytest.mark.parametrize(("suffix", "form"), [("md", "markdown"), ("tex", "latex"), ("csv", "csv"), ("html", "html")])
def test_write_picks_the_format_by_suffix(tmp_path: Path, suffix: str, form: str) -> None:
    path = tmp_path / "deep" / f"table.{suffix}"
    TABLE.write(path)
    assert path.read_text(encoding="utf-8") == TABLE.render(form)  # type: ignore[arg-type]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_metrics_table() -> None:
    queries = [f"q{i}" for i in range(12)]
    qrels = {query: {"good": 1, "bad": 0} for query in queries}
    worse = evaluate({query: {"bad": 2.0, "good": 1.0} for query in queries}, qrels, ["RR@10", "P@1"])
    better = evaluate({query: {"good": 2.0, "bad": 1.0} for query in queries[:11]}, qrels, ["RR@10", "P@1"])
    table = metrics_table(
        {"BM25": worse, "ours": better},
        ["MRR@10", "P@1"],
        baseline="BM25",
        paper={"ours": {"MRR@10": 42.0}},
        scale=100,
        digits=1,
        samples=500,
    )
    assert table.columns == ("RR@10", "P@1", "queries", "missing")
    (first, baseline), (second, ours) = table.rows
    assert (first, second) == ("BM25", "ours")
    assert [cell.value for cell in baseline] == [50.0, 0.0, 12, 0]
    assert [cell.value for cell in ours] == pytest.approx([100 * 11 / 12, 100 * 11 / 12, 12, 1])
    assert baseline[0].interval == (50.0, 50.0)
    assert (ours[0].paper, ours[1].paper) == (42.0, None)
    assert ours[0].p_value == pytest.approx(2 * 13 / 2**12)
    assert ours[1].p_value == pytest.approx(2 * (2 / 2**11))
    assert [cell.marks for cell in ours] == ["†", "†", "", ""]
    assert [cell.marks for cell in baseline] == ["", "", "", ""]
    assert "| BM25 | 50.0 \\[50.0, 50.0\\] | – | 0.0 \\[0.0, 0.0\\] | 12 | 0 |" in table.to_markdown()
    assert "after Holm's correction over 2 tests" in table.notes[1]


def test_equal_rankers_get_no_mark() -> None:
    report = evaluate({"q": {"a": 1.0}}, {"q": {"a": 1}}, ["P@1"])
    table = metrics_table({"x": report, "y": report}, ["P@1"], baseline="x", intervals=False)
    assert table.rows[1][1][0] == Cell(1.0, None, None, 1.0, "")


def test_bad_input() -> None:
    report = evaluate({"q": {"a": 1.0}}, {"q": {"a": 1}}, ["P@1"])
    with pytest.raises(UserError, match="baseline 'z' is not a row"):
        metrics_table({"x": report}, ["P@1"], baseline="z")
    with pytest.raises(UserError, match="at least one row"):
        metrics_table({}, ["P@1"])
    with pytest.raises(UserError, match="1 cells for 2 columns"):
        Table(("a", "b"), (("x", (Cell(1),)),))
    with pytest.raises(UserError, match="unknown table format"):
        TABLE.render("pdf")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"\.pdf"):
        TABLE.write("table.pdf")
