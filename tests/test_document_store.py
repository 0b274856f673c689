"""Documents kept on disk: the same scores as without, and everything that must not go wrong with a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import HASTE, tiny_config, tiny_decoder

from blockrank.data.blobs import Blobs, blob_shards, write_blobs
from blockrank.data.shards import ALL, Part
from blockrank.errors import UserError
from blockrank.models.decoder import Decoder
from blockrank.models.document_cache import Kept, KeptFormat, keep
from blockrank.models.gguf import embedded_model_path
from blockrank.models.loading import load_decoder
from blockrank.models.quantize import quantize_model
from blockrank.prompts.encode import PromptEncoder, PromptLimits
from blockrank.prompts.template import PromptTemplate
from blockrank.prompts.tokenizer import Tokenizer, load_tokenizer
from blockrank.rankers.attention import EMPTY_SCORE, AttentionRanker, AttentionSettings
from blockrank.rankers.document_store import (
    DocumentReader,
    DocumentStore,
    StoreReport,
    StoreSettings,
    representative,
    write_store,
)
from blockrank.rankers.generative import GenerativeRanker
from blockrank.rankers.stored_attention import StoredAttentionRanker
from blockrank.types import CandidateList, Document, Query

TOLERANCE = 1e-5
SETTINGS = AttentionSettings(score_layer=1, suffix_offset=2048, row_length=128)
EXACT = StoreSettings("float32")
SHARDED = replace(EXACT, shard_documents=5)
WORDS = ["river", "stone", "cloud", "engine", "paper", "market", "winter", "signal", "garden", "copper", "violin"]


@cache
def tokenizer() -> Tokenizer:
    try:
        return load_tokenizer(embedded_model_path())
    except UserError as error:
        pytest.skip(str(error))


@cache
def decoder(seed: int = 0, dtype: str = "float32") -> Decoder:
    """Two kv heads of two query heads each."""
    model = tiny_decoder(tiny_config(2, vocabulary=tokenizer().vocab_size), seed)
    model.dtype = jnp.dtype(dtype)
    return model


def encoder(template: str = "brief_cacheable", **limits: object) -> PromptEncoder:
    return PromptEncoder(PromptTemplate.from_yaml(template), tokenizer(), PromptLimits(**limits))


@cache
def documents() -> tuple[Document, ...]:
    """Eleven of three to thirty words, some with a title, and two without text; three shards of five."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(3, 30))) for _ in range(11)]
    some = [Document(f"d{i}", text + ".", "a title" if i % 3 == 0 else "") for i, text in enumerate(texts)]
    return (*some[:4], Document("blank", "\u200b"), *some[4:], Document("empty", ""))


def listed(*places: int, query: str = "where does the river end") -> CandidateList:
    return CandidateList(Query(query[:3], query), tuple(documents()[i] for i in places))


LISTS = [
    listed(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
    listed(5, 3, query="paper"),
    listed(4, 12),
    listed(),
    listed(11, 2, 2, 8, query="what is made of copper and sold in the market"),
]


@cache
def plain(model: Decoder | None = None, coder: PromptEncoder | None = None, **changes: object) -> AttentionRanker:
    return AttentionRanker(model or decoder(), coder or encoder(), replace(SETTINGS, **changes))


def store(
    folder: Path,
    ranker: AttentionRanker,
    kept: StoreSettings = EXACT,
    some: Sequence[Document] | None = None,
    part: Part = ALL,
) -> StoreReport:
    reader = DocumentReader(ranker.model, ranker.encoder, ranker.settings, kept)
    some = documents() if some is None else some
    return write_store(folder, reader, iter(some), total=len(some), part=part)


def stored(folder: Path, ranker: AttentionRanker) -> StoredAttentionRanker:
    return StoredAttentionRanker(ranker.model, ranker.encoder, ranker.settings, folder)


@pytest.fixture(scope="module", autouse=True)
def haste(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs are compiled in haste, and locks lie in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", partial(jax.jit, compiler_options=HASTE))
        patch.setenv("BLOCKRANK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole store of `documents()` in float32."""
    path = tmp_path_factory.mktemp("stores") / "float32"
    store(path, plain(), SHARDED)
    return path


def assert_same(actual: AttentionRanker, expected: AttentionRanker, lists: Sequence[CandidateList] = LISTS) -> None:
    pairs = zip(actual.score(lists), expected.score(lists), strict=True)
    for (one, other), candidates in zip(pairs, lists, strict=True):
        np.testing.assert_allclose(one.scores, other.scores, rtol=0, atol=TOLERANCE)
        assert one.truncated.tolist() == other.truncated.tolist()
        assert (one.query_truncated, one.tokens) == (other.query_truncated, other.tokens)
        assert [s == EMPTY_SCORE for s in one.scores] == [d.is_empty for d in candidates.documents]


def test_scores_are_those_of_the_whole_prompt(folder: Path) -> None:
    """Ragged lists in one batch, documents in several rows, one document twice, documents without text."""
    expected = plain()
    layout = expected.reader.lay_out([expected.encoder.encode(LISTS[0])])
    assert layout.shape.rows > 3
    ranker = stored(folder, expected)
    assert_same(ranker, expected)
    assert (ranker.stored, ranker.computed) == (11 + 2 + 4, 0)
    results = ranker.score(LISTS)
    assert results[0].extra == {"documents_stored": 11.0, "documents_computed": 0.0}
    spread = np.ptp(results[0].scores[[i for i, d in enumerate(documents()) if not d.is_empty]])
    assert spread > 100 * TOLERANCE


@pytest.mark.parametrize(
    "changes", [{"packing": "chunked"}, {"attention_backend": "reference"}, {"batch_tokens": 1}, {"row_length": 96}]
)
def test_a_store_serves_any_layout(folder: Path, changes: dict) -> None:
    assert_same(stored(folder, plain(**changes)), plain(), LISTS[1:])


@pytest.mark.parametrize(
    "changes", [{"score_layer": 0}, {"signal_aggregation": "mean", "length_normalization": 0.5}], ids=str
)
def test_any_readout(tmp_path: Path, changes: dict) -> None:
    expected = plain(**changes)
    store(tmp_path / "store", expected)
    assert_same(stored(tmp_path / "store", expected), expected, LISTS[1:])


def test_the_papers_prompt_cut_and_split_documents(tmp_path: Path) -> None:
    for name, long_documents in (("cut", "truncate"), ("split", "split")):
        coder = encoder("paper_cacheable", document_tokens=40, long_documents=long_documents)
        expected = plain(coder=coder)
        store(tmp_path / name, expected)
        ranker = stored(tmp_path / name, expected)
        assert_same(ranker, expected, LISTS[:1])
        assert ranker.computed == 0
        assert expected.score(LISTS[:1])[0].truncated.any() == (name == "cut")
        assert (ranker.stored > 11) == (name == "split")


def test_a_mixed_precision_model_keeps_what_it_computes(tmp_path: Path) -> None:
    """bfloat16 activations are kept in bfloat16 without a loss, so scores differ by the order of sums only."""
    expected = plain(decoder(dtype="bfloat16"))
    store(tmp_path / "store", expected, StoreSettings("bfloat16"))
    for one, other in zip(stored(tmp_path / "store", expected).score(LISTS), expected.score(LISTS), strict=True):
        np.testing.assert_allclose(one.scores, other.scores, rtol=0, atol=2 * 2**-8)


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 2**-7), ("int8", 1 / 127)])
def test_rounded_stores_differ_by_their_rounding(tmp_path: Path, folder: Path, dtype: str, step: float) -> None:
    """A number moves by half a step of its dtype at most (bfloat16: of itself, int8: of its head's largest).

    So logits of order 1 move by about a step, and with them the log of a document's share: here by 0.4 steps of
    bfloat16 and 0.8 of int8. Bound: two.
    """
    expected = plain()
    store(tmp_path / "store", expected, StoreSettings(dtype))
    ranker = stored(tmp_path / "store", expected)
    moved = 0.0
    for one, other in zip(ranker.score(LISTS[:2]), expected.score(LISTS[:2]), strict=True):
        there = other.scores > 0
        change = np.abs(np.log(one.scores[there]) - np.log(other.scores[there]))
        assert change.max() < 2 * step
        moved = max(moved, float(change.max()))
    assert moved > TOLERANCE
    assert ranker.computed == 0
    assert ranker.store.reader.format.token_bytes < stored(folder, expected).store.reader.format.token_bytes


def test_kept_numbers_move_by_half_a_step() -> None:
    values = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 8)).astype(np.float32)
    values[0, 0, 0, 0] = 0
    for dtype, step in (("float32", 0.0), ("bfloat16", 2**-7 * np.abs(values)), ("int8", None)):
        kept = keep(jnp.asarray(values), dtype)
        if step is None:
            largest = np.abs(values).max(axis=-1, keepdims=True)
            step = largest / 127
        assert (np.abs(np.asarray(kept.restored(jnp.float32)) - values) <= 0.5 * step + 1e-7).all()
        one = Kept(*(None if x is None else np.asarray(x)[:, 0] for x in (kept.values, kept.scales)))
        form = KeptFormat(3, 2, 8, dtype)
        blob = form.pack(one)
        assert (blob.dtype, len(blob)) == (np.uint8, 5 * form.token_bytes)
        back = form.unpack(blob)
        assert (np.asarray(back.values) == np.asarray(one.values)).all()
        assert (back.scales is None) == (dtype != "int8")
        if back.scales is not None:
            assert (back.scales == one.scales).all()
        with pytest.raises(ValueError, match="no whole tokens"):
            form.unpack(blob[:-1])


def test_bytes_of_a_token_by_hand() -> None:
    """SmolLM2 before layer 18: 18 keys, 18 values and the score layer's keys, 3 kv heads of 64."""
    assert KeptFormat(37, 3, 64, "float32").token_bytes == 28_416
    assert KeptFormat(37, 3, 64, "bfloat16").token_bytes == 14_208
    assert KeptFormat(37, 3, 64, "int8").token_bytes == 7_104 + 37 * 3 * 4
    assert KeptFormat(41, 8, 128, "bfloat16").token_bytes == 83_968  # Mistral-7B before layer 20


def test_documents_that_are_missing_are_computed_and_counted(tmp_path: Path, folder: Path) -> None:
    """Rounded as the store rounds: a score does not depend on what happened to be stored."""
    expected = plain()
    store(tmp_path / "part", expected, EXACT, documents()[:5])
    ranker = stored(tmp_path / "part", expected)
    assert_same(ranker, expected)
    assert (ranker.stored, ranker.computed) == (4 + 1 + 2, 7 + 1 + 2)
    store(tmp_path / "some", expected, StoreSettings("int8"), documents()[:5])
    store(tmp_path / "all", expected, StoreSettings("int8"))
    assert_same(stored(tmp_path / "some", expected), stored(tmp_path / "all", expected))
    changed = replace(documents()[0], text="another text under the same id")
    candidates = CandidateList(Query("q", "river"), (changed, documents()[1]))
    ranker = stored(folder, expected)
    assert_same(ranker, expected, [candidates])
    assert (ranker.stored, ranker.computed) == (1, 1)


def test_equal_texts_are_kept_once(tmp_path: Path) -> None:
    twins = [replace(documents()[0], id=f"twin{i}") for i in range(7)]
    report = store(tmp_path / "store", plain(), SHARDED, twins)
    assert report.documents == 7
    assert len(json.loads((tmp_path / "store/00000.json").read_text())["keys"]) == 1
    ranker = stored(tmp_path / "store", plain())
    assert_same(ranker, plain(), [CandidateList(Query("q", "river"), tuple(twins[:2]))])
    assert ranker.computed == 0


class Killed(BaseException):
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_store_continues_to_the_same_bytes(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = DocumentReader.read, []

    def dying(self: DocumentReader, pieces: list):
        calls.append(len(pieces))
        for place, blob in enumerate(read(self, pieces)):
            if len(calls) == 2 and place == 3:
                raise Killed
            yield blob

    monkeypatch.setattr(DocumentReader, "read", dying)
    with pytest.raises(Killed):
        store(tmp_path / "store", plain(), SHARDED)
    assert sorted(contents(tmp_path / "store")) == ["00000.blobs", "00000.json", "index.json"]
    assert stored(tmp_path / "store", plain()).score([listed(0, 11)])[0].extra["documents_computed"] == 1
    monkeypatch.setattr(DocumentReader, "read", read)
    report = store(tmp_path / "store", plain(), SHARDED)
    assert (report.documents, report.computed) == (11, 6)
    assert contents(tmp_path / "store") == contents(folder)
    assert store(tmp_path / "store", plain(), SHARDED).computed == 0


def test_processes_share_the_work(tmp_path: Path, folder: Path) -> None:
    report = store(tmp_path / "store", plain(), SHARDED, part=Part(1, 2))
    assert (report.documents, report.missing) == (5, 2)
    assert "2 shards are left to other processes" in str(report)
    assert store(tmp_path / "store", plain(), SHARDED, part=Part(0, 2)).missing == 0
    assert contents(tmp_path / "store") == contents(folder)


def test_damaged_shards_are_written_again_and_never_read(tmp_path: Path, folder: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(folder, copy)
    content = copy / "00001.blobs"
    whole = content.read_bytes()
    content.write_bytes(whole[:-64])
    with pytest.raises(UserError, match=r"00001\.blobs: damaged"):
        stored(copy, plain())
    assert store(copy, plain(), SHARDED).computed == 5
    assert contents(copy) == contents(folder)
    content.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    ranker = stored(copy, plain())
    with pytest.raises(UserError, match=r"00001\.blobs and its \.json"):
        ranker.score(LISTS)


def test_blobs_by_key(tmp_path: Path) -> None:
    """Keys that share their first half, an empty blob, one written twice, and keys that are not there."""
    shards = blob_shards(tmp_path, what="blobs", key="folder")
    shards.open({})
    keys = [b"same-day" + bytes([i]) * 8 for i in range(3)] + [bytes(16), b"\xff" * 16]
    blobs = {key: np.arange(n, dtype=np.uint8) for key, n in zip(keys, (3, 64, 65, 0, 1), strict=True)}
    pairs = list(blobs.items())
    for number, some in enumerate((pairs[:2], [*pairs[2:], pairs[2]])):
        shards.make(number, "", lambda *_: True, lambda path, some=some: write_blobs(path, some))
    found = Blobs(shards)
    assert set(found) == set(keys)
    assert len(found) == 5
    assert all(found[key].tolist() == blob.tolist() for key, blob in blobs.items())
    assert found.nbytes == (tmp_path / "00000.blobs").stat().st_size + (tmp_path / "00001.blobs").stat().st_size
    assert found.get(b"same-day" + bytes([7]) * 8) is None
    assert found.get(b"another-" * 2) is None
    assert Blobs(blob_shards(tmp_path / "none", what="", key="")).get(keys[0]) is None
    with pytest.raises(ValueError, match="16 bytes"):
        write_blobs(tmp_path / "x", [(b"short", blobs[keys[0]])])


@pytest.mark.parametrize(
    ("model", "coder", "changes", "told"),
    [
        (lambda: decoder(1), encoder, {}, "weights: "),
        (lambda: quantize_model(decoder()), encoder, {}, "weights: "),
        (lambda: decoder(dtype="bfloat16"), encoder, {}, 'activations: "float32" -> "bfloat16"'),
        (decoder, lambda: encoder(document_tokens=80), {}, "limits.document_tokens: 160 -> 80"),
        (decoder, lambda: encoder("paper_cacheable"), {}, "prompt.prefix"),
        (decoder, encoder, {"score_layer": 0}, "score_layer: 1 -> 0"),
    ],
)
def test_a_store_made_otherwise_is_refused_by_what_differs(folder: Path, model, coder, changes, told: str) -> None:
    with pytest.raises(UserError, match="made otherwise") as error:
        stored(folder, plain(model(), coder(), **changes))
    assert told in str(error.value)
    with pytest.raises(UserError, match="made otherwise"):
        store(folder, plain(model(), coder(), **changes))


def test_what_says_nothing_of_documents_may_differ(folder: Path) -> None:
    """The suffix's words and offset, and how long a query may be, are the query's part."""
    suffix = encoder("paper_cacheable").template.suffix
    coder = PromptEncoder(
        replace(encoder().template, suffix=suffix, name="other"), tokenizer(), PromptLimits(query_tokens=9)
    )
    expected = plain(coder=coder, suffix_offset=1024)
    assert_same(stored(folder, expected), expected, LISTS[1:2])


def test_stores_of_other_documents_and_settings_are_refused(tmp_path: Path, folder: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(folder, copy)
    with pytest.raises(UserError, match="of another collection"):
        store(copy, plain(), SHARDED, documents()[1:])
    with pytest.raises(UserError, match="of another collection"):
        store(copy, plain(), SHARDED, documents()[:7])
    with pytest.raises(UserError, match=r'dtype: "float32" -> "int8"'):
        store(copy, plain(), replace(SHARDED, dtype="int8"))
    with pytest.raises(UserError, match="is no document store"):
        stored(tmp_path / "nowhere", plain())
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/index.json").write_text('{"shards": 1}')
    with pytest.raises(UserError, match="is no document store"):
        stored(tmp_path / "lists", plain())
    (tmp_path / "lists/index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json: not JSON"):
        stored(tmp_path / "lists", plain())


@pytest.mark.parametrize(
    ("template", "changes", "kept", "told"),
    [
        ("brief", {}, EXACT, "numbering=content"),
        ("release", {}, EXACT, "numbering=position"),
        ("paper_query_free", {}, EXACT, "prompt=paper_cacheable"),
        ("brief_cacheable", {"visibility": "dense"}, EXACT, "visibility=dense"),
        ("brief_cacheable", {}, replace(EXACT, representative="title"), "no {query} in its prefix"),
    ],
)
def test_prompts_whose_documents_do_not_stand_alone_are_refused(
    tmp_path: Path, template: str, changes: dict, kept: StoreSettings, told: str
) -> None:
    with pytest.raises(UserError) as error:
        store(tmp_path / "store", plain(coder=encoder(template), **changes), kept)
    assert told in str(error.value)
    assert not (tmp_path / "store").exists()


def with_query() -> PromptEncoder:
    """`brief`, its query before the documents, with numbers by hash."""
    template = replace(PromptTemplate.from_yaml("brief"), numbering="hash", first_number=1000)
    return PromptEncoder(template, tokenizer(), PromptLimits())


def test_a_query_in_the_prefix_needs_a_representative(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="read with the query"):
        store(tmp_path / "store", plain(coder=with_query()))


def test_a_representative_stands_where_the_query_would(tmp_path: Path) -> None:
    """A document whose representative is the very query scores as it does without a store, alone or among its like."""
    query = "where does the river end"
    some = [Document(f"t{i}", text.text, query) for i, text in enumerate(documents()[5:9])]
    expected = plain(coder=with_query())
    kept = replace(EXACT, representative="title")
    report = store(tmp_path / "store", expected, kept, some)
    assert report.documents == 4
    ranker = stored(tmp_path / "store", expected)
    assert_same(ranker, expected, [CandidateList(Query("q", query), tuple(some))])
    assert ranker.computed == 0
    lists = [
        CandidateList(Query("a", "paper"), tuple(some)),
        CandidateList(Query("b", query), tuple(some[:2])),
        CandidateList(Query("c", "stone"), (*documents()[:3], *some)),
    ]
    together, alone = ranker.score(lists), [ranker.score([one])[0] for one in lists]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.scores, other.scores, rtol=0, atol=TOLERANCE)
    assert together[2].extra == {"documents_stored": 4.0, "documents_computed": 3.0}
    plainly = expected.score(lists[:1])[0]
    assert np.abs(together[0].scores - plainly.scores).max() > 10 * TOLERANCE


def test_what_represents_a_document() -> None:
    assert representative(Document("d", "First one. Second one.", " A title ")) == "A title"
    assert representative(Document("d", " First one?  Second one.", "\u200b")) == "First one?"
    assert representative(Document("d", "no end")) == "no end"
    assert representative(Document("d", "v1.5 is out! Yes")) == "v1.5 is out!"


def test_numbers_by_hash_depend_on_the_document_alone() -> None:
    coder = encoder()
    whole, part = coder.numbers(LISTS[0]), coder.numbers(listed(5, 3))
    assert [part[0], part[1]] == [whole[5], whole[3]]
    assert all(1000 <= number <= 9999 for number in whole.values())
    assert len(set(whole.values())) == 11
    first, second = coder.encode(LISTS[0]), coder.encode(listed(5, 3))
    kept = dict(zip(first.document_index, first.documents, strict=True))
    assert [ids.tolist() for ids in second.documents] == [kept[i].tolist() for i in (5, 3)]
    with pytest.raises(UserError, match="numbering=content"):
        GenerativeRanker(decoder(), coder)


def test_a_store_does_not_follow_new_weights(folder: Path) -> None:
    with pytest.raises(UserError, match="other weights"):
        stored(folder, plain()).set_model(decoder(1))


def test_shapes_are_compiled_ahead(folder: Path) -> None:
    ranker = stored(folder, plain())
    shape = ranker.reader.lay_out([ranker.encoder.encode(LISTS[1])]).shape
    before = ranker.compilations
    ranker.warm_up([shape])
    warm = ranker.compilations
    ranker.score(LISTS[3:4])
    assert ranker.compilations == warm
    assert warm - before <= 1


def test_the_report_says_how_large(tmp_path: Path) -> None:
    report = StoreReport(tmp_path, 4, 400, 400 * 14_208, 14_208, 4, 2.0, 0)
    text = str(report)
    assert "4 of 4 documents computed (2.0 documents/s)" in text
    assert "14,208 bytes a token, 100.0 tokens and 1.421 MB a document" in text
    assert "8,841,823 such passages (MS MARCO) would take 12.56 TB" in text
    assert "0 of 0" in str(StoreReport(tmp_path, 0, 0, 0, 14_208, 0, 0.0, 0))


@pytest.mark.slow
def test_smollm2_scores_the_same_with_a_store(tmp_path: Path) -> None:
    model = load_decoder(embedded_model_path())
    settings = replace(SETTINGS, score_layer=None, suffix_offset=8192)
    expected = AttentionRanker(model, encoder("paper_cacheable"), settings)
    store(tmp_path / "store", expected)
    ranker = stored(tmp_path / "store", expected)
    assert_same(ranker, expected)
    assert ranker.computed == 0
    assert isinstance(ranker.store, DocumentStore)
