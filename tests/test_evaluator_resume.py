"""An evaluation that stops: it continues where it was, and never mixes scores of different kinds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_evaluator import FunctionRanker, by_length, candidate_list, lists_of

from blockrank.errors import UserError
from blockrank.evaluation.evaluator import Evaluator
from blockrank.types import CandidateList, ListScores


class StoppingRanker(FunctionRanker):
    """Raises in its n-th call."""

    def __init__(self, calls: int) -> None:
        super().__init__(by_length)
        self.left = calls

    def score(self, lists: list[CandidateList]) -> list[ListScores]:
        if self.left == 0:
            raise RuntimeError("stopped")
        self.left -= 1
        return super().score(lists)


def outputs(folder: Path) -> dict[str, Any]:
    """The files' contents without what time and place decide."""
    results = json.loads((folder / "results.json").read_text())
    rows = [json.loads(line) for line in (folder / "per_query.jsonl").read_text().splitlines()]
    results["counts"].pop("resumed_queries")
    return {
        "run": (folder / "run.trec").read_text(),
        "table": (folder / "table.md").read_text(),
        "metrics": results["metrics"],
        "counts": results["counts"],
        "per_query": [{key: value for key, value in row.items() if key != "seconds"} for row in rows],
    }


@pytest.mark.parametrize("torn", [b"", b'{"query": "q9", "scores": [1.0, 2.', b"\xff\xfe"])
def test_a_stopped_evaluation_continues(tmp_path: Path, torn: bytes) -> None:
    lists = lists_of(10)
    with pytest.raises(RuntimeError, match="stopped"):
        Evaluator(StoppingRanker(2), lists, tmp_path / "a", batch_size=3).run()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["scores.jsonl"]
    with (tmp_path / "a" / "scores.jsonl").open("ab") as file:
        file.write(torn)
    ranker = FunctionRanker(by_length)
    result = Evaluator(ranker, lists, tmp_path / "a", batch_size=2).run()
    assert ranker.calls == [["q6", "q7"], ["q8", "q9"]]
    assert result.counts["resumed_queries"] == 6
    Evaluator(FunctionRanker(by_length), lists, tmp_path / "b", batch_size=3).run()
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b")
    assert len((tmp_path / "a" / "scores.jsonl").read_text().splitlines()) == 11


class SensitiveRanker(FunctionRanker):
    """Scores that move with the batch they are computed in, as those of matrix products do in the last bit."""

    def score(self, lists: list[CandidateList]) -> list[ListScores]:
        mates = sum(len(document.text) for candidates in lists for document in candidates.documents)
        return [replace(result, scores=result.scores + np.float32(mates / 1024)) for result in super().score(lists)]


@pytest.mark.parametrize("kept", range(10))
def test_a_resumed_run_equals_an_unbroken_one_to_the_byte(tmp_path: Path, kept: int) -> None:
    """Whatever the kill left of the journal, also a part of a batch; an empty list shifts no batch."""
    lists = [candidate_list("empty", []), *lists_of(9)]
    whole = Evaluator(SensitiveRanker(by_length), lists, tmp_path / "a", batch_size=4).run()
    entries = (tmp_path / "a" / "scores.jsonl").read_text().splitlines()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "scores.jsonl").write_text("".join(line + "\n" for line in entries[: 1 + kept]))
    ranker = SensitiveRanker(by_length)
    resumed = Evaluator(ranker, lists, tmp_path / "b", batch_size=4).run()
    assert resumed.counts["resumed_queries"] == kept
    assert sum(map(len, ranker.calls)) == (0 if kept == 9 else 9 - kept // 4 * 4)
    assert resumed.run == whole.run
    assert outputs(tmp_path / "b") == outputs(tmp_path / "a")
    journals = [(tmp_path / folder / "scores.jsonl").read_text().splitlines() for folder in "ab"]
    first, second = ([json.loads(line).get("scores") for line in journal] for journal in journals)
    assert first == second


def test_a_finished_evaluation_scores_nothing_again(tmp_path: Path) -> None:
    lists = lists_of(5)
    Evaluator(FunctionRanker(by_length), lists, tmp_path).run()
    before = outputs(tmp_path)
    ranker = FunctionRanker(by_length)
    Evaluator(ranker, lists, tmp_path).run()
    assert ranker.calls == []
    assert outputs(tmp_path) == before


CHILD = """
import sys, time
sys.path.insert(0, {tests!r})
from test_evaluator import FunctionRanker, by_length, lists_of
from blockrank.evaluation.evaluator import Evaluator

def slow(candidates, index):
    time.sleep(0.01)
    return by_length(candidates, index)

Evaluator(FunctionRanker(slow), lists_of(40), sys.argv[1], batch_size=2).run()
"""


def test_a_killed_evaluation_continues(tmp_path: Path) -> None:
    script = textwrap.dedent(CHILD.format(tests=str(Path(__file__).parent)))
    journal = tmp_path / "killed" / "scores.jsonl"
    child = subprocess.Popen([sys.executable, "-c", script, str(journal.parent)])
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not journal.exists() or journal.read_bytes().count(b"\n") < 5):
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    done = journal.read_bytes().count(b"\n") - 1
    assert 4 <= done < 40
    ranker = FunctionRanker(by_length)
    Evaluator(ranker, lists_of(40), journal.parent, batch_size=2).run()
    assert sum(map(len, ranker.calls)) == 40 - done
    Evaluator(FunctionRanker(by_length), lists_of(40), tmp_path / "whole", batch_size=2).run()
    assert outputs(journal.parent) == outputs(tmp_path / "whole")


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    lists = lists_of(3)
    Evaluator(FunctionRanker(by_length), lists, tmp_path, config={"checkpoint": "a", "dtype": "f32"}).run()
    changed = {"checkpoint": "b", "dtype": "f32"}
    with pytest.raises(UserError, match=r"\(changed: checkpoint: .* -> .*\).*another output folder.*overwrite=true"):
        Evaluator(FunctionRanker(by_length), lists, tmp_path, config=changed).run()
    with pytest.raises(UserError, match=r"changed: depth: .* -> .*; ranker\.name: "):
        Evaluator(
            FunctionRanker(by_length, "b"), lists, tmp_path, identity={"checkpoint": "a", "dtype": "f32"}, depth=2
        ).run()
    ranker = FunctionRanker(lambda c, i: -by_length(c, i))
    Evaluator(ranker, lists, tmp_path, config=changed, overwrite=True).run()
    assert ranker.calls == [["q0", "q1", "q2"]]
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == 4
    assert json.loads((tmp_path / "results.json").read_text())["config"] == changed


def test_identity_decides_when_it_is_given(tmp_path: Path) -> None:
    lists = lists_of(3)
    for batch_size in (1, 2):
        config = {"batch_size": batch_size, "checkpoint": "a"}
        ranker = FunctionRanker(by_length)
        Evaluator(ranker, lists, tmp_path, batch_size, config=config, identity={"checkpoint": "a"}).run()
    assert ranker.calls == []


def test_changed_candidates_are_refused(tmp_path: Path) -> None:
    Evaluator(FunctionRanker(by_length), [candidate_list("q", ["a", "b"])], tmp_path).run()
    with pytest.raises(UserError, match=r"scores\.jsonl: the candidates of query 'q' have changed"):
        Evaluator(FunctionRanker(by_length), [candidate_list("q", ["a", "B"])], tmp_path).run()


def test_a_damaged_journal_names_the_line(tmp_path: Path) -> None:
    Evaluator(FunctionRanker(by_length), lists_of(3), tmp_path).run()
    path = tmp_path / "scores.jsonl"
    whole = path.read_text().splitlines()
    path.write_text("\n".join([whole[0], "{broken", *whole[2:]]) + "\n")
    with pytest.raises(UserError, match=r"scores\.jsonl:2: damaged line"):
        Evaluator(FunctionRanker(by_length), lists_of(3), tmp_path).run()
    path.write_text("\n".join([*whole, whole[1]]) + "\n")
    with pytest.raises(UserError, match=r"scores\.jsonl:5: query 'q0' occurs twice"):
        Evaluator(FunctionRanker(by_length), lists_of(3), tmp_path).run()
    path.write_text("other\n")
    with pytest.raises(UserError, match=r"scores\.jsonl:1: not a scores journal"):
        Evaluator(FunctionRanker(by_length), lists_of(3), tmp_path).run()


def test_two_evaluations_cannot_share_a_folder(tmp_path: Path) -> None:
    def nested(candidates: CandidateList, index: int) -> float:
        with pytest.raises(UserError, match="another evaluation is writing here"):
            Evaluator(FunctionRanker(by_length), lists_of(1), tmp_path).run()
        return by_length(candidates, index)

    result = Evaluator(FunctionRanker(nested), lists_of(1), tmp_path).run()
    assert result.counts["documents"] == 4


def test_results_without_a_journal_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match=r"results\.json exists without scores\.jsonl"):
        Evaluator(FunctionRanker(by_length), lists_of(1), tmp_path).run()
    assert (tmp_path / "results.json").read_text() == "{}"
