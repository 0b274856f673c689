"""Optimisers, the learning-rate schedule, and which parameters they may touch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from blockrank.errors import UserError

Params = dict[str, Any]
"""Nested dict of arrays, as `flax.nnx.to_pure_dict` gives it; a path joins the keys with dots."""

STACKED_PREFIX = "blocks."
"""Parameters below this path carry the layer on axis 0."""


@dataclass(frozen=True)
class ScheduleSettings:
    """Linear warm-up from 0 over `warmup_steps`, then cosine decay to `final_fraction` of the peak (or constant).

    arXiv 2510.05396: peak 3e-7, 50 warm-up steps, cosine.
    """

    peak: float = 3e-7
    warmup_steps: int = 50
    decay: Literal["cosine", "constant"] = "cosine"
    final_fraction: float = 0.0


@dataclass(frozen=True)
class OptimizerSettings:
    """An update rule, global-norm clipping, and the trainable part of the model.

    Adafactor (the paper's): `b1` is the momentum of the update, no weight decay. `scale_by_parameter=False` makes the
    learning rate absolute, as PyTorch's and Adam's are: with Adafactor's relative scale a peak of 3e-7 would move no
    bf16 weight. Second moments are factored over the two longest axes, never the layer axis of a stacked block; the
    update is clipped to RMS `update_clip` over each stacked parameter.

    `trainable` is a regular expression that a parameter's whole path must match ("blocks\\.attention\\..*" trains the
    attention only); `trainable_layers` (start, stop) restricts stacked parameters further to a range of layers. What is
    frozen has no optimiser state (whole parameters) and receives exactly no update.
    """

    name: Literal["adafactor", "adamw"] = "adafactor"
    schedule: ScheduleSettings = ScheduleSettings()
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    scale_by_parameter: bool = False
    update_clip: float = 1.0
    clip_norm: float | None = 1.0
    trainable: str = ".*"
    trainable_layers: tuple[int, int] | None = None


def make_schedule(settings: ScheduleSettings, total_steps: int) -> optax.Schedule:
    """step (int) -> learning rate (float32). Step `warmup_steps` has the peak; step `total_steps` the final value."""
    if settings.warmup_steps < 0 or total_steps < 1:
        raise UserError(f"schedule: warmup_steps={settings.warmup_steps}, total_steps={total_steps} must be positive")
    warmup = min(settings.warmup_steps, total_steps)
    if settings.decay == "constant" or warmup == total_steps:
        after = optax.constant_schedule(settings.peak)
    else:
        after = optax.cosine_decay_schedule(settings.peak, total_steps - warmup, alpha=settings.final_fraction)
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, settings.peak, warmup), after], [warmup])


def path_name(path: tuple[Any, ...]) -> str:
    """`blocks.attention.query.kernel` from a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def trainable_mask(params: Params, settings: OptimizerSettings) -> Params:
    """The tree of `params` with bool leaves, or bool [L, 1, ...] where `trainable_layers` cuts stacked parameters.

    Raises `UserError` when nothing is left to train or the layer range lies outside the model.
    """
    try:
        pattern = re.compile(settings.trainable)
    except re.error as error:
        raise UserError(f"optimizer.trainable={settings.trainable!r} is no regular expression: {error}") from error
    layers = settings.trainable_layers

    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        name = path_name(path)
        if not pattern.fullmatch(name):
            return False
        if layers is None or not name.startswith(STACKED_PREFIX):
            return True
        start, stop = layers
        depth = value.shape[0]
        if not 0 <= start < stop <= depth:
            raise UserError(f"optimizer.trainable_layers={list(layers)}: the model has layers 0..{depth - 1}")
        index = np.arange(depth)
        return ((index >= start) & (index < stop)).reshape((depth,) + (1,) * (len(value.shape) - 1))

    mask = jax.tree_util.tree_map_with_path(leaf, params)
    if not any(np.any(m) for m in jax.tree.leaves(mask)):
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        raise UserError(
            f"optimizer.trainable={settings.trainable!r} matches no parameter; paths are like {names[0]}, {names[-1]}"
        )
    return mask


def apply_mask(tree: Any, mask: Params) -> Any:
    """`tree` with exact zeros where `mask` is False (whole leaves or layers)."""

    def leaf(keep: Any, value: jax.Array) -> jax.Array:
        if isinstance(keep, bool):
            return value if keep else jnp.zeros_like(value)
        return jnp.where(keep, value, jnp.zeros((), value.dtype))

    return jax.tree.map(leaf, mask, tree)


def make_optimizer(
    settings: OptimizerSettings, params: Params, total_steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The gradient transformation and its schedule. `params` may be abstract (`jax.eval_shape`).

    Order: mask, clip by global norm (of what is trainable), update rule, mask.
    """
    schedule = make_schedule(settings.schedule, total_steps)
    mask = trainable_mask(params, settings)
    whole = jax.tree.map(lambda keep: bool(np.any(keep)), mask)
    if settings.name == "adafactor":
        rule = optax.adafactor(
            schedule,
            multiply_by_parameter_scale=settings.scale_by_parameter,
            clipping_threshold=settings.update_clip,
            momentum=settings.b1 or None,
            dtype_momentum=jnp.float32,
            weight_decay_rate=settings.weight_decay or None,
        )
    else:
        rule = optax.adamw(
            schedule,
            b1=settings.b1,
            b2=settings.b2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            mask=_is_matrix,
        )
    keep_trainable = optax.stateless(lambda updates, _: apply_mask(updates, mask))
    clip = optax.identity() if settings.clip_norm is None else optax.clip_by_global_norm(settings.clip_norm)
    return optax.chain(keep_trainable, clip, optax.masked(rule, whole), keep_trainable), schedule


def _is_matrix(params: Params) -> Params:
    """Weight decay applies to matrices and embeddings, not to norms' scales and biases."""

    def leaf(path: tuple[Any, ...], _: Any) -> bool:
        return not path_name(path).endswith((".scale", ".bias"))

    return jax.tree_util.tree_map_with_path(leaf, params)
