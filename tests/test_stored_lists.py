"""Lists in shards: what the run holds, read one by one; made by several processes; the same bytes after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_candidates import Small

from blockrank.config import build, compose
from blockrank.data.candidates import candidate_lists
from blockrank.data.documents import InMemoryDocuments
from blockrank.data.loader import training_iterator
from blockrank.data.sampling import TrainingLists
from blockrank.data.shards import Part
from blockrank.data.stored_lists import StoredLists
from blockrank.data.trec import read_run
from blockrank.errors import UserError
from blockrank.prepare import PrepareConfig, write_out
from blockrank.retrieval import write
from blockrank.retrieval.embeddings import Embeddings, embed_to_disk
from blockrank.retrieval.first_stage import first_stage
from blockrank.retrieval.settings import EncoderSettings
from blockrank.retrieval.write import Candidates, write_candidates, write_lists
from blockrank.types import CandidateList, Document

WORDS = ["red", "green", "blue", "apple", "pear", "plum", "sea", "sky"]


@pytest.fixture(autouse=True)
def small_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(write, "LISTS_PER_SHARD", 3)


def collection(queries: int = 8) -> Small:
    rng = np.random.default_rng(0)
    texts = {f"d {i:02}": " ".join(rng.choice(WORDS, 6)) for i in range(40)}
    asked = {f"q{i}": f"{WORDS[i % 8]} {WORDS[i * 3 % 8]}" for i in range(queries)} | {"blank": " ", "none": "absent"}
    return Small(texts, asked, {q: {f"d {i:02}": 1} for i, q in enumerate(asked)})


def candidates(part: str = "0/1", depth: int = 9, among: Small | None = None) -> Candidates:
    chosen = collection() if among is None else among
    return Candidates(chosen, "test", "bm25", depth, EncoderSettings(), {"depth": depth}, Part.parse(part))


def files(folder: Path) -> dict[str, bytes]:
    """All, but for the unfinished first write of an index, which another host's might be."""
    found = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".index.json.")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_lists_hold_what_the_run_holds(tmp_path: Path) -> None:
    write_candidates(candidates(), tmp_path / "run")
    assert write_lists(candidates(), tmp_path / "lists").endswith("candidates of 9 queries written in 3 shards")
    run, lists = read_run(tmp_path / "run"), StoredLists(tmp_path / "lists")
    assert list(lists) == list(run) == [f"q{i}" for i in range(8)]
    assert [list(lists[q].items()) for q in lists] == [list(run[q].items()) for q in run]
    assert "none" not in lists
    assert sum(name.endswith(".arrayrecord") for name in files(tmp_path / "lists")) == 3


def test_a_shard_without_a_list_is_one(tmp_path: Path) -> None:
    alone = Small({"d": "red"}, {"q1": "absent", "q2": "absent", "q3": "none", "q4": "red"})
    write_lists(candidates(among=alone), tmp_path / "lists")
    assert {q: list(ranking) for q, ranking in StoredLists(tmp_path / "lists").items()} == {"q4": ["d"]}
    assert "0 shards" in write_lists(candidates(among=alone), tmp_path / "lists")
    with pytest.raises(UserError, match=r"small \(test\): no query has text"):
        write_lists(candidates(among=Small({"d": "red"}, {"q": " "})), tmp_path / "none")


def test_training_reads_the_same_from_lists_and_run(tmp_path: Path) -> None:
    write_candidates(candidates(), tmp_path / "run")
    write_lists(candidates(), tmp_path / "lists")
    streams, fingerprints = [], set()
    for source in ("run", "lists"):
        run = first_stage(collection(), "test", str(tmp_path / source))
        lists = TrainingLists(candidate_lists(collection(), run, "test", 5))
        batches = training_iterator(lists, num_candidates=4, batch_size=4, seed=0, num_epochs=3, num_threads=4)
        streams.append([[_content(row) for row in batch] for batch in batches])
        fingerprints.add(lists.fingerprint)
    assert streams[0] == streams[1]
    assert len(streams[0]) == 6
    assert len(fingerprints) == 1


def _content(candidates: CandidateList) -> tuple[object, ...]:
    return candidates.query.id, tuple(d.id for d in candidates.documents), candidates.relevance


def test_evaluation_reads_the_same_from_lists_and_run(tmp_path: Path) -> None:
    write_candidates(candidates(), tmp_path / "run")
    write_lists(candidates(), tmp_path / "lists")
    lists = [
        list(
            candidate_lists(
                collection(), first_stage(collection(), "test", tmp_path / source), "test", depth, **options
            )
        )
        for depth, options in ((5, {}), (3, {"with_positives": True}))
        for source in ("run", "lists")
    ]
    assert lists[0] == lists[1]
    assert lists[2] == lists[3]
    assert all(len(row) == 3 and any(row.relevance or ()) for row in lists[2])


def test_several_processes_share_the_lists(tmp_path: Path) -> None:
    write_lists(candidates(), tmp_path / "whole")
    said = write_lists(candidates("1/2"), tmp_path / "shared")
    assert said.endswith("3 queries written in 1 shards; 2 of 3 shards are left to other processes")
    with pytest.raises(UserError, match=r"2 of 3 shards are missing; run blockrank\.prepare with the same settings"):
        StoredLists(tmp_path / "shared")
    write_lists(candidates("0/2"), tmp_path / "shared")
    assert files(tmp_path / "shared") == files(tmp_path / "whole")


def test_what_is_there_is_kept_and_what_is_damaged_is_written_again(tmp_path: Path) -> None:
    write_lists(candidates(), tmp_path)
    before = files(tmp_path)
    assert write_lists(candidates(), tmp_path).endswith("0 candidates of 0 queries written in 0 shards")
    shard = tmp_path / "00001.arrayrecord"
    shard.write_bytes(shard.read_bytes()[:-3])
    (tmp_path / ".00001.json.leftover").write_bytes(b"half")
    assert write_lists(candidates(), tmp_path).endswith("written in 1 shards")
    assert files(tmp_path) == before
    (tmp_path / "00001.json").write_text("{")
    with pytest.raises(UserError, match="1 of 3 shards are missing; run blockrank"):
        StoredLists(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json: not JSON"):
        StoredLists(tmp_path)


def test_lists_of_other_settings_or_queries_are_refused(tmp_path: Path) -> None:
    write_lists(candidates(), tmp_path)
    with pytest.raises(UserError, match="these lists were made with depth = 9, not 8; choose another lists"):
        write_lists(candidates(depth=8), tmp_path)
    changed = collection()
    changed._queries["q7"] = replace(changed._queries["q7"], text="other words")
    with pytest.raises(UserError, match="these lists are of another collection, or it has changed since"):
        write_lists(candidates(among=changed), tmp_path)
    longer = collection()
    longer.documents = InMemoryDocuments([*longer.documents.scan(), Document("new", "red")])
    with pytest.raises(UserError, match="these lists were made with documents = "):
        write_lists(candidates(among=longer), tmp_path)
    with pytest.raises(UserError, match="made with shards = 3, not 2"):
        write_lists(candidates(among=collection(queries=5)), tmp_path)
    with pytest.raises(UserError, match=r"is no folder of lists \(it has no index\.json\)"):
        first_stage(collection(), "test", tmp_path.parent)
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(UserError, match=r"its index\.json is not that of lists"):
        StoredLists(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lists=x", "part=2/2"], "part=2/2: give <process>/<processes>, counted from 0"),
        (["lists=x", "part=first"], "part=first: give <process>/<processes>"),
        (["part=0/2"], "part=0/2: give run= or lists="),
        (["run=x", "lists=y"], "run, lists: give one of them"),
        (["run=x", "part=0/2"], "part=0/2: a run of BM25 is written by one process"),
        (["lists=x", "candidates=own"], "candidates=own is no search whose results could be written"),
    ],
)
def test_bad_settings_are_told(overrides: Sequence[str], message: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        write_out(build(PrepareConfig, compose("prepare", ["split=test", "candidates=bm25", *overrides])))


ROWS = [(f"d{i}", "x" * i) for i in range(10)]


def embedded(folder: Path, part: str) -> Embeddings:
    def embed(texts: Sequence[str]) -> np.ndarray:
        return np.array([[len(text), 1] for text in texts], np.float32)

    options = {"identity": {"weights": "a"}, "shard_size": 4, "total": len(ROWS)}
    return embed_to_disk(folder, iter(ROWS), embed, part=Part.parse(part), **options)


def test_several_processes_share_the_encoding(tmp_path: Path) -> None:
    embedded(tmp_path / "whole", "0/1")
    first = embedded(tmp_path / "shared", "0/2")
    assert (first.encoded, first.missing, len(first)) == (6, (1,), 10)
    second = embedded(tmp_path / "shared", "1/2")
    assert (second.encoded, second.missing) == (4, ())
    assert files(tmp_path / "shared") == files(tmp_path / "whole")
    assert embedded(tmp_path / "more", "4/5").missing == (0, 1, 2)


KILLED = """
import os, signal, sys
from pathlib import Path

os.environ["BLOCKRANK_CACHE"] = sys.argv[1] + "/cache"
import test_stored_lists as made
from blockrank.retrieval import write

write.LISTS_PER_SHARD = 3

def work(folder):
    made.embedded(folder / "embeddings", "0/1")
    write.write_lists(made.candidates(), folder / "lists")

def dies_at(call, folder):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    left = [call]

    def counted(real):
        def wrapped(*arguments):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)
        return wrapped

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)
    work(folder)
    os._exit(0)

folder = Path(sys.argv[1])
work(folder / "whole")
expected, call = made.files(folder / "whole"), 1
while dies_at(call, folder / "cut"):
    work(folder / "cut")
    assert made.files(folder / "cut") == expected, call
    for path in sorted((folder / "cut").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    call += 1
print(f"killed {call - 1} times")
"""


def test_killed_at_every_write_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Two files and their renaming for each of 3 shards of embeddings, 3 of lists, and once for each index."""
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"killed {2 * (2 * 6 + 2)} times\n"


def test_a_record_is_json_that_any_reader_of_array_records_can_read(tmp_path: Path) -> None:
    import grain

    write_lists(candidates(), tmp_path)
    source = grain.sources.ArrayRecordDataSource([str(path) for path in sorted(tmp_path.glob("*.arrayrecord"))])
    record = json.loads(source[4])
    assert record["query_id"] == "q4"
    assert dict(zip(record["documents"], record["scores"], strict=True)) == StoredLists(tmp_path)["q4"]
    assert record["scores"] == sorted(record["scores"], reverse=True)
