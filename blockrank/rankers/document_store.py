"""Documents read once and kept on disk, for rankers that then run the query's part of a prompt only.

A kept document is named by the tokens it was made of, its prefix's and its own. So a store needs no ids, a changed text
is another document, and what is found is what would be computed. `models/document_cache.py` says why it is exact,
`data/blobs.py` how it lies on disk.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from blockrank.attention.visibility import Visibility
from blockrank.config import build, differences, to_plain
from blockrank.data.blobs import Blob, Blobs, blob_shards, is_whole, write_blobs
from blockrank.data.progress import track
from blockrank.data.shards import ALL, Part, ShardFolder, digest_of, read_index
from blockrank.errors import UserError, at_least
from blockrank.layout import TokenLayout
from blockrank.models.decoder import TruncatedDecoder
from blockrank.models.document_cache import Kept, KeptDtype, KeptFormat, keep, read_documents
from blockrank.models.loading import weights_fingerprint
from blockrank.packing import round_up, round_up_geometric
from blockrank.prompts.encode import PromptEncoder, PromptSegments
from blockrank.rankers.reading import ReadingSettings
from blockrank.types import CandidateList, Document, Query, has_text

PASSAGES = 8_841_823
"""Those of MS MARCO: what a store of them would take is printed beside what this one takes."""


@dataclass(frozen=True)
class StoreSettings:
    """How documents are kept.

    `dtype`: float32, bfloat16, or int8 codes with a float32 scale per token and head. `representative`: what stands in
    the query's place of a prompt whose prefix has one: `title`, the document's own, or where it has none its first
    sentence. `shard_documents`: documents in a file, and what a killed run loses at most.
    """

    dtype: KeptDtype = "bfloat16"
    representative: Literal["title"] | None = None
    shard_documents: int = 256

    def __post_init__(self) -> None:
        at_least(self, 1, "shard_documents")


class Piece(NamedTuple):
    """One segment of a document, int32 ids [n], and the prefix it is read after, int32 ids [P]."""

    prefix: np.ndarray
    ids: np.ndarray

    @property
    def key(self) -> bytes:
        """A hash of the ids: equal keys, equal kept arrays."""
        head = len(self.prefix).to_bytes(8, "little") + self.prefix.astype("<i4").tobytes()
        return hashlib.blake2b(head + self.ids.astype("<i4").tobytes(), digest_size=16).digest()


def representative(document: Document) -> str:
    """The title, or where it shows nothing the first sentence of the text."""
    if has_text(document.title):
        return document.title.strip()
    return re.split(r"(?<=[.!?])\s", document.text.strip(), maxsplit=1)[0]


class DocumentReader:
    """Runs documents through the layers before the score layer, and says what they leave behind.

    Raises `UserError` for a prompt or a visibility under which a document depends on more than itself.
    """

    def __init__(
        self, model: TruncatedDecoder, encoder: PromptEncoder, settings: ReadingSettings, kept: StoreSettings
    ) -> None:
        _check(encoder, settings, kept)
        self.model, self.encoder, self.settings, self.kept = model, encoder, settings, kept
        self.format = KeptFormat.of(model.config, kept.dtype)
        self._state = nnx.state(model)
        self._read = _read_program(nnx.graphdef(model), settings.pattern, settings.attention_backend)

    def identity(self) -> dict[str, Any]:
        """All that kept arrays depend on beside the documents, JSON-ready."""
        template, limits = self.encoder.template, self.encoder.limits
        prompt = {
            "numbering": template.numbering,
            "first_number": template.first_number,
            "chat": template.chat,
            "prefix": [piece.to_config() for piece in template.prefix],
            "document": [piece.to_config() for piece in template.document],
            "prefix_ids": hashlib.sha256(self.encoder.prefix("query").tobytes()).hexdigest(),
            "tokenizer": self.encoder.tokenizer.fingerprint,
        }
        cut = ["document_tokens", "long_documents"]
        if self.kept.representative is not None:
            cut += ["query_tokens", "prefix_tokens", "suffix_tokens"]
        return {
            "kind": "documents",
            "format": 1,
            "weights": weights_fingerprint(self.model),
            "model": to_plain(self.model.config),
            "score_layer": self.model.config.num_layers,
            "activations": str(jnp.dtype(self.model.dtype)),
            "prompt": prompt,
            "limits": {name: getattr(limits, name) for name in cut},
            "dtype": self.kept.dtype,
            "representative": self.kept.representative,
        }

    def pieces(self, segments: PromptSegments, documents: Sequence[Document]) -> list[Piece]:
        """What the segments of a prompt about `documents` are made of."""
        if self.kept.representative is None:
            return [Piece(segments.prefix, ids) for ids in segments.documents]
        prefixes = {i: self.encoder.prefix(representative(documents[i])) for i in segments.document_index}
        own = zip(segments.documents, segments.document_index, strict=True)
        return [Piece(prefixes[i], ids) for ids, i in own]

    def pieces_of(self, documents: Sequence[Document]) -> list[Piece]:
        """Those of documents alone; one without text has none, a split one has several."""
        alone = CandidateList(Query("", "query"), tuple(documents))
        return self.pieces(self.encoder.encode(alone), documents)

    def read(self, pieces: Sequence[Piece]) -> Iterator[Blob]:
        """Each piece's key and bytes, in order. Memory is that of `batch_tokens` tokens."""
        for batch in self._batches(pieces):
            layout = self._lay_out(batch)
            found = jax.tree.map(np.asarray, self._read(self._state, layout, dtype=self.kept.dtype))
            for piece, (entry, start) in zip(batch, self._places(batch, layout), strict=True):
                own = slice(start, start + len(piece.ids))
                yield piece.key, self.format.pack(jax.tree.map(lambda x: x[:, entry, own], found))  # noqa: B023

    def read_prefix(self, layout: TokenLayout) -> jax.Array:
        """float32 [A, B, P, K, H] of a layout's prefixes alone."""
        return self._read(self._state, layout, dtype="float32").values

    @property
    def _shared(self) -> bool:
        """Whether all documents have one prefix."""
        return self.kept.representative is None

    def _batches(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        batch: list[Piece] = []
        tokens = longest = 0
        for piece in pieces:
            longest = max(longest, len(piece.prefix) + round_up(len(piece.ids), 32))
            tokens = tokens + len(piece.ids) if self._shared else round_up_geometric(len(batch) + 1) * longest
            if batch and tokens > self.settings.batch_tokens:
                yield batch
                batch, longest = [], len(piece.prefix) + round_up(len(piece.ids), 32)
                tokens = len(piece.ids) if self._shared else longest
            batch.append(piece)
        if batch:
            yield batch

    def _lay_out(self, batch: Sequence[Piece]) -> TokenLayout:
        """One list of all pieces, or a list for each where prefixes differ."""
        longest = max(len(piece.ids) for piece in batch)
        if self._shared:
            row_length = max(self.settings.row_length, longest)
            lists = [_prompt(batch[0].prefix, [piece.ids for piece in batch])]
        else:
            row_length = round_up(longest, 32)
            lists = [_prompt(piece.prefix, [piece.ids]) for piece in batch]
            lists += lists[-1:] * (round_up_geometric(len(lists)) - len(lists))
        options = {"packing": self.settings.packing, "suffix_offset": self.settings.suffix_offset}
        return TokenLayout.from_segments(lists, row_length=row_length, **options)

    def _places(self, batch: Sequence[Piece], layout: TokenLayout) -> Iterator[tuple[int, int]]:
        """(list, first token) of each piece."""
        for number in range(len(batch)):
            entry, segment = (0, number) if self._shared else (number, 0)
            yield entry, int(np.argmax(layout.segment_ids[entry] == segment))


@lru_cache(maxsize=8)
def _read_program(graph: nnx.GraphDef[TruncatedDecoder], visibility: Visibility, backend: str) -> Callable[..., Kept]:
    """The jitted function (parameters, layout, dtype=) -> kept arrays of models of a structure."""

    def read(state: nnx.State, layout: TokenLayout, dtype: KeptDtype) -> Kept:
        return keep(read_documents(nnx.merge(graph, state), layout, visibility=visibility, backend=backend), dtype)

    return jax.jit(read, static_argnames="dtype")


def _prompt(prefix: np.ndarray, documents: Sequence[np.ndarray]) -> PromptSegments:
    count = len(documents)
    return PromptSegments(prefix, tuple(documents), tuple(range(count)), prefix[:0], (), 0, (False,) * count, False)


def _check(encoder: PromptEncoder, settings: ReadingSettings, kept: StoreSettings) -> None:
    template, pattern = encoder.template, settings.pattern
    prompt = f"prompt {template.name!r}"
    if pattern.sequential or not pattern.documents_apart:
        raise UserError(
            f"visibility={pattern.name}: a document reads those before it, so there is nothing to keep of it alone; "
            "a document store needs visibility=blockrank"
        )
    if template.numbering != "hash":
        raise UserError(
            f"{prompt} numbers documents by numbering={template.numbering}: a document reads its number, which depends "
            "on its list; a document store needs prompt=paper_cacheable, or prompt.numbering=hash"
        )
    if template.query_in_prefix and kept.representative is None:
        raise UserError(
            f"{prompt} has {{query}} in its prefix, so documents are read with the query and cannot be kept; take "
            "prompt=paper_cacheable, or let something stand in its place: kept.representative=title"
        )
    if not template.query_in_prefix and kept.representative is not None:
        raise UserError(
            f"kept.representative={kept.representative}: {prompt} has no {{query}} in its prefix, where it would stand"
        )


@dataclass(frozen=True)
class StoreReport:
    """What a store holds, and what of it was made just now, in `seconds`. `missing`: shards left to other processes."""

    folder: Path
    documents: int
    tokens: int
    nbytes: int
    token_bytes: int
    computed: int
    seconds: float
    missing: int

    def __str__(self) -> str:
        made = f"{self.computed:,} of {self.documents:,} documents computed"
        made += f" ({self.computed / self.seconds:,.1f} documents/s)" if self.computed else ""
        rest = f"; {self.missing} shards are left to other processes" if self.missing else ""
        if not self.documents:
            return f"{self.folder}: {made}{rest}"
        each = self.nbytes / self.documents
        return (
            f"{self.folder}: {made}{rest}\n"
            f"{self.token_bytes:,} bytes a token, {self.tokens / self.documents:.1f} tokens and {each / 1e6:.3f} MB a "
            f"document, {self.nbytes / 1e9:.3f} GB in all; {PASSAGES:,} such passages (MS MARCO) would take "
            f"{each * PASSAGES / 1e12:.2f} TB"
        )


def write_store(
    folder: Path, reader: DocumentReader, documents: Iterable[Document], *, total: int, part: Part = ALL
) -> StoreReport:
    """Reads documents into `folder`; shards that are there already are checked against the texts and kept.

    Documents without text are left out. Memory is that of a shard's texts and of `batch_tokens` tokens. Of several
    processes each makes its `part` of the shards. `total` is for the progress bar. Raises `UserError` for a folder made
    otherwise, or of other documents.
    """
    identity = {**reader.identity(), "shard_documents": reader.kept.shard_documents}
    known = read_index(folder)
    if known is not None:
        _compare(folder, known, identity)
    shards = _shards(folder)
    shards.open(identity)
    texts = (document for document in documents if not document.is_empty)
    count = computed = 0
    seconds = 0.0
    with track("reading documents", total) as advance:
        for number in itertools.count():
            group = list(itertools.islice(texts, reader.kept.shard_documents))
            if not group:
                break

            def write(path: Path, group: list[Document] = group) -> dict[str, Any]:
                return {"documents": len(group), **write_blobs(path, reader.read(reader.pieces_of(group)))}

            started = time.perf_counter()
            asked = digest_of((document.title, document.text) for document in group)
            if number in part and shards.make(number, asked, is_whole, write):
                computed, seconds = computed + len(group), seconds + time.perf_counter() - started
            count = number + 1
            advance(len(group))
    if shards.record(count) is not None:
        raise shards.changed()
    records = [shards.record(number) for number in range(count)]
    there = [record for record in records if record is not None]
    nbytes = sum(sum(record["sizes"]) for record in there)
    return StoreReport(
        folder=folder,
        documents=sum(record["documents"] for record in there),
        tokens=nbytes // reader.format.token_bytes,
        nbytes=nbytes,
        token_bytes=reader.format.token_bytes,
        computed=computed,
        seconds=seconds,
        missing=count - len(there),
    )


class DocumentStore:
    """A folder of kept documents, made with the weights, prompt and limits that a ranker has.

    Raises `UserError` that names what differs. A store that is not finished is one of fewer documents.
    """

    def __init__(
        self, folder: Path, model: TruncatedDecoder, encoder: PromptEncoder, settings: ReadingSettings
    ) -> None:
        index = read_index(folder)
        if index is None or index.get("kind") != "documents":
            raise UserError(f"{folder} is no document store; make one with python -m blockrank.store store={folder}")
        names = [f.name for f in fields(StoreSettings)]
        kept = build(StoreSettings, {name: index[name] for name in names if name in index}, str(folder))
        self.reader = DocumentReader(model, encoder, settings, kept)
        self.identity = {**self.reader.identity(), "shard_documents": kept.shard_documents}
        _compare(folder, index, self.identity)
        self.folder = folder
        self._blobs = Blobs(_shards(folder))

    def __len__(self) -> int:
        return len(self._blobs)

    def find(self, piece: Piece) -> np.ndarray | None:
        """The bytes kept of a piece, uint8; None where it is not here."""
        return self._blobs.get(piece.key)


def _shards(folder: Path) -> ShardFolder:
    return blob_shards(folder, what="kept documents", key="store")


def _compare(folder: Path, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = differences(known, to_plain(wanted))
    if found:
        raise UserError(
            f"{folder}: this document store was made otherwise (made with -> asked for): {found}; take the model, "
            "prompt and limits it was made with, or make another with python -m blockrank.store"
        )
