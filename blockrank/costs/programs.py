"""The programs a user will run, over shapes alone: ranking a list of N documents, and a training step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from blockrank.attention.visibility import PATTERNS
from blockrank.costs.flops import block_weights, causal_pairs, visible_pairs
from blockrank.costs.step_flops import Counts, StepFlops
from blockrank.errors import at_least
from blockrank.layout import LayoutShape
from blockrank.models.config import DecoderConfig
from blockrank.models.decoder import Decoder
from blockrank.models.loading import cast_parameters, check_heads, place_parameters
from blockrank.parallel import LISTS, place_state, spread_lists
from blockrank.prompts.encode import PromptSegments
from blockrank.rankers.attention import AttentionSettings, score_program
from blockrank.training.dry_run import abstract_step
from blockrank.training.optimizer import Trainable
from blockrank.training.recipe import TrainConfig


@dataclass(frozen=True)
class PromptLengths:
    """Tokens of the prompts to plan for, scaffold included.

    Documents have `document` tokens on average, at most `longest`: a gamma distribution with the spread of MS MARCO's
    passages (0.4 of the mean), cut, drawn with seed 0.
    """

    prefix: int = 96
    document: int = 75
    longest: int = 160
    suffix: int = 80

    def __post_init__(self) -> None:
        at_least(self, 1, "prefix", "document")
        at_least(self, self.document, "longest")
        at_least(self, 2, "suffix")  # its last two tokens are the signals

    def draw(self, documents: int) -> PromptSegments:
        """A prompt of that many documents; its tokens are all 1."""
        lengths = draw_lengths(documents, self.document, self.longest)
        ones = [np.ones(n, np.int32) for n in (self.prefix, *lengths, self.suffix)]
        return PromptSegments(
            prefix=ones[0],
            documents=tuple(ones[1:-1]),
            document_index=tuple(range(documents)),
            suffix=ones[-1],
            signals=(self.suffix - 2, self.suffix - 1),
            answer_start=self.suffix,
            truncated=(False,) * documents,
            query_truncated=False,
        )


def draw_lengths(count: int, mean: int, longest: int) -> np.ndarray:
    """Tokens of passages, int [count], as `PromptLengths` says."""
    drawn = np.random.default_rng(0).gamma(6.25, mean / 6.25, count)
    return np.clip(np.rint(drawn * count * mean / max(drawn.sum(), 1)), 1, longest).astype(int)


@dataclass(frozen=True)
class Planned:
    """A program ready to compile: `function.lower(*arguments)` under the mesh.

    `ideal_flops` is the least work of one device: products of weights and of visible pairs, on real tokens only, with
    prefix and suffix on every device and documents dealt evenly, and in training the gradients that are needed.
    `layout_flops` counts padded tokens too. Of lists of `documents`, `fixed_flops` are those of prefix and suffix,
    padding included, that do not grow with the documents.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    mesh: Mesh
    shape: LayoutShape
    blocks: int
    ideal_flops: float
    layout_flops: float
    documents: int = 0
    fixed_flops: float = 0.0

    def compile(self) -> Any:
        with jax.set_mesh(self.mesh):
            return self.function.lower(*self.arguments).compile()


def ranking_program(
    decoder: DecoderConfig, dtype: str, settings: AttentionSettings, lengths: PromptLengths, documents: int, mesh: Mesh
) -> Planned:
    """Scores of one list per group of devices (axes `data` and `fsdp`), weights in `dtype`."""
    check_heads(decoder, mesh)
    layer = settings.layer_of(decoder)
    model = nnx.eval_shape(lambda: _truncated(decoder, layer, jnp.dtype(dtype)))
    shards, lists = mesh.shape["doc"], mesh.shape["data"] * mesh.shape["fsdp"]
    segments = lengths.draw(documents)
    layout = settings.lay_out([segments] * lists, shards=shards)
    arguments = place_parameters(nnx.state(model), mesh), spread_lists(abstract(layout), mesh)
    own = [len(segments.prefix), sum(map(len, segments.documents)) / shards, len(segments.suffix)]
    attended, apart = _visible_pairs(segments, shards), visible_pairs(replace(segments, documents=()))
    shape = layout.shape
    tensor = mesh.shape["tensor"]
    return Planned(
        name=f"rank N={documents}",
        function=score_program(model, settings),
        arguments=arguments,
        mesh=mesh,
        shape=shape,
        blocks=layer,
        ideal_flops=layer * block_flops(decoder, sum(own), attended) / tensor,
        layout_flops=layer * block_flops(decoder, shape.tokens, attended) / tensor,
        documents=documents,
        fixed_flops=layer * block_flops(decoder, shape.prefix + shape.suffix, apart) / tensor,
    )


def training_program(config: TrainConfig, mesh: Mesh) -> Planned:
    """One optimiser step on lists as long as the limits allow, with the whole loss.

    The ideal is that of `StepFlops`, as training logs it: gradients of what is trained, blocks that the loss needs. The
    layout's counts padding and, with `remat=full`, one more forward pass.
    """
    decoder = config.model.decoder_config()
    config.check_mesh(mesh)
    groups = math.prod(mesh.shape[axis] for axis in LISTS)
    plan = abstract_step(config, mesh)
    lists, params = config.trainer.batch_size // groups, plan.state.params
    objective = config.objective(config.ranker.layer_of(decoder))
    needed = StepFlops.of(decoder, params, Trainable.of(params, config.optimizer), objective)
    blocks = decoder.num_layers if objective.ntp_weight > 0 else objective.score_layer
    real = _longest_counts(config, plan.shape, lists)
    padded = replace(real, tokens=lists * plan.shape.tokens)
    again = blocks * block_flops(decoder, padded.tokens, padded.pairs) if config.loss.remat == "full" else 0.0
    return Planned(
        name=f"train {config.trainer.batch_size} lists of {config.lists.num_candidates}",
        function=plan.step,
        arguments=(place_state(plan.state, params, mesh), spread_lists(plan.batch, mesh)),
        mesh=mesh,
        shape=plan.shape,
        blocks=blocks,
        ideal_flops=needed.total(real) / mesh.shape["tensor"],
        layout_flops=(needed.total(padded) + again) / mesh.shape["tensor"],
    )


def _longest_counts(config: TrainConfig, shape: LayoutShape, lists: int) -> Counts:
    """What one device has of `lists` lists as long as the limits allow, each over `shape.shards` devices."""
    segments = _longest_list(config)
    dense = PATTERNS[config.ranker.visibility].sequential
    pairs = causal_pairs(segments.num_tokens) if dense else _visible_pairs(segments, shape.shards)
    documents = sum(map(len, segments.documents)) / shape.shards
    return Counts(
        tokens=round(lists * (len(segments.prefix) + documents + len(segments.suffix))),
        pairs=round(lists * pairs),
        documents=round(lists * documents),
        signals=lists * shape.signals,
        scored=round(lists * shape.signals * documents),
        labels=lists * shape.labels,
    )


def _longest_list(config: TrainConfig) -> PromptSegments:
    """A training list whose every part is as long as its limit."""
    limits = config.limits
    assert limits.prefix_tokens is not None
    assert limits.document_tokens is not None
    assert limits.suffix_tokens is not None
    ends = PromptLengths(prefix=limits.prefix_tokens, suffix=limits.suffix_tokens).draw(0)
    return replace(ends, documents=(np.ones(limits.document_tokens, np.int32),) * config.lists.num_candidates)


def block_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """Products of one block: two per weight and token, four per visible pair and feature of the heads."""
    heads = config.num_heads * config.head_dim
    return 2.0 * block_weights(config) * tokens + 4.0 * heads * pairs


def abstract(tree: Any) -> Any:
    """Shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _truncated(decoder: DecoderConfig, layer: int, dtype: jnp.dtype) -> Any:
    return cast_parameters(Decoder(decoder, rngs=nnx.Rngs(0), dtype=dtype).truncate(layer), dtype)


def _visible_pairs(segments: PromptSegments, shards: int) -> float:
    """Pairs of query and key that a device computes, under BlockRank's pattern."""
    on_every_device = visible_pairs(replace(segments, documents=()))
    return on_every_device + (visible_pairs(segments) - on_every_device) / shards
