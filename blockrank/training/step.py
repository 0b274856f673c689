"""One optimiser step: gradients of the loss over the whole batch, in one piece or accumulated over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

from blockrank.errors import UserError
from blockrank.losses import Objective, TrainingBatch, ranking_loss
from blockrank.parallel import spread_parameters, spread_state
from blockrank.training.optimizer import Params, Trainable
from blockrank.training.rounding import add_updates
from blockrank.training.state import TrainState, as_float32

Metrics: TypeAlias = dict[str, Array]
LossFn: TypeAlias = Callable[[Any, Any], tuple[Array, Metrics]]
"""(model, batch) -> (loss, metrics)."""
ShareFn: TypeAlias = Callable[[Any, Any, Any], tuple[Array, Metrics]]
"""(model, micro-batch, whole batch) -> the micro-batch's share of the batch's loss and metrics: shares add up."""


class Step(Protocol):
    """(state, batch) -> (state, metrics), jitted; the state given is consumed."""

    def __call__(self, state: TrainState, batch: Any, /) -> tuple[TrainState, Metrics]: ...

    def lower(self, state: TrainState, batch: Any, /) -> jax.stages.Lowered: ...


def ranking_loss_fn(objective: Objective) -> LossFn:
    """`ranking_loss` with a fixed objective."""
    return lambda model, batch: ranking_loss(model, batch, objective)


def ranking_share_fn(objective: Objective) -> ShareFn:
    """Shares of `ranking_loss`. Its terms are means over label tokens or over lists with a positive, so a micro-batch
    weighs what it holds of those: accumulation equals one large batch also when lists differ in length."""

    def share(model: Any, micro: TrainingBatch, whole: TrainingBatch) -> tuple[Array, Metrics]:
        _, parts = ranking_loss(model, micro, objective)
        labels = _part(jnp.sum(micro.layout.labels >= 0), jnp.sum(whole.layout.labels >= 0))
        lists = _part(_with_positive(micro), _with_positive(whole))
        weights = {"ntp_loss": labels, "aux_loss": lists, "attention_p_at_1": lists}
        metrics = {name: value * weights.get(name, 1) for name, value in parts.items()}
        zero = jnp.zeros(())
        loss = objective.ntp_weight * metrics.get("ntp_loss", zero)
        return loss + objective.aux_weight * metrics.get("aux_loss", zero), metrics

    return share


def _part(count: Array, total: Array) -> Array:
    return count / jnp.maximum(total, 1)


def _with_positive(batch: TrainingBatch) -> Array:
    return jnp.sum(jnp.any(batch.positive & batch.layout.document_mask, axis=-1))


def make_train_step(
    graphdef: nnx.GraphDef,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    trainable: Trainable,
    *,
    accumulation: int = 1,
    share_fn: ShareFn | None = None,
) -> Step:
    """The jitted step `(state, batch) -> (state, metrics)`; the state's buffers are donated.

    Only the `trainable` part is differentiated. `batch` is a pytree whose every leaf has the
    lists on axis 0. With `accumulation` = k, the batch is cut into k micro-batches (list i goes to micro-batch i mod k)
    whose shares from `share_fn` are summed in float32 before the one update; a step is never half done, so a checkpoint
    never holds accumulated gradients.

    Metrics: the loss function's, and `loss`, `grad_norm` (before clipping, of what is trainable), `learning_rate`,
    `finite` (bool), `skipped` (updates refused so far). If loss or gradient norm is not finite the parameters and
    optimiser state stay as they were.

    For a mesh, call it under `jax.set_mesh` with a state as `place_state` and a batch as `spread_lists` places it.
    """
    if accumulation < 1:
        raise UserError(f"accumulation={accumulation} must be at least 1")
    if accumulation > 1 and share_fn is None:
        raise ValueError("accumulation needs share_fn")

    def differentiate(function: LossFn, params: Params, batch: Any) -> tuple[tuple[Array, Metrics], Params]:
        def of_part(part: Params) -> tuple[Array, Metrics]:
            return function(nnx.merge(graphdef, trainable.put(params, part)), batch)

        value, grads = jax.value_and_grad(of_part, has_aux=True)(trainable.take(params))
        return value, spread_parameters(jax.tree.map(lambda g: g.astype(jnp.float32), grads))

    def accumulate(params: Params, batch: Any) -> tuple[tuple[Array, Metrics], Params]:
        assert share_fn is not None
        part_of = share_fn
        micros = jax.tree.map(lambda leaf: _micro_batches(leaf, accumulation), batch)

        def share(model: Any, micro: Any) -> tuple[Array, Metrics]:
            return part_of(model, micro, batch)

        def add(total: Any, micro: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, differentiate(share, params, micro)), None

        first = jax.tree.map(lambda leaf: leaf[0], micros)
        shapes = jax.eval_shape(lambda: differentiate(share, params, first))
        value, grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add, (value, spread_parameters(grads)), micros)[0]

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        if accumulation == 1:
            (loss, metrics), grads = differentiate(loss_fn, state.params, batch)
        else:
            (loss, metrics), grads = accumulate(state.params, batch)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        part = trainable.take(state.params)
        updates, moments = optimizer.update(grads, state.optimizer_state, as_float32(part))
        part, moments = jax.tree.map(
            lambda new, old: jnp.where(finite, new.astype(old.dtype), old),
            (add_updates(part, updates, state.step), moments),
            (part, state.optimizer_state),
        )
        rate = jnp.asarray(schedule(state.step - state.skipped), jnp.float32)
        skipped = state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32)
        own = {"grad_norm": grad_norm, "learning_rate": rate, "finite": finite, "skipped": skipped}
        after = TrainState(state.step + 1, skipped, trainable.put(state.params, part), moments)
        return spread_state(after, state.params), {"loss": loss, **metrics, **own}

    return cast(Step, jax.jit(step, donate_argnums=0))


def _micro_batches(leaf: Array, count: int) -> Array:
    """[B, ...] -> [k, B/k, ...]; strided, so that lists sharded over devices stay where they are."""
    size = leaf.shape[0]
    if size % count:
        raise UserError(f"batch_size={size} is not a multiple of accumulation={count}")
    return jnp.swapaxes(leaf.reshape(size // count, count, *leaf.shape[1:]), 0, 1)
