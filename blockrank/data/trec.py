"""Judgements (qrels) and runs in TREC's formats and their relatives; ids are exact strings from here on."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from blockrank.data.files import as_id, atomic_write, check_id, columns, read_lines
from blockrank.errors import UserError
from blockrank.types import Qrels, Run

log = logging.getLogger(__name__)

_QUERY_WORDS = frozenset(
    {"query-id", "query_id", "queryid", "qid", "query", "topic", "topic-id", "topic_id", "topicid"}
)
_GRADE_WORDS = frozenset({"score", "rel", "relevance", "label", "grade", "judgment", "judgement", "rating"})

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
"""A number in a file: ASCII digits, no underscores, neither nan nor inf, which Python's `float` all reads."""

_LARGEST = 2**53
"""Up to here a float holds every integer."""

LARGEST_GRADE = 1_000_000
"""trec_eval keeps a count of every grade up to the highest, for each query: 8 MB for this one, 16 GB for 2^31."""


def read_qrels(path: str | Path) -> Qrels:
    """Judgements of a file with 4 columns (query, iteration, document, grade) or 3 (query, document, grade).

    Tabs or blanks, with or without a header line (known by its first and last word, never by its position alone),
    blank lines skipped.

    Raises `UserError` with file:line for another number of columns, a line that has 3 columns by tabs but 4 by blanks,
    a grade that is no integer within `LARGEST_GRADE`, or two different grades of one pair.
    """
    qrels: Qrels = {}
    allowed: tuple[int, ...] = (3, 4)
    first = True
    for number, text in read_lines(path):
        where = f"{path}:{number}"
        fields = columns(text, allowed, where, "query, [iteration,] document, grade")
        allowed = (len(fields),)
        header, first = first and _is_header(fields), False
        if header:
            continue
        query, document, grade = fields[0], fields[-2], _grade(fields[-1], where)
        known = qrels.setdefault(query, {}).setdefault(document, grade)
        if known != grade:
            raise UserError(f"{where}: query {query!r}, document {document!r} is judged {grade}, but {known} above")
    return qrels


def read_run(path: str | Path, depth: int | None = None) -> Run:
    """A run of 6 columns (query, Q0, document, rank, score, tag) or MS MARCO's 3 (query, document, rank).

    With 3 columns the score is minus the rank. Keeps file order, and of each query its `depth` best lines (None: all).

    Raises `UserError` with file:line for a broken line, a score that is not finite, or a document a query lists twice.
    """
    run: Run = {}
    ids: dict[str, str] = {}
    allowed: tuple[int, ...] = (3, 6)
    for number, text in read_lines(path):
        where = f"{path}:{number}"
        fields = columns(text, allowed, where, "query Q0 document rank score tag, or query document rank")
        allowed = (len(fields),)
        query = fields[0]
        if len(fields) == 6:
            document, score = fields[2], _score(fields[4], where)
        else:
            document, score = fields[1], -float(_rank(fields[2], where))
        ranking = run.setdefault(query, {})
        document = ids.setdefault(document, document)
        if document in ranking:
            raise UserError(f"{where}: document {document!r} is listed twice for query {query!r}")
        ranking[document] = score
    return run if depth is None else {query: dict(ranked(ranking)[:depth]) for query, ranking in run.items()}


def write_run(path: str | Path, run: Run, tag: str, ties: Literal["document", "input"] = "document") -> int:
    """Writes `run` in TREC's 6 columns, atomically, and returns how many documents were tied with the one before them.

    Documents go by score, highest first. Ties go by document id, last first, as trec_eval breaks them; with
    `ties="input"` they keep the run's own order. Scores are written strictly decreasing in single precision (a tie is
    lowered by the smallest step), so every reader finds the same order.

    Raises `UserError` naming query and document for a score that is not finite, or an id that cannot stand in a column.
    """
    run = as_run(run)
    ids = itertools.chain(run, *run.values(), [check_id(tag, "tag")])
    return write_rankings(path, run.items(), tag, ties, blanks=any(" " in name for name in ids))


def write_rankings(
    path: str | Path,
    rankings: Iterable[tuple[str, Mapping[str, float]]],
    tag: str,
    ties: Literal["document", "input"] = "document",
    *,
    blanks: bool = False,
) -> int:
    """`write_run` of (query id, document id -> score) pairs that need not be in memory together.

    `blanks`: some id holds a blank, so columns are parted by tabs.
    """
    tied, separator = 0, "\t" if blanks else " "
    with atomic_write(Path(path)) as file:
        for query, ranking in rankings:
            written, ties_here = as_written(query, ranking, ties)
            tied += ties_here
            for rank, (document, score) in enumerate(written.items(), start=1):
                line = [query, "Q0", document, str(rank), f"{score:.9g}", tag]
                if any(not field or any(c in field for c in "\t\r\n") or separator in field for field in line):
                    what = f"query {query!r}, document {document!r}, tag {tag!r}"
                    raise UserError(f"{path}: {what}: an id or tag is empty or holds a tab or a line end")
                file.write(check_id(separator.join(line), str(path)).encode() + b"\n")
    return tied


def as_written(
    query: str, ranking: Mapping[str, float], ties: Literal["document", "input"]
) -> tuple[dict[str, float], int]:
    """A ranking as files hold it, best first (`write_run`), each score the number that is read back; and its ties.

    Raises `UserError` for a score that is not finite.
    """
    ordered = ranked(ranking, ties)
    for document, score in ordered:
        if not math.isfinite(score) or abs(score) > float(np.finfo(np.float32).max):
            raise UserError(f"query {query!r}, document {document!r}: the score {score} cannot be written")
    tied = sum(a[1] == b[1] for a, b in itertools.pairwise(ordered))
    scores = strictly_decreasing(np.array([score for _, score in ordered], np.float32))
    return {document: float(f"{s:.9g}") for (document, _), s in zip(ordered, scores, strict=True)}, tied


def ranked(ranking: Mapping[str, float], ties: Literal["document", "input"] = "input") -> list[tuple[str, float]]:
    """(document id, score) by score, highest first; ties by document id descending, as trec_eval, or in input order."""
    items = sorted(ranking.items(), reverse=True) if ties == "document" else ranking.items()
    return sorted(items, key=lambda item: -item[1])


def as_run(run: Mapping[Any, Mapping[Any, Any]]) -> Run:
    """A run with str ids and float scores, from one with int ids, NumPy scalars and the like.

    Raises `UserError` naming the query for anything else, texts of numbers included.
    """
    return {
        as_id(_plain(q), "run"): {
            as_id(_plain(d), f"run, query {q!r}"): _as_score(s, f"run, query {q!r}, document {d!r}")
            for d, s in as_mapping(ranking, f"run, query {q!r}").items()
        }
        for q, ranking in as_mapping(run, "run").items()
    }


def as_mapping(value: Any, where: str) -> Mapping[Any, Any]:
    """`value` when it is a mapping, else a `UserError`; runs and qrels are dicts of dicts."""
    if isinstance(value, Mapping):
        return value
    raise UserError(f"{where}: expected a dict by id, got {type(value).__name__}")


def _as_score(value: Any, where: str) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"{where}: the score {value!r:.80} is not a number")


def check_overlap(left: Iterable[str], right: Iterable[str], left_name: str, right_name: str, what: str) -> None:
    """Raises `UserError` with sample ids of both sides when both hold ids and share none.

    Warns of ids that only one side has, with their number and a sample.
    """
    ours, theirs = dict.fromkeys(left), dict.fromkeys(right)
    if ours and theirs and ours.keys().isdisjoint(theirs):
        raise UserError(
            f"no {what} id of {left_name} is in {right_name}: {left_name} has {sample_ids(list(ours))}, "
            f"{right_name} has {sample_ids(list(theirs))}"
        )
    for ids, name, others, other_name in ((ours, left_name, theirs, right_name), (theirs, right_name, ours, left_name)):
        alone = [i for i in ids if i not in others]
        if alone:
            log.warning(
                "%d of %d %s ids of %s are not in %s: %s",
                *(len(alone), len(ids), what, name, other_name, sample_ids(alone)),
            )


def strictly_decreasing(scores: np.ndarray) -> np.ndarray:
    """float32 [n] finite scores in ranked order, each moved by the least that makes it smaller than the one before."""
    values = np.asarray(scores, dtype=np.float32).copy()
    for i in range(1, len(values)):
        if values[i] >= values[i - 1]:
            values[i] = _next_below(values[i - 1])
    for i in range(len(values) - 2, -1, -1):
        if values[i] > values[i + 1]:
            break
        values[i] = np.nextafter(values[i + 1], np.float32(np.inf))
    return values


def _next_below(value: np.float32) -> np.float32:
    """The next smaller finite float32, at least 1e-30 away: readers may flush subnormal steps to 0."""
    return min(np.nextafter(value, np.finfo(np.float32).min), np.float32(value - np.float32(1e-30)))


def _is_header(fields: list[str]) -> bool:
    """Whether a first line names columns: its first field is a word for queries and its last one for grades."""
    first, last = (field.strip('" ').lower() for field in (fields[0], fields[-1]))
    return first in _QUERY_WORDS and last in _GRADE_WORDS


def _grade(text: str, where: str) -> int:
    value = _number(text)
    if not value.is_integer():
        raise UserError(f"{where}: a grade must be an integer, got {text!r:.80}")
    return check_grade(int(value), where)


def check_grade(grade: int, where: str) -> int:
    """`grade`, unless it lies beyond `LARGEST_GRADE` on either side (`UserError`)."""
    if abs(grade) > LARGEST_GRADE:
        raise UserError(f"{where}: grades go from -{LARGEST_GRADE} to {LARGEST_GRADE}; map larger ones")
    return grade


def _score(text: str, where: str) -> float:
    value = _number(text)
    if not math.isfinite(value):
        raise UserError(f"{where}: a score must be a finite number, got {text!r:.80}")
    return value


def _rank(text: str, where: str) -> int:
    value = _number(text)
    if not (text.strip(" ").isdigit() and value <= _LARGEST):
        raise UserError(f"{where}: a rank must be a whole number, got {text!r:.80}")
    return int(value)


def _number(text: str) -> float:
    """The value of `_NUMBER`, blanks around it or not; NaN for anything else, infinity for what is too large."""
    return float(text) if _NUMBER.fullmatch(text.strip(" ")) else math.nan


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def sample_ids(ids: Sequence[str], count: int = 3) -> str:
    """The first ids, quoted, for a message."""
    return ", ".join(map(repr, ids[:count])) + (", …" if len(ids) > count else "")
