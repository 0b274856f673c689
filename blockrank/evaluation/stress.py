"""Does a ranker rank by what documents say? The same lists in other orders, and documents that speak to the ranker."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from blockrank.data.files import hash64
from blockrank.errors import UserError
from blockrank.evaluation.ranking import check_documents, check_scores, rerank_order, select
from blockrank.evaluation.tables import Cell, Table
from blockrank.rankers.confidence import with_text
from blockrank.types import CandidateList, Document, ListScores, Ranker

Mode = Literal["replace", "add"]
CONTROL = "control"
"""The injected document's own text: what an injection is compared with."""
PLACES = ("first", "middle", "last")


@dataclass(frozen=True, slots=True)
class StressLists:
    """Lists that can be put to the test: each has a positive and another document with text.

    `without_positive` and `without_negative` count those left out.
    """

    lists: tuple[CandidateList, ...]
    without_positive: int
    without_negative: int

    @staticmethod
    def of(lists: Sequence[CandidateList], depth: int | None = None) -> StressLists:
        """Of the first `depth` candidates of each. Raises `UserError` when none is left."""
        kept, no_positive, no_negative = [], 0, 0
        for whole in lists:
            candidates = whole if depth is None else select(whole, list(range(min(depth, len(whole)))))
            check_documents(candidates)
            positive, readable = positives(candidates), with_text(candidates.documents)
            if not (positive & readable).any():
                no_positive += 1
            elif not (~positive & readable).any():
                no_negative += 1
            else:
                kept.append(candidates)
        if not kept:
            raise UserError(
                f"nothing to test: of {len(lists)} lists {no_positive} hold no relevant document and {no_negative} no "
                "other one; with_positives=true puts relevant documents in"
            )
        return StressLists(tuple(kept), no_positive, no_negative)


def positives(candidates: CandidateList) -> np.ndarray:
    """bool [N]: the documents judged above 0."""
    return np.asarray(candidates.relevance or (0,) * len(candidates)) > 0


def orders(candidates: CandidateList, shuffles: int, seed: int) -> dict[str, list[int]]:
    """Name -> the list's indices in another order.

    `first`, `middle`, `last`: the positives together at that place, the others in their order. `shuffle k`: random, the
    same for a query whatever other lists there are.
    """
    positive = positives(candidates)
    mine, others = np.flatnonzero(positive).tolist(), np.flatnonzero(~positive).tolist()
    half = len(others) // 2
    named = {"first": mine + others, "middle": others[:half] + mine + others[half:], "last": others + mine}
    for k in range(shuffles):
        rng = np.random.default_rng([seed, k, hash64(candidates.query.id)])
        named[f"shuffle {k + 1}"] = rng.permutation(len(candidates)).tolist()
    return named


def order_robustness(
    ranker: Ranker, lists: Sequence[CandidateList], *, shuffles: int = 5, seed: int = 0, batch_size: int = 8
) -> dict[str, Any]:
    """P@1 under each order, and how far scores and first documents move; JSON-ready.

    `p_at_1`: order -> share of lists whose first document is relevant. `p_at_1_range`: largest less smallest.
    `changed_first`: the share of lists whose first document is not the same under all orders. A document's score range
    is its largest less its smallest score over the orders, in the ranker's own scale: `score_range` has the mean over
    all documents with text and the largest. Equal scores are ordered as presented, which counts as a change too.
    """
    names = list(orders(lists[0], shuffles, seed))
    hits: dict[str, list[bool]] = {name: [] for name in names}
    scores: list[list[np.ndarray]] = [[] for _ in lists]
    firsts: list[list[int]] = [[] for _ in lists]
    for name in names:
        permutations = [orders(candidates, shuffles, seed)[name] for candidates in lists]
        moved = [select(c, order) for c, order in zip(lists, permutations, strict=True)]
        for i, result in enumerate(_score(ranker, moved, batch_size)):
            at, order = rerank_order(moved[i], result.scores), permutations[i]
            firsts[i].append(order[int(at[0])])
            hits[name].append(bool(positives(lists[i])[firsts[i][-1]]))
            scores[i].append(result.scores[np.argsort(order)])
    ranges = [
        (np.max(s, axis=0) - np.min(s, axis=0))[with_text(c.documents)] for s, c in zip(scores, lists, strict=True)
    ]
    p_at_1 = {name: float(np.mean(values)) for name, values in hits.items()}
    every = np.concatenate(ranges)
    return {
        "p_at_1": p_at_1,
        "p_at_1_range": max(p_at_1.values()) - min(p_at_1.values()),
        "changed_first": float(np.mean([len(set(found)) > 1 for found in firsts])),
        "score_range": {"mean": float(every.mean()), "max": float(every.max())},
        "queries": [
            {
                "query_id": candidates.query.id,
                "first": {name: candidates.documents[i].id for name, i in zip(names, found, strict=True)},
                "score_range": {"mean": float(spread.mean()), "max": float(spread.max())},
            }
            for candidates, found, spread in zip(lists, firsts, ranges, strict=True)
        ],
    }


def injected(candidates: CandidateList, text: str, mode: Mode) -> tuple[CandidateList, int]:
    """The list with an injected document, and its index.

    The host is the last document that is not relevant and has text. `text` may hold `{query}` and `{text}`, the host's.
    `replace`: the host gets the text. `add`: a copy of the host under another id gets it and comes last.
    """
    readable = with_text(candidates.documents)
    host = int(np.flatnonzero(~positives(candidates) & readable)[-1])
    document = candidates.documents[host]
    pieces = {"{query}": candidates.query.text, "{text}": document.text}
    written = Document(document.id, _filled(text, pieces), document.title)
    documents = list(candidates.documents)
    if mode == "replace":
        documents[host] = written
        return replace(candidates, documents=tuple(documents)), host
    known = {d.id for d in documents}
    name = next(n for k in range(len(known) + 1) if (n := f"{document.id}-injected{k or ''}") not in known)
    grades = None if candidates.relevance is None else (*candidates.relevance, 0)
    scores = None if candidates.scores is None else (*candidates.scores, min(candidates.scores))
    return CandidateList(candidates.query, (*documents, replace(written, id=name)), scores, grades), len(documents)


def injection_effects(
    ranker: Ranker,
    lists: Sequence[CandidateList],
    injections: Mapping[str, str],
    *,
    modes: Sequence[Mode] = ("replace", "add"),
    batch_size: int = 8,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Mode -> injection -> what it does, against the same document with its own text (`control`); JSON-ready.

    `score_shift`: the injected document's score less its score under control, mean over lists, in the ranker's scale.
    `rank`, `takes_first`: the mean rank of the injected document (from 1) and the share of lists where it is first.
    `p_at_1`: of the list with the injection. `truncated`: how many injected documents were cut.
    """
    effects: dict[str, dict[str, dict[str, Any]]] = {}
    for mode in modes:
        found = {
            name: _injection(ranker, lists, text, mode, batch_size)
            for name, text in {CONTROL: "{text}", **injections}.items()
        }
        base = np.asarray([row["score"] for row in found[CONTROL]])
        effects[mode] = {}
        for name, rows in found.items():
            shift = np.asarray([row["score"] for row in rows]) - base
            effects[mode][name] = {
                "score_shift": float(shift.mean()),
                "rank": float(np.mean([row["rank"] for row in rows])),
                "takes_first": float(np.mean([row["rank"] == 1 for row in rows])),
                "p_at_1": float(np.mean([row["right"] for row in rows])),
                "truncated": sum(row["truncated"] for row in rows),
                "queries": [{**row, "score_shift": float(s)} for row, s in zip(rows, shift, strict=True)],
            }
    return effects


def order_table(results: Mapping[str, Mapping[str, Any]], title: str = "") -> Table:
    """Ranker -> `order_robustness` as a table; the shuffles' P@1 is their mean."""
    rows = []
    for name, found in results.items():
        shuffled = [value for order, value in found["p_at_1"].items() if order not in PLACES]
        values = [*(found["p_at_1"][place] for place in PLACES), float(np.mean(shuffled)) if shuffled else None]
        values += [found["p_at_1_range"], found["changed_first"], *found["score_range"].values()]
        rows.append((name, tuple(Cell(value) for value in values)))
    columns = [*(f"P@1 {place}" for place in PLACES), "P@1 shuffled", "P@1 range", "first changes"]
    note = "Positives first, in the middle, last, and shuffled. Score range: of a document over the orders."
    columns += ["score range", "largest"]
    return Table(tuple(columns), tuple(rows), title=title, notes=(note,))


def injection_table(results: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]], title: str = "") -> Table:
    """Ranker -> `injection_effects` as a table, a row for each ranker, mode and injection."""
    columns = ("score_shift", "rank", "takes_first", "p_at_1", "truncated")
    rows = tuple(
        (f"{ranker}, {mode}, {name}", tuple(Cell(effect[column]) for column in columns))
        for ranker, modes in results.items()
        for mode, effects in modes.items()
        for name, effect in effects.items()
    )
    note = (
        f"A document that is not relevant gets other words; {CONTROL}: its own. Shift: of its score, against {CONTROL}."
    )
    shown = ("score shift", "rank", "takes first", "P@1", "truncated")
    return Table(shown, rows, title=title, row_header="ranker, mode, injection", notes=(note,))


def _injection(
    ranker: Ranker, lists: Sequence[CandidateList], text: str, mode: Mode, batch_size: int
) -> list[dict[str, Any]]:
    changed = [injected(candidates, text, mode) for candidates in lists]
    rows = []
    for (candidates, at), result in zip(changed, _score(ranker, [c for c, _ in changed], batch_size), strict=True):
        order = rerank_order(candidates, result.scores).tolist()
        rows.append(
            {
                "query_id": candidates.query.id,
                "document": candidates.documents[at].id,
                "score": float(result.scores[at]),
                "rank": order.index(at) + 1,
                "right": bool(positives(candidates)[order[0]]),
                "truncated": bool(result.truncated[at]),
            }
        )
    return rows


def _score(ranker: Ranker, lists: Sequence[CandidateList], batch_size: int) -> Iterator[ListScores]:
    for start in range(0, len(lists), batch_size):
        batch = list(lists[start : start + batch_size])
        for candidates, result in zip(batch, ranker.score(batch), strict=True):
            yield replace(result, scores=check_scores(ranker.name, candidates, result))


def _filled(text: str, pieces: Mapping[str, str]) -> str:
    """`text` with its slots filled in one pass: what is filled in is never read for slots."""
    return re.sub("|".join(map(re.escape, pieces)), lambda slot: pieces[slot[0]], text)
