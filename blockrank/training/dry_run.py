"""What a training run will cost, told from shapes alone: no weights, no data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from blockrank.attention.visibility import PATTERNS
from blockrank.config import to_plain
from blockrank.errors import UserError
from blockrank.layout import LayoutShape, TokenLayout
from blockrank.losses import TrainingBatch
from blockrank.models.loading import abstract_decoder
from blockrank.prompts.template import PromptTemplate
from blockrank.training.optimizer import Trainable, make_optimizer
from blockrank.training.recipe import TrainConfig
from blockrank.training.state import TrainState, count_parameters, create_state, split_model
from blockrank.training.step import Step, make_train_step, ranking_loss_fn, ranking_share_fn

ANSWER_TOKENS = 8
"""Answer tokens allowed for on top of the suffix's limit."""


def dry_run(config: TrainConfig) -> str:
    """Builds model, optimiser state and step by shapes alone; returns their sizes and the resolved config as text."""
    PromptTemplate.from_config(config.prompt, "prompt")
    decoder = config.model.decoder_config()
    plan = abstract_step(config)
    params, shape = plan.state.params, plan.shape
    trainable = Trainable.of(params, config.optimizer)
    _, metrics = jax.eval_shape(plan.step, plan.state, plan.batch)
    lists, accumulation = config.trainer.batch_size, config.trainer.accumulation
    lines = [
        f"parameters: {count_parameters(params):,} ({_gigabytes(params)} as float32), trainable "
        f"{count_parameters(jax.eval_shape(trainable.take, params)):,}",
        f"optimizer state: {_gigabytes(plan.state.optimizer_state)}",
        f"score layer: {config.ranker.layer_of(decoder)} of {decoder.num_layers}",
        f"tokens per step: {lists * shape.tokens:,} at most, in {accumulation} micro-batches",
        f"tokens per list: {shape.tokens:,} at most, {lists} lists: prefix {shape.prefix}, {shape.rows} rows of "
        f"{shape.row_length}, suffix {shape.suffix}",
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


def abstract_step(config: TrainConfig) -> AbstractStep:
    """Builds model, optimiser state and step by shapes alone."""
    decoder = config.model.decoder_config()
    graphdef, params = split_model(abstract_decoder(decoder, jnp.dtype(config.model.dtype)))
    optimizer, schedule = make_optimizer(config.optimizer, config.trainer.total_steps or 10_000)
    trainable = Trainable.of(params, config.optimizer)
    state = jax.eval_shape(lambda p: create_state(p, optimizer, trainable), params)
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
        return jax.ShapeDtypeStruct((config.trainer.batch_size, *sizes), dtype)

    stream = array(shape.tokens)
    signals, labels = array(shape.signals), array(shape.labels)
    documents = array(shape.documents, dtype=bool)
    sequential = PATTERNS[config.ranker.visibility].sequential
    layout = TokenLayout(stream, stream, stream, signals, labels, documents, shape=shape, sequential=sequential)
    return TrainingBatch(layout, documents)


def _gigabytes(tree: Any) -> str:
    return f"{sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) / 1e9:,.2f} GB"
