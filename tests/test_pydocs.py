"""The embedded collection: real text, made anywhere in seconds, and neither trivial nor hopeless for BM25."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockrank.data import pydocs
from blockrank.data.candidates import candidate_lists
from blockrank.data.collection import Collection, open_collection
from blockrank.errors import UserError
from blockrank.retrieval.first_stage import first_stage


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKRANK_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def collection(cache: Path) -> Collection:
    assert cache.is_dir()
    found = open_collection("pydocs")
    start = time.perf_counter()
    assert len(found.documents) >= 2000
    assert time.perf_counter() - start < 20
    return found


def test_splits_are_disjoint_and_of_the_stated_sizes(collection: Collection) -> None:
    assert collection.splits == ("train", "validation", "test")
    queries = {split: collection.queries(split) for split in collection.splits}
    ids = [i for found in queries.values() for i in found]
    texts = [q.text.casefold() for found in queries.values() for q in found.values()]
    assert len(set(ids)) == len(ids)
    assert len(set(texts)) == len(texts)
    for split, share in (("train", 0.8), ("validation", 0.1), ("test", 0.1)):
        assert abs(len(queries[split]) / len(ids) - share) < 0.03
    with pytest.raises(UserError, match="no split 'dev'"):
        collection.queries("dev")


def test_documents_are_short_distinct_and_do_not_hold_their_query(collection: Collection) -> None:
    documents = list(collection.documents.scan())
    assert all(10 <= len(d.text.split()) <= 60 for d in documents)
    assert len({d.text.casefold() for d in documents}) == len(documents)
    leaks = 0
    total = 0
    for split in collection.splits:
        queries, qrels = collection.queries(split), collection.qrels(split)
        for i, query in queries.items():
            assert 1 <= len(qrels[i]) <= 3
            assert 4 <= len(query.text.split()) <= 30
            total += 1
            leaks += any(query.text.casefold() in collection.documents[d].text.casefold() for d in qrels[i])
    assert leaks < 0.03 * total


def test_known_entries_are_what_the_docstrings_say(collection: Collection) -> None:
    (split,) = [s for s in collection.splits if "what-is-shutil.copyfile" in collection.queries(s)]
    assert (
        collection.queries(split)["what-is-shutil.copyfile"].text
        == "Copy data from src to dst in the most efficient way possible."
    )
    assert collection.qrels(split)["what-is-shutil.copyfile"] == {"shutil.copyfile": 1}
    assert "follow_symlinks" in collection.documents["shutil.copyfile"].text


def test_bm25_is_a_baseline_worth_beating(collection: Collection) -> None:
    lists = candidate_lists(collection, first_stage(collection, "test", "bm25", 8), "test", 8, with_positives=True)
    answered = [c for c in lists if c.relevance is not None and any(c.relevance)]
    assert len(answered) == len(lists) > 200
    assert all(len(c) == 8 for c in lists if c.scores and len(c) >= 8)
    first = sum(c.relevance is not None and c.relevance[0] > 0 for c in lists) / len(lists)
    assert 0.2 < first < 0.6


def test_gathering_twice_in_fresh_processes_gives_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        code = "from blockrank.data.pydocs import load_entries; load_entries()"
        environment = {"BLOCKRANK_CACHE": str(folder), "PYTHONHASHSEED": seed, "PATH": "", "HOME": str(tmp_path)}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert result.stdout == result.stderr == ""
        (path,) = (folder / "pydocs").iterdir()
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


def test_gathering_neither_warns_nor_prints(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entries = pydocs.gather()
    assert [e.name for e in entries] == sorted(e.name for e in entries)
    assert capfd.readouterr() == ("", "")
    assert "antigravity" not in sys.modules
    assert "this" not in sys.modules


def test_the_cache_is_read_and_another_version_of_the_code_has_its_own(cache: Path, collection: Collection) -> None:
    assert len(collection.documents)
    before = sorted((cache / "pydocs").iterdir())
    assert pydocs.load_entries() == pydocs.load_entries()
    assert sorted((cache / "pydocs").iterdir()) == before
    assert len(before) == 1


def test_documents_are_cut_where_asked(cache: Path, collection: Collection) -> None:
    assert cache.is_dir()
    assert len(collection.documents)
    short = open_collection("pydocs", max_words=12)
    assert max(len(d.text.split()) for d in short.documents.scan()) == 12


def test_parse_docstring() -> None:
    text = inspect.cleandoc(
        """
        sum(a, axis=None)

        Sum of array elements over a given axis. Refer to `numpy.sum` for full documentation.

        Parameters
        ----------
        a : array_like
            Elements to sum, see :func:`~numpy.sum`.

        >>> sum([1, 2])
        3

        .. versionadded:: 1.0

        Returns the sum along the axis, or of all elements when there is none.
        """
    )
    assert pydocs.parse_docstring("m.sum", text) == pydocs.Entry(
        "m.sum",
        "Sum of array elements over a given axis.",
        "a : array_like Elements to sum, see numpy.sum. "
        "Returns the sum along the axis, or of all elements when there is none.",
    )


@pytest.mark.parametrize(
    "text", ["", "One line only here.", "Too short.\n\n" + "word " * 20, "A summary of four.\n\nfew"]
)
def test_docstrings_without_a_query_or_a_body_give_nothing(text: str) -> None:
    assert pydocs.parse_docstring("x", text) is None
