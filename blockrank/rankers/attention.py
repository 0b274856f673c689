"""The BlockRank ranker: prompts in, attention scores out (arXiv 2510.05396, section 4.3)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, get_args

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from blockrank.attention.visibility import PATTERNS
from blockrank.errors import UserError
from blockrank.layout import LayoutShape, TokenLayout
from blockrank.models.config import DecoderConfig
from blockrank.models.decoder import Decoder, TruncatedDecoder, check_score_layer
from blockrank.models.loading import cast_parameters, check_heads, flat_parameters, place_parameters
from blockrank.packing import Packing, round_up, round_up_geometric
from blockrank.parallel import LISTS, spread_lists
from blockrank.prompts.encode import PromptEncoder, PromptSegments
from blockrank.rankers.readout import Aggregation, attention_scores
from blockrank.types import CandidateList, ListScores

log = logging.getLogger(__name__)

T = TypeVar("T")
Batch: TypeAlias = list[tuple[int, PromptSegments]]
"""Lists that are scored together: the place of each in the input, and its prompt."""

EMPTY_SCORE = 0.0
"""Score of a document without text: no attention mass, below every document that has any."""


@dataclass(frozen=True)
class AttentionSettings:
    """How prompts are laid out and scores are read.

    `score_layer`: 0-based; None takes the layer at 5/8 of the depth (20 of Mistral's 32). `signal_aggregation`: scores
    of a list sum to the number of signal tokens (`sum`, the paper) or to 1 (`mean`, the released code).
    `batch_tokens`: the most stream tokens, padding included, given to the device at once (a single list may have more).
    """

    score_layer: int | None = None
    signal_aggregation: Aggregation = "sum"
    suffix_offset: int = 8192
    visibility: str = "blockrank"
    packing: Packing = "packed"
    row_length: int = 512
    attention_backend: str = "auto"
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.visibility not in PATTERNS:
            raise UserError(f"visibility={self.visibility!r} is unknown: choose one of {', '.join(PATTERNS)}")
        for name, known in (("signal_aggregation", Aggregation), ("packing", Packing)):
            if getattr(self, name) not in get_args(known):
                raise UserError(f"{name}={getattr(self, name)!r} is unknown: choose {' or '.join(get_args(known))}")
        for name, least in (("row_length", 1), ("suffix_offset", 1), ("batch_tokens", 1), ("score_layer", 0)):
            value = getattr(self, name)
            if name == "score_layer" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise UserError(f"{name}={value!r} must be a whole number from {least} on")

    def layer_of(self, config: DecoderConfig) -> int:
        """The score layer for a model of this depth; `UserError` if it has no such layer."""
        layer = config.num_layers * 5 // 8 if self.score_layer is None else self.score_layer
        check_score_layer(layer, config)
        return layer

    def positions(self, shape: LayoutShape) -> int:
        """How many positions a layout of this shape has at most."""
        return shape.tokens if PATTERNS[self.visibility].sequential else self.suffix_offset + shape.suffix

    def lay_out(
        self, batch: Sequence[PromptSegments], *, shape: LayoutShape | None = None, bucket: bool = True, shards: int = 1
    ) -> TokenLayout:
        """A batch of prompts, with the positions the visibility is meant for."""
        return TokenLayout.from_segments(
            batch,
            row_length=self.row_length,
            packing=self.packing,
            suffix_offset=None if PATTERNS[self.visibility].sequential else self.suffix_offset,
            shape=shape,
            bucket=bucket,
            shards=shards,
        )


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"suffix_offset": 8192, "signal_aggregation": "sum"},
    "release": {"suffix_offset": 16384, "signal_aggregation": "mean"},
}
"""Where the paper and the released checkpoint read scores differently; docs/numerics.md lists every difference."""


def preset_settings(preset: str, **overrides: Any) -> AttentionSettings:
    """The settings of a preset, with any field overridden."""
    if preset not in PRESETS:
        raise UserError(f"preset={preset!r} is unknown: choose one of {', '.join(PRESETS)}")
    return replace(AttentionSettings(**PRESETS[preset]), **overrides)


def score_program(
    model: TruncatedDecoder, settings: AttentionSettings
) -> Callable[[nnx.State, TokenLayout], Float[Array, "B N"]]:
    """The jitted function (parameters, layout) -> scores of a model of this structure, which may be abstract."""
    graph = nnx.graphdef(model)
    score_layer = model.config.num_layers

    def score(state: nnx.State, layout: TokenLayout) -> Float[Array, "B N"]:
        return attention_scores(
            nnx.merge(graph, state),
            layout,
            score_layer,
            visibility=PATTERNS[settings.visibility],
            aggregation=settings.signal_aggregation,
            backend=settings.attention_backend,
        )

    return jax.jit(score)


class AttentionRanker:
    """Scores candidate lists by the attention of the signal tokens at the score layer.

    Scores are relative to the list: masses of one list sum to the number of signal tokens (or to 1), so they do not
    compare across lists. Shapes are bucketed; a bucket compiles once. Weights are held in the model's `dtype`. The host
    prepares a batch while the device scores the one before.

    With a `mesh`, the rows of each list are spread over its axis `doc`, lists over `data` and `fsdp`.
    """

    def __init__(
        self,
        model: Decoder | TruncatedDecoder,
        encoder: PromptEncoder,
        settings: AttentionSettings | None = None,
        name: str = "attention",
        mesh: Mesh | None = None,
    ) -> None:
        self.name = name
        self.encoder = encoder
        self.settings = settings or AttentionSettings()
        if isinstance(model, Decoder):
            model = model.truncate(self.settings.layer_of(model.config))
        cut, wanted = model.config.num_layers, self.settings.score_layer
        if wanted not in (None, cut):
            raise UserError(f"score_layer={wanted}, but this model was truncated at layer {cut}")
        self.mesh = mesh
        self._shards = 1 if mesh is None else mesh.shape["doc"]
        self._list_groups = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in LISTS)
        if mesh is not None:
            check_heads(model.config, mesh)
        self._positions_told = False
        self._set(model)
        self._score = score_program(self.model, self.settings)

    def note_positions(self, count: int) -> None:
        """Tell, once, of positions beyond those the model was trained for, where RoPE extrapolates.

        A warning where they hold running text; under BlockRank only the suffix lies there, by choice.
        """
        known = self.model.config.max_positions
        if count <= known or self._positions_told:
            return
        self._positions_told = True
        text = f"positions run to {count}, past the model's max_position_embeddings={known}: RoPE extrapolates"
        if PATTERNS[self.settings.visibility].sequential:
            log.warning("%s; rank fewer or shorter documents, or take a model with a longer context", text)
        else:
            log.info("%s; ranker.suffix_offset=%d says where the suffix lies", text, self.settings.suffix_offset)

    def set_model(self, model: Decoder) -> None:
        """Score with another model of the same config from now on; nothing is compiled anew."""
        self._set(model.truncate(self.model.config.num_layers))

    def _set(self, model: TruncatedDecoder) -> None:
        self.model = cast_parameters(model, model.dtype)
        self._state = nnx.state(self.model)
        if self.mesh is not None:
            self._state = place_parameters(self._state, self.mesh)
            nnx.update(self.model, self._state)

    @property
    def compilations(self) -> int:
        """How many layout shapes have been compiled so far."""
        return self._score._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    def score(self, lists: Sequence[CandidateList]) -> list[ListScores]:
        """Scores of each list in its own order; documents without text score `EMPTY_SCORE`."""
        results = [self._unread(candidates) for candidates in lists]
        for batch, layout, masses in _one_late(self._launch(lists)):
            counts = layout.token_count()
            for (i, segments), mass, tokens in zip(batch, np.asarray(masses)[: len(batch)], counts, strict=True):
                results[i] = self._result(lists[i], segments, mass, int(tokens))
        return results

    def warm_up(self, shapes: Iterable[LayoutShape], batch_size: int = 1) -> None:
        """Compile for batches of `batch_size` lists of these shapes (`lay_out(...).shape`) ahead of need.

        Raises `UserError` for a shape in other shards than this ranker's lists.
        """
        sequential = PATTERNS[self.settings.visibility].sequential
        for shape in shapes:
            if shape.shards != self._shards:
                raise UserError(
                    f"a shape in {shape.shards} shards cannot warm up a ranker that spreads lists over doc="
                    f"{self._shards} devices: take shapes from its own lay_out"
                )
            blank = TokenLayout.blank(self._bucket(batch_size), shape, sequential=sequential)
            jax.block_until_ready(self._masses(blank))

    def lay_out(self, batch: Sequence[PromptSegments]) -> TokenLayout:
        """A batch of prompts in bucketed shape, in as many shards as the mesh has devices for a list."""
        return self.settings.lay_out(batch, shards=self._shards)

    def _bucket(self, lists: int) -> int:
        """How many lists a batch is padded to, so that few sizes are compiled and each device group has as many."""
        return round_up(round_up_geometric(lists), self._list_groups)

    def _masses(self, layout: TokenLayout) -> Float[Array, "B N"]:
        """Scores of a host layout's streams, which the device may still be computing."""
        if self.mesh is None:
            return self._score(self._state, layout)
        with jax.set_mesh(self.mesh):
            return self._score(self._state, spread_lists(layout, self.mesh))

    def _launch(self, lists: Sequence[CandidateList]) -> Iterator[tuple[Batch, TokenLayout, Array]]:
        """Each batch, with the scores that the device is still computing while the next one is encoded and laid out."""
        for batch in self._batches(lists):
            layout = self.lay_out([segments for _, segments in batch])
            self.note_positions(int(layout.positions.max()) + 1)
            yield batch, layout, self._masses(_pad_batch(layout, self._bucket(len(batch))))

    def _batches(self, lists: Sequence[CandidateList]) -> Iterator[Batch]:
        """Lists that have something to read, in order, as many together as `batch_tokens` allows."""
        batch: Batch = []
        shape: LayoutShape | None = None
        for i, candidates in enumerate(lists):
            segments = self.encoder.encode(candidates) if candidates.documents else None
            if segments is None or not segments.documents:
                continue
            self._check_rows(candidates, segments)
            own = self.lay_out([segments]).shape
            joint = own if shape is None else shape.union(own)
            if batch and round_up_geometric(len(batch) + 1) * joint.tokens > self.settings.batch_tokens:
                yield batch
                batch, joint = [], own
            batch.append((i, segments))
            shape = joint
        if batch:
            yield batch

    def _check_rows(self, candidates: CandidateList, segments: PromptSegments) -> None:
        lengths = [len(tokens) for tokens in segments.documents]
        longest = int(np.argmax(lengths))
        if lengths[longest] > self.settings.row_length:
            document = candidates.documents[segments.document_index[longest]]
            raise UserError(
                f"query {candidates.query.id!r}: document {document.id!r} has {lengths[longest]} tokens, more than a "
                f"row holds: raise row_length={self.settings.row_length}, or lower "
                f"document_tokens={self.encoder.limits.document_tokens}"
            )

    def _result(self, candidates: CandidateList, segments: PromptSegments, mass: np.ndarray, tokens: int) -> ListScores:
        found = mass[: len(segments.documents)]
        if not np.isfinite(found).all():
            raise UserError(f"query {candidates.query.id!r}: scores are not finite; {self._broken_weights()}")
        scores = np.full(len(candidates), EMPTY_SCORE, np.float32)
        np.add.at(scores, list(segments.document_index), found)
        return ListScores(scores, np.asarray(segments.truncated, bool), segments.query_truncated, tokens)

    @staticmethod
    def _unread(candidates: CandidateList) -> ListScores:
        n = len(candidates)
        return ListScores(np.full(n, EMPTY_SCORE, np.float32), np.zeros(n, bool))

    def _broken_weights(self) -> str:
        broken = [path for path, leaf in flat_parameters(self.model).items() if not np.isfinite(np.asarray(leaf)).all()]
        return f"parameters with NaN or infinity: {', '.join(broken)}" if broken else "the weights are finite"


def _one_late(items: Iterable[T]) -> Iterator[T]:
    """The same items, each given out when the next has been made."""
    waiting: list[T] = []
    for item in items:
        yield from waiting
        waiting = [item]
    yield from waiting


def _pad_batch(layout: TokenLayout, size: int) -> TokenLayout:
    """Repeat the last list up to `size` lists."""
    shards = layout.shape.shards
    lists = layout.tokens.shape[0] // shards
    spare = size - lists

    def pad(x: np.ndarray) -> np.ndarray:
        streams = x.reshape(shards, lists, *x.shape[1:])
        padded = np.concatenate([streams, np.repeat(streams[:, -1:], spare, axis=1)], axis=1)
        return padded.reshape(shards * size, *x.shape[1:])

    return jax.tree.map(pad, layout) if spare else layout
