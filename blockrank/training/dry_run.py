"""What a training run will cost, told from shapes alone: no weights, no data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import AbstractMesh, Mesh

from blockrank.attention.visibility import PATTERNS
from blockrank.config import to_plain
from blockrank.errors import UserError
from blockrank.layout import LayoutShape, TokenLayout
from blockrank.losses import TrainingBatch
from blockrank.models.lora import abstract_start
from blockrank.parallel import place_state
from blockrank.prompts.template import PromptTemplate
from blockrank.training.optimizer import Trainable, make_optimizer, master_weights
from blockrank.training.recipe import TrainConfig
from blockrank.training.state import TrainState, count_parameters, split_model, state_shapes
from blockrank.training.step import Step, make_train_step, ranking_loss_fn, ranking_share_fn

ANSWER_TOKENS = 8
"""Answer tokens allowed for on top of the suffix's limit."""


def dry_run(config: TrainConfig) -> str:
    """Builds model, optimiser state and step by shapes alone; returns their sizes and the resolved config as text.

    The mesh needs no devices: `mesh.fsdp=8` is planned for eight also where one is present.
    """
    PromptTemplate.from_config(config.prompt, "prompt")
    decoder = config.model.decoder_config()
    mesh = config.mesh.abstract()
    config.check_mesh(mesh)
    plan = abstract_step(config, mesh)
    params, shape = plan.state.params, plan.shape
    trainable = Trainable.of(params, config.optimizer)
    with jax.sharding.use_abstract_mesh(mesh):
        _, metrics = jax.eval_shape(plan.step, plan.state, plan.batch)
    lists, accumulation = config.trainer.batch_size, config.trainer.accumulation
    on_each = f", on each of {shape.shards} devices" if shape.shards > 1 else ""
    placed = jax.tree.leaves(place_state(plan.state, params, mesh))
    own = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in placed)
    lines = [
        f"parameters: {count_parameters(params):,} ({_gigabytes(params)}), trainable "
        f"{count_parameters(jax.eval_shape(trainable.take, params)):,}",
        f"optimizer state: {_gigabytes(plan.state.optimizer_state)}",
        f"mesh: {dict(mesh.shape)}; parameters and optimizer state of one device: {own / 1e9:,.2f} GB",
        f"score layer: {config.ranker.layer_of(decoder)} of {decoder.num_layers}",
        f"tokens per step: {lists * shape.shards * shape.tokens:,} at most, in {accumulation} micro-batches",
        f"tokens per list: {shape.shards * shape.tokens:,} at most, {lists} lists: prefix {shape.prefix}, "
        f"{shape.rows} rows of {shape.row_length}, suffix {shape.suffix}{on_each}",
        f"metrics: {', '.join(sorted(metrics))}",
        "",
        yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True, width=120),
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class AbstractStep:
    """The jitted training step with the shapes it takes, for lists as long as the limits allow."""

    step: Step
    state: TrainState
    batch: TrainingBatch
    shape: LayoutShape


def abstract_step(config: TrainConfig, mesh: Mesh | AbstractMesh) -> AbstractStep:
    """Builds model, optimiser state and step by shapes alone; the mesh says in how many shards the lists come."""
    decoder = config.model.decoder_config()
    graphdef, params = split_model(abstract_start(decoder, jnp.dtype(config.model.dtype), config.optimizer.lora))
    optimizer, schedule = make_optimizer(config.optimizer, config.trainer.total_steps or 10_000)
    params = master_weights(params, config.optimizer)
    trainable = Trainable.of(params, config.optimizer)
    state = state_shapes(params, optimizer, trainable)
    objective = config.objective(config.ranker.layer_of(decoder))
    step = make_train_step(
        graphdef,
        ranking_loss_fn(objective),
        optimizer,
        schedule,
        trainable,
        accumulation=config.trainer.accumulation,
        share_fn=ranking_share_fn(objective),
    )
    shape = largest_shape(config)
    shards = mesh.shape["doc"]
    shape = replace(shape, rows=-(-shape.rows // shards), shards=shards)
    return AbstractStep(step, state, _abstract_batch(shape, config), shape)


def largest_shape(config: TrainConfig) -> LayoutShape:
    """The layout of a list whose every segment is as long as its limit allows."""
    limits, ranker = config.limits, config.ranker
    for name in ("document_tokens", "prefix_tokens", "suffix_tokens"):
        if getattr(limits, name) is None:
            raise UserError(f"limits.{name}: a dry run needs a number, to tell how many tokens a step has")
    documents = config.lists.num_candidates
    assert limits.document_tokens is not None
    assert limits.prefix_tokens is not None
    assert limits.suffix_tokens is not None
    if limits.document_tokens > ranker.row_length:
        raise UserError(
            f"limits.document_tokens={limits.document_tokens} exceeds ranker.row_length={ranker.row_length}"
        )
    per_row = 1 if ranker.packing == "chunked" else ranker.row_length // limits.document_tokens
    rows = -(-documents // per_row)
    needed = LayoutShape(
        documents, limits.prefix_tokens, rows, ranker.row_length, limits.suffix_tokens + ANSWER_TOKENS, 2, ANSWER_TOKENS
    )
    return needed.bucketed()


def _abstract_batch(shape: LayoutShape, config: TrainConfig) -> TrainingBatch:
    def array(*sizes: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct((config.trainer.batch_size * shape.shards, *sizes), dtype)

    stream = array(shape.tokens)
    signals, labels = array(shape.signals), array(shape.labels)
    documents = array(shape.documents, dtype=bool)
    sequential = PATTERNS[config.ranker.visibility].sequential
    layout = TokenLayout(stream, stream, stream, signals, labels, documents, shape=shape, sequential=sequential)
    return TrainingBatch(layout, documents)


def _gigabytes(tree: Any) -> str:
    return f"{sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) / 1e9:,.2f} GB"
