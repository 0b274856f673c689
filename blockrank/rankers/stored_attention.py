"""The attention ranker with a document store: of a prompt only the query's suffix is run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from blockrank.errors import UserError
from blockrank.layout import TokenLayout
from blockrank.models.decoder import Decoder, TruncatedDecoder
from blockrank.models.document_cache import Kept, suffix_states
from blockrank.prompts.encode import PromptEncoder
from blockrank.rankers.attention import EMPTY_SCORE, AttentionRanker, AttentionSettings
from blockrank.rankers.document_store import DocumentStore, Piece
from blockrank.rankers.reading import Batch, unread
from blockrank.rankers.readout import read_kept_scores
from blockrank.types import CandidateList, ListScores, Ranker

log = logging.getLogger(__name__)


@lru_cache(maxsize=8)
def stored_score_program(
    graph: nnx.GraphDef[TruncatedDecoder], settings: AttentionSettings
) -> Callable[[nnx.State, TokenLayout, Array, Kept], Float[Array, "B N"]]:
    """The jitted function (parameters, layout, prefix's arrays, documents' arrays) -> scores."""

    def score(state: nnx.State, layout: TokenLayout, prefix: Array, documents: Kept) -> Float[Array, "B N"]:
        model = nnx.merge(graph, state)
        options = {"visibility": settings.pattern, "backend": settings.attention_backend}
        suffix = suffix_states(model, layout, prefix, documents, **options)
        keys = documents.layers()[1].restored(model.dtype)
        how = settings.signal_aggregation, settings.length_normalization
        return read_kept_scores(model.score_block, suffix, keys, layout, *how)

    return jax.jit(score)


class StoredAttentionRanker(AttentionRanker):
    """`AttentionRanker`'s scores, with what documents leave behind taken from a store.

    Documents that are not in the store are computed, rounded as the store rounds, and counted: `extra` of a list holds
    `documents_stored` and `documents_computed`, in segments. `tokens` counts the whole prompt. One device.
    """

    def __init__(
        self,
        model: Decoder | TruncatedDecoder,
        encoder: PromptEncoder,
        settings: AttentionSettings | None,
        store: str | Path,
        name: str = "attention",
    ) -> None:
        super().__init__(model, encoder, settings, name)
        assert isinstance(self.model, TruncatedDecoder)
        self.store = DocumentStore(Path(store), self.model, encoder, self.settings)
        self.stored = self.computed = 0
        self._kept_score = stored_score_program(nnx.graphdef(self.model), self.settings)
        self._prefixes: tuple[bytes, Array] | None = None

    def set_model(self, model: Decoder) -> None:
        """Not possible: the store has been made by these weights."""
        del model
        raise UserError(f"{self.store.folder} was made by other weights; rank without a document store")

    @property
    def compilations(self) -> int:
        """How many layout shapes have been compiled so far, for all rankers of such a model and settings."""
        return self._kept_score._cache_size()  # pyright: ignore[reportFunctionMemberAccess]

    def score(self, lists: Sequence[CandidateList]) -> list[ListScores]:
        """Scores of each list in its own order; documents without text score `EMPTY_SCORE`."""
        results = [unread(candidates, EMPTY_SCORE) for candidates in lists]
        before = self.computed

        def program(batch: Batch, layout: TokenLayout) -> tuple[Array, list[int]]:
            pieces = [self.store.reader.pieces(segments, lists[i].documents) for i, segments in batch]
            documents, computed = self._fetch(pieces, layout)
            return self._kept_score(self._state, layout, self._prefix(layout), documents), computed

        for batch, layout, (masses, computed) in self.reader.read(lists, program):
            counts = layout.token_count()
            for (i, segments), mass, tokens, new in zip(
                batch, np.asarray(masses)[: len(batch)], counts, computed, strict=True
            ):
                stored = len(segments.documents) - new
                self.stored, self.computed = self.stored + stored, self.computed + new
                extra = {"documents_stored": float(stored), "documents_computed": float(new)}
                results[i] = replace(self._result(lists[i], segments, mass, int(tokens)), extra=extra)
        if self.computed > before:
            log.info(
                "%d documents were not in %s and have been computed; %d were",
                *(self.computed, self.store.folder, self.stored),
            )
        return results

    def _masses(self, layout: TokenLayout) -> Float[Array, "B N"]:
        """Scores of a layout without a document."""
        documents, _ = self._fetch([[]], layout)
        return self._kept_score(self._state, layout, self._prefix(layout), documents)

    def _fetch(self, pieces: list[list[Piece]], layout: TokenLayout) -> tuple[Kept, list[int]]:
        """The documents' arrays at their places in the rows, zeros elsewhere; how many of each list were computed."""
        reader, segment_ids = self.store.reader, np.asarray(layout.segment_ids)[:, layout.rows]
        blobs = {piece.key: self.store.find(piece) for own in pieces for piece in own}
        absent = {piece.key: piece for own in pieces for piece in own if blobs[piece.key] is None}
        blobs |= dict(reader.read(list(absent.values())))
        arrays = reader.format.empty(*segment_ids.shape)
        for entry, segments in enumerate(segment_ids):
            own = pieces[entry] if entry < len(pieces) else []
            unread = segments < 0 if own else np.ones(len(segments), bool)
            for array in _present(arrays):
                array[:, entry, unread] = 0
            known, starts = np.unique(segments, return_index=True)
            first = dict(zip(known.tolist(), starts.tolist(), strict=True))
            for number, piece in enumerate(own):
                blob = blobs[piece.key]
                assert blob is not None
                where = slice(first[number], first[number] + len(piece.ids))
                for array, part in zip(_present(arrays), _present(reader.format.unpack(blob)), strict=True):
                    array[:, entry, where] = part
        return arrays, [sum(piece.key in absent for piece in own) for own in pieces]

    def _prefix(self, layout: TokenLayout) -> Array:
        """The prefix's arrays [A, B or 1, P, K, H], computed anew where it is another one than before."""
        sliced = {name: getattr(layout, name)[:, layout.prefix] for name in ("tokens", "positions", "segment_ids")}
        if all((values == values[:1]).all() for values in sliced.values()):
            sliced = {name: values[:1] for name, values in sliced.items()}
        key = b"".join(np.ascontiguousarray(values).tobytes() for values in sliced.values())
        if self._prefixes is None or self._prefixes[0] != key:
            lists = len(sliced["tokens"])
            shape = replace(layout.shape, documents=0, rows=0, suffix=0, signals=0, labels=0)
            rest = {name: getattr(layout, name)[:lists, :0] for name in ("signals", "labels", "document_mask")}
            alone = replace(layout, **sliced, **rest, shape=shape)
            self._prefixes = key, self.store.reader.read_prefix(alone)
        return self._prefixes[1]


def kept_as(ranker: Ranker) -> dict[str, Any]:
    """What scores of a ranker with a store depend on beside those of one without, JSON-ready; nothing for others."""
    if not isinstance(ranker, StoredAttentionRanker):
        return {}
    kept = ranker.store.reader.kept
    return {"document_store": {"dtype": kept.dtype, "representative": kept.representative}}


def _present(kept: Kept) -> list[np.ndarray]:
    return [array for array in (kept.scales, kept.values) if array is not None]
