"""The BlockRank ranker: prompts in, attention scores out (arXiv 2510.05396, section 4.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from blockrank.errors import UserError
from blockrank.layout import LayoutShape, TokenLayout
from blockrank.models.config import DecoderConfig
from blockrank.models.decoder import Decoder, TruncatedDecoder, check_score_layer
from blockrank.models.loading import cast_parameters, check_heads, flat_parameters, place_parameters
from blockrank.prompts.encode import PromptEncoder, PromptSegments
from blockrank.rankers.reading import ListReader, ReadingSettings, list_scores, one_of, unread, whole
from blockrank.rankers.readout import Aggregation, attention_scores, check_length_normalization
from blockrank.types import CandidateList, ListScores

EMPTY_SCORE = 0.0
"""Score of a document without text: no attention mass, below every document that has any."""


@dataclass(frozen=True)
class AttentionSettings(ReadingSettings):
    """How prompts are laid out and scores are read.

    `score_layer`: 0-based; None takes the layer at 5/8 of the depth (20 of Mistral's 32). `signal_aggregation`: scores
    of a list sum to the number of signal tokens (`sum`, the paper) or to 1 (`mean`, the released code).
    `length_normalization`: a document's mass is that of all its tokens (0, the paper), per token (1), or over its
    tokens to a power between; the sum of a list's scores stays.
    """

    score_layer: int | None = None
    signal_aggregation: Aggregation = "sum"
    length_normalization: float = 0.0
    kind: Literal["attention"] = "attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "signal_aggregation", get_args(Aggregation))
        check_length_normalization(self.length_normalization)
        if self.score_layer is not None:
            whole(self, "score_layer", 0)

    def layer_of(self, config: DecoderConfig) -> int:
        """The score layer for a model of this depth; `UserError` if it has no such layer."""
        layer = config.num_layers * 5 // 8 if self.score_layer is None else self.score_layer
        check_score_layer(layer, config)
        return layer


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
    model: Decoder | TruncatedDecoder, settings: AttentionSettings
) -> Callable[[nnx.State, TokenLayout], Float[Array, "B N"]]:
    """The jitted function (parameters, layout) -> scores of a model of this structure, which may be abstract."""
    graph = nnx.graphdef(model)
    score_layer = settings.layer_of(model.config) if isinstance(model, Decoder) else model.config.num_layers

    def score(state: nnx.State, layout: TokenLayout) -> Float[Array, "B N"]:
        return attention_scores(
            nnx.merge(graph, state),
            layout,
            score_layer,
            visibility=settings.pattern,
            aggregation=settings.signal_aggregation,
            length_normalization=settings.length_normalization,
            backend=settings.attention_backend,
        )

    return jax.jit(score)


class AttentionRanker:
    """Scores candidate lists by the attention of the signal tokens at the score layer.

    Scores are relative to the list: masses of one list sum to the number of signal tokens (or to 1), so they do not
    compare across lists. Shapes are bucketed; a bucket compiles once. Weights are held in the model's `dtype`. The host
    prepares a batch while the device scores the one before.

    With a `mesh`, the rows of each list are spread over its axis `doc`, lists over `data` and `fsdp`. Without
    `truncate` a whole decoder's weights stay as they are, to be shared with a ranker that decodes; scores are the same.
    """

    score_kind = "mass"

    def __init__(
        self,
        model: Decoder | TruncatedDecoder,
        encoder: PromptEncoder,
        settings: AttentionSettings | None = None,
        name: str = "attention",
        mesh: Mesh | None = None,
        truncate: bool = True,
    ) -> None:
        self.name = name
        self.encoder = encoder
        self.settings = settings or AttentionSettings()
        if self.settings.length_normalization and encoder.limits.long_documents == "split":
            raise UserError(
                f"length_normalization={self.settings.length_normalization} knows the tokens of a part, not those of "
                "the document: set it to 0, or limits.long_documents=truncate"
            )
        if isinstance(model, Decoder):
            layer = self.settings.layer_of(model.config)
            model = model.truncate(layer) if truncate else model
        elif self.settings.score_layer not in (None, model.config.num_layers):
            cut, wanted = model.config.num_layers, self.settings.score_layer
            raise UserError(f"score_layer={wanted}, but this model was truncated at layer {cut}")
        self.mesh = mesh
        if mesh is not None:
            check_heads(model.config, mesh)
        self.reader = ListReader(encoder, self.settings, model.config.max_positions, mesh)
        self._set(model)
        self._score = score_program(self.model, self.settings)

    def set_model(self, model: Decoder) -> None:
        """Score with another model of the same config from now on; nothing is compiled anew."""
        self._set(model if isinstance(self.model, Decoder) else model.truncate(self.model.config.num_layers))

    def _set(self, model: Decoder | TruncatedDecoder) -> None:
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
        results = [unread(candidates, EMPTY_SCORE) for candidates in lists]
        for batch, layout, masses in self.reader.read(lists, lambda _, layout: self._masses(layout)):
            counts = layout.token_count()
            for (i, segments), mass, tokens in zip(batch, np.asarray(masses)[: len(batch)], counts, strict=True):
                results[i] = self._result(lists[i], segments, mass, int(tokens))
        return results

    def warm_up(self, shapes: Iterable[LayoutShape], batch_size: int = 1) -> None:
        """Compile for batches of `batch_size` lists of these shapes (`reader.lay_out(...).shape`) ahead of need.

        Raises `UserError` for a shape in other shards than this ranker's lists.
        """
        for shape in shapes:
            if shape.shards != self.reader.shards:
                raise UserError(
                    f"a shape in {shape.shards} shards cannot warm up a ranker that spreads lists over doc="
                    f"{self.reader.shards} devices: take shapes from its reader's lay_out"
                )
            lists = self.reader.bucket(batch_size)
            blank = TokenLayout.blank(lists, shape, sequential=self.settings.pattern.sequential)
            jax.block_until_ready(self._masses(blank))

    def _masses(self, layout: TokenLayout) -> Float[Array, "B N"]:
        """Scores of a host layout's streams, which the device may still be computing."""
        return self.reader.call(lambda placed: self._score(self._state, placed), layout)

    def _result(self, candidates: CandidateList, segments: PromptSegments, mass: np.ndarray, tokens: int) -> ListScores:
        found = mass[: len(segments.documents)]
        if not np.isfinite(found).all():
            raise UserError(f"query {candidates.query.id!r}: scores are not finite; {self._broken_weights()}")
        scores = np.full(len(candidates), EMPTY_SCORE, np.float32)
        np.add.at(scores, list(segments.document_index), found)
        return list_scores(segments, scores, tokens)

    def _broken_weights(self) -> str:
        broken = [path for path, leaf in flat_parameters(self.model).items() if not np.isfinite(np.asarray(leaf)).all()]
        return f"parameters with NaN or infinity: {', '.join(broken)}" if broken else "the weights are finite"
