"""Dense retrieval: exact search against brute force, embeddings that survive a kill, runs that the loader reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_helpers import bi_encoder_folder
from flax import nnx
from test_candidates import Small

from blockrank.config import build, compose
from blockrank.data.candidates import candidate_lists
from blockrank.data.collection import open_collection
from blockrank.data.trec import read_run
from blockrank.errors import UserError
from blockrank.models.encoder import Encoder
from blockrank.models.loading import load_encoder
from blockrank.models.sentence import pool
from blockrank.prepare import PrepareConfig, write_out
from blockrank.retrieval.bi_encoder import BiEncoder, embed_program
from blockrank.retrieval.dense import DenseIndex
from blockrank.retrieval.devices import local_mesh, spread_rows
from blockrank.retrieval.embeddings import Embeddings, embed_to_disk
from blockrank.retrieval.first_stage import first_stage
from blockrank.retrieval.settings import EncoderSettings, dense_settings
from blockrank.retrieval.top_k import exact_top_k

TEXTS = {
    "d1": "the red apple",
    "d2": "a blue sky over the sea " * 4,
    "d3": "",
    "d4": "42",
    "d5": "the red apple",
    "d6": "apples and pears, and plums",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRANK_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bi_encoder_folder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> BiEncoder:
    return BiEncoder.load(EncoderSettings(str(folder)))


def collection() -> Small:
    return Small(
        TEXTS, {"q1": "red apple", "q2": "sea", "q3": " "}, {"q1": {"d1": 1}, "q2": {"d2": 1}, "q3": {"d4": 1}}
    )


def brute_force(queries: np.ndarray, documents: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    scores = queries.astype(np.float64) @ documents.astype(np.float64).T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, axis=1), order


def in_blocks(rows: np.ndarray, *sizes: int) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(sizes)) if sizes else [rows]


def test_top_k_with_many_exact_ties_is_brute_force_in_corpus_order() -> None:
    """Small integers: products are exact, so every tie is one, zero included."""
    rng = np.random.default_rng(0)
    queries = rng.integers(-1, 2, (7, 4)).astype(np.float32)
    documents = rng.integers(-1, 2, (101, 4)).astype(np.float32)
    scores, positions = exact_top_k(queries, in_blocks(documents, 40, 1, 37), 30, block_rows=40, mesh=local_mesh())
    expected = brute_force(queries, documents, 30)
    np.testing.assert_array_equal(scores, expected[0])
    np.testing.assert_array_equal(positions, expected[1])
    assert len(np.unique(scores[0])) < 10


def test_recall_at_30_is_one_on_random_vectors() -> None:
    rng = np.random.default_rng(1)
    queries, documents = (rng.normal(size=(n, 16)).astype(np.float32) for n in (5, 1500))
    documents[700:720] = documents[:20]
    scores, positions = exact_top_k(queries, in_blocks(documents, 512, 512), 30, block_rows=512, mesh=local_mesh())
    expected = brute_force(queries, documents, 30)
    assert np.mean([len(set(a) & set(b)) / 30 for a, b in zip(positions, expected[1], strict=True)]) == 1.0
    np.testing.assert_allclose(scores, expected[0], rtol=0, atol=1e-5)
    assert all(list(row).index(p - 700) == i - 1 for row in positions for i, p in enumerate(row) if 700 <= p < 720)


def test_fewer_documents_than_k() -> None:
    rows = np.eye(3, dtype=np.float32)
    scores, positions = exact_top_k(-rows[:1], [rows[:2], rows[2:]], 5, block_rows=2, mesh=local_mesh())
    np.testing.assert_array_equal(positions, [[1, 2, 0, -1, -1]])
    np.testing.assert_array_equal(scores, [[0, 0, -1, -np.inf, -np.inf]])
    assert exact_top_k(rows[:0], [rows], 2, block_rows=3, mesh=local_mesh())[1].shape == (0, 2)
    with pytest.raises(ValueError, match="3 rows do not fit"):
        exact_top_k(rows, [rows], 2, block_rows=2, mesh=local_mesh())


def test_embeddings_are_those_of_each_text_alone(folder: Path, encoder: BiEncoder) -> None:
    model, texts = load_encoder(folder), [TEXTS["d1"], TEXTS["d2"], TEXTS["d3"], TEXTS["d1"]]
    together = encoder.embed_documents(texts)
    assert together.dtype == np.float32

    @nnx.jit
    def alone(model: Encoder, tokens: np.ndarray) -> jax.Array:
        mask = jnp.ones(tokens.shape, bool)
        return pool(model(tokens, mask), mask, "mean", normalize=False)[0]

    for ids, embedding in zip(encoder.tokenize(texts), together, strict=True):
        np.testing.assert_allclose(embedding, alone(model, np.array([ids])), rtol=0, atol=1e-5)
    assert encoder.embed_documents([]).shape == (0, 16)


def test_texts_are_cut_and_special_tokens_are_text(folder: Path, encoder: BiEncoder) -> None:
    plain, long, special = encoder.tokenize(["ab c", "a " * 100, "[SEP]"])
    assert plain == [2, 4, 41, 6, 3]
    assert long == [2, *[4] * 22, 3]
    assert special.count(3) == 1
    with pytest.raises(UserError, match="max_length=41 must be 3 to 40"):
        BiEncoder.load(EncoderSettings(str(folder), max_length=41))


def test_settings_replace_the_folders(folder: Path, encoder: BiEncoder) -> None:
    given = EncoderSettings(str(folder), pooling="cls", normalize=True, max_length=5, query_prefix="q ", batch_tokens=1)
    other = BiEncoder.load(given)
    assert np.allclose(np.linalg.norm(other.embed_documents(["a", "b"]), axis=1), 1)
    np.testing.assert_array_equal(other.embed_queries(["a"]), other.embed_documents(["q a"]))
    assert len(other.tokenize(["a b c d e f"])[0]) == 5
    assert other.identity() != encoder.identity()
    assert BiEncoder.load(EncoderSettings(str(folder), batch_tokens=64)).identity() == encoder.identity()


def test_batches_hold_every_text_once_in_few_shapes(encoder: BiEncoder) -> None:
    lengths = np.random.default_rng(0).integers(2, 25, 5000).tolist()
    plan = list(encoder.batches(lengths))
    assert sorted(np.concatenate([chosen for chosen, _, _ in plan])) == list(range(5000))
    assert all(len(chosen) <= rows and max(lengths[i] for i in chosen) <= width for chosen, rows, width in plan)
    assert {width for _, _, width in plan} == {16, 24}
    assert all(rows * width <= 16_384 for _, rows, width in plan)
    assert len({(rows, width) for _, rows, width in plan}) <= 4


class Count:
    """Embeds a text as its length and counts texts; fails at one."""

    def __init__(self, fail_at: str | None = None) -> None:
        self.texts, self.fail_at = 0, fail_at

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        if self.fail_at in texts:
            raise RuntimeError("killed")
        self.texts += len(texts)
        return np.array([[len(text), 1] for text in texts], np.float32)


ROWS = [(f"d{i}", "x" * i) for i in range(10)]


def on_disk(folder: Path, embed: Any, rows: Sequence[tuple[str, str]] = ROWS, **identity: Any) -> Embeddings:
    made_with = {"weights": "a", **identity}
    return embed_to_disk(folder, iter(rows), embed, identity=made_with, shard_size=4, total=len(rows))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_hold_ids_and_embeddings_in_order(tmp_path: Path) -> None:
    made = on_disk(tmp_path, Count())
    assert (len(made), made.counts, made.encoded) == (10, (4, 4, 2), 10)
    assert made.ids().tolist() == [f"d{i}".encode() for i in range(10)]
    blocks = list(made.blocks(3))
    assert [len(block) for block in blocks] == [3, 1, 3, 1, 2]
    np.testing.assert_array_equal(np.concatenate(blocks)[:, 0], range(10))
    assert made.passages_per_second is not None


def test_an_interrupted_run_keeps_its_finished_shards(tmp_path: Path) -> None:
    on_disk(tmp_path / "whole", Count())
    with pytest.raises(RuntimeError, match="killed"):
        on_disk(tmp_path / "cut", Count(fail_at="x" * 9))
    (tmp_path / "cut" / ".00002.npy.leftover").write_bytes(b"half")
    again = Count()
    assert on_disk(tmp_path / "cut", again).encoded == again.texts == 2
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    once_more = Count()
    assert on_disk(tmp_path / "cut", once_more).passages_per_second is None
    assert once_more.texts == 0


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from blockrank.retrieval.embeddings import embed_to_disk

def embed(texts):
    if len(texts) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.array([[len(text), 1] for text in texts], np.float32)

if sys.argv[2] == "writing":
    def embed(texts, plain=embed):
        if len(texts) == 4 and len(texts[0]) == 4:
            np.save = lambda file, array: (file.write(b"half"), file.flush(), os.kill(os.getpid(), signal.SIGKILL))
        return plain(texts) if len(texts) == 4 else None

rows = [(f"d{i}", "x" * i) for i in range(10)]
embed_to_disk(Path(sys.argv[1]), iter(rows), embed, identity={"weights": "a"}, shard_size=4, total=10)
"""


@pytest.mark.parametrize(("moment", "left"), [("embedding", 2), ("writing", 6)])
def test_a_killed_process_loses_one_shard_at_most(tmp_path: Path, moment: str, left: int) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "cut"), moment], check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    again = Count()
    assert on_disk(tmp_path / "cut", again).encoded == left
    on_disk(tmp_path / "whole", Count())
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_damaged_array_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on_disk(tmp_path, Count())
    array = tmp_path / "00001.npy"
    whole = array.read_bytes()
    array.write_bytes(whole[:-5])
    assert on_disk(tmp_path, Count()).encoded == 4
    assert "00001.npy is damaged" in caplog.text
    assert array.read_bytes() == whole


def test_a_damaged_note_is_written_again_and_a_damaged_index_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "shards"
    on_disk(folder, Count())
    before = files(folder)
    for damage in ("", before["00001.json"].decode()[:9], "[]"):
        (folder / "00001.json").write_text(damage)
        assert on_disk(folder, Count()).encoded == 4
        assert "00001.json is damaged" in caplog.text
        caplog.clear()
        assert files(folder) == before
    (folder / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json: not JSON .* delete it and write it anew"):
        on_disk(folder, Count())


def test_other_models_and_other_texts_are_refused(tmp_path: Path) -> None:
    on_disk(tmp_path, Count())
    with pytest.raises(UserError, match="these embeddings were made with weights = a, not b"):
        on_disk(tmp_path, Count(), weights="b")
    changed = [*ROWS[:5], ("d5", "other"), *ROWS[6:]]
    for rows in (changed, ROWS[:8], [*ROWS, ("d10", "new")]):
        with pytest.raises(UserError, match="of another collection, or it has changed since"):
            on_disk(tmp_path, Count(), rows)
    with pytest.raises(UserError, match="at least one document with text"):
        on_disk(tmp_path / "none", Count(), [])
    (tmp_path / "index.json").unlink()
    with pytest.raises(UserError, match=r"holds \.npy files but no index\.json"):
        on_disk(tmp_path, Count())


def test_search_is_brute_force_over_documents_with_text(encoder: BiEncoder) -> None:
    index = DenseIndex.build(collection(), EncoderSettings(shard_size=2), encoder)
    run = index.search(collection().queries("test"), 10)
    ids = [i for i, text in TEXTS.items() if text]
    scores = encoder.embed_queries(["red apple", "sea"]) @ encoder.embed_documents([TEXTS[i] for i in ids]).T
    assert list(run) == ["q1", "q2"]
    for ranking, row in zip(run.values(), scores, strict=True):
        assert sorted(ranking) == ids
        expected = dict(zip(ids, row, strict=True))
        np.testing.assert_allclose(list(ranking.values()), sorted(row, reverse=True), rtol=0, atol=1e-5)
        np.testing.assert_allclose(list(ranking.values()), [expected[i] for i in ranking], rtol=0, atol=1e-5)
    cut = index.search(collection().queries("test"), 2)
    assert {q: list(ranking) for q, ranking in cut.items()} == {q: list(ranking)[:2] for q, ranking in run.items()}
    with pytest.raises(UserError, match="k must be at least 1"):
        index.search(collection().queries("test"), 0)


def test_dense_is_a_first_stage(folder: Path, encoder: BiEncoder) -> None:
    expected = DenseIndex.build(collection(), EncoderSettings(), encoder).search(collection().queries("test"), 3)
    assert first_stage(collection(), "test", f"dense:{folder}", 3) == expected
    assert first_stage(collection(), "test", "dense", 3, EncoderSettings(str(folder))) == expected
    lists = candidate_lists(collection(), expected, "test", 2)
    assert [len(candidates) for candidates in lists] == [2, 2]
    assert dense_settings("dense") == EncoderSettings()
    assert dense_settings("runs/dense.run") is None
    with pytest.raises(UserError, match="shard_size=0 must be at least 1"):
        EncoderSettings(shard_size=0)
    with pytest.raises(UserError, match="needs a folder or name"):
        first_stage(collection(), "test", "dense:")
    with pytest.raises(UserError, match="no such folder of an encoder"):
        first_stage(collection(), "test", "dense:absent")


def beir(folder: Path) -> Path:
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", TEXTS), ("queries", {"q1": "red apple", "q2": "sea"})):
        rows = (json.dumps({"_id": i, "text": text}) for i, text in texts.items())
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    (folder / "qrels" / "train.tsv").write_text("q1\td1\t1\nq2\td2\t1\n")
    return folder


def test_prepare_writes_a_run_once(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "runs" / "train.run"
    overrides = ["data=beir", f"data.path={beir(tmp_path / 'set')}", "split=train", f"run={path}", "depth=3"]
    dense = [*overrides, "candidates=dense", f"encoder.path={folder}", f"encoder.index_dir={tmp_path / 'index'}"]

    def prepare(overrides: list[str]) -> str:
        return write_out(build(PrepareConfig, compose("prepare", overrides)))

    assert "train.run: 6 candidates of 2 queries" in prepare(dense)
    expected = first_stage(open_collection("beir", path=tmp_path / "set"), "train", f"dense:{folder}", 3)
    written = read_run(path)
    assert {q: list(ranking) for q, ranking in written.items()} == {q: list(r) for q, r in expected.items()}
    record = json.loads((tmp_path / "runs" / "train.run.json").read_text())
    assert (record["passages"], record["passages_encoded"], record["queries"]) == (5, 5, 2)
    assert record["passages_per_second"] > 0
    assert record["made_with"]["encoder"]["path"] == str(folder)
    before = path.read_bytes()
    assert prepare(dense).endswith("is there already, made with these settings")
    with pytest.raises(UserError, match=r"train\.run is there already, made with other settings"):
        prepare([*dense, "depth=2"])
    note = path.with_name("train.run.json")
    note.write_text("{")
    with pytest.raises(UserError, match=r"train\.run is there already, made with other settings"):
        prepare(dense)
    path.unlink()
    prepare(dense)
    assert path.read_bytes() == before
    assert {p.name for p in path.parent.iterdir()} == {"train.run", "train.run.json"}
    path.unlink()
    assert "3 candidates of 2 queries" in prepare([*overrides, "candidates=bm25"])
    for source, message in (("own", "is no search"), (None, "give split=<name> and candidates=")):
        with pytest.raises(UserError, match=message):
            prepare([*overrides, f"candidates={source or 'null'}"])


SPREAD = """
import sys
import jax, numpy as np
from blockrank.parallel import MeshConfig
from blockrank.retrieval.bi_encoder import BiEncoder
from blockrank.retrieval.devices import local_mesh
from blockrank.retrieval.settings import EncoderSettings
from blockrank.retrieval.top_k import exact_top_k

assert jax.local_device_count() == 8
rng = np.random.default_rng(0)
rows = [rng.integers(-1, 2, (n, 4)).astype(np.float32) for n in (7, 101)]
blocks = np.split(rows[1], [40, 41, 78])
texts = ["ab " * n for n in range(9)]

def found(mesh):
    encoder = BiEncoder.load(EncoderSettings(sys.argv[1]), mesh)
    return encoder.embed_documents(texts), *exact_top_k(rows[0], blocks, 30, block_rows=41, mesh=mesh)

embeddings, *one = found(local_mesh(jax.devices()[:1]))
for mesh in (local_mesh(), MeshConfig(data=8).make(), MeshConfig(doc=4, tensor=2).make()):
    spread, *many = found(mesh)
    np.testing.assert_allclose(spread, embeddings, rtol=0, atol=1e-5)
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a, b)
print("equal on 8 devices")
"""


def test_several_devices_find_what_one_finds(folder: Path) -> None:
    """Ties among them: small integers."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SPREAD, str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "equal on 8 devices" in done.stdout


def test_the_program_of_an_encoder_needs_its_shapes_only(folder: Path, encoder: BiEncoder) -> None:
    model, mesh = load_encoder(folder), local_mesh()
    embed = embed_program(nnx.eval_shape(lambda: Encoder(model.config, rngs=nnx.Rngs(0))), encoder.settings)
    ids = encoder.tokenize(["ab c", "a blue sky"])
    lengths = np.array([len(row) for row in ids], np.int32)
    tokens = np.stack([np.pad(row, (0, 16 - len(row))) for row in ids]).astype(np.int32)
    found = embed(nnx.state(model), *jax.device_put((tokens, lengths), spread_rows(mesh)))
    np.testing.assert_array_equal(found, encoder.embed_documents(["ab c", "a blue sky"]))
