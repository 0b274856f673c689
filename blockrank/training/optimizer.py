"""Optimisers, the learning-rate schedule, and which parameters they may touch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from blockrank.errors import FieldError, UserError, above, at_least, between
from blockrank.models.lora import LoraSettings, is_adapter

Dtype: TypeAlias = Literal["float32", "bfloat16"]
Params = dict[str, Any]
"""Nested dict of arrays, as `flax.nnx.to_pure_dict` gives it; a path joins the keys with dots."""

STACKED_PREFIX = "blocks."
"""Parameters below this path carry the layer on axis 0."""


_NOT_READ = {"adafactor": ("b2", "eps", "weight_decay"), "adamw": ("scale_by_parameter", "update_clip")}
"""Settings that an update rule does not have; they stay at their defaults."""


@dataclass(frozen=True)
class ScheduleSettings:
    """Linear warm-up from 0 over `warmup_steps`, then cosine decay to `final_fraction` of the peak (or constant).

    arXiv 2510.05396: peak 3e-7, 50 warm-up steps, cosine.
    """

    peak: float = 3e-7
    warmup_steps: int = 50
    decay: Literal["cosine", "constant"] = "cosine"
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        above(self, 0, "peak")
        at_least(self, 0, "warmup_steps")
        between(self, 0, 1, "final_fraction")


@dataclass(frozen=True)
class OptimizerSettings:
    """An update rule, global-norm clipping, and the trainable part of the model.

    Adafactor (the paper's): `b1` is the momentum of the update, no weight decay. `scale_by_parameter=False` makes the
    learning rate absolute, as PyTorch's and Adam's are: with Adafactor's relative scale a peak of 3e-7 would move no
    bf16 weight. Second moments are factored over the two longest axes, never the layer axis of a stacked block; the
    update is clipped to RMS `update_clip` over each stacked parameter.

    `momentum_dtype` is that of the first moment. `master_weights=bfloat16` keeps matrices in bfloat16 and rounds their
    updates stochastically (`rounding.stochastic_round`); vectors, second moments and updates stay float32.

    `trainable` is a regular expression that a parameter's whole path must match ("blocks\\.attention\\..*" trains the
    attention only); `trainable_layers` (start, stop) restricts stacked parameters further to a range of layers. What is
    frozen has no optimiser state and receives exactly no update.

    `lora` freezes the model and trains adapters beside its linear layers instead (`blockrank.models.lora`);
    `trainable` and `trainable_layers` then choose among these.
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
    momentum_dtype: Dtype = "float32"
    master_weights: Dtype = "float32"
    trainable: str = ".*"
    trainable_layers: tuple[int, int] | None = None
    lora: LoraSettings | None = None

    def __post_init__(self) -> None:
        between(self, 0, 1, "b1", "b2")
        for name in ("b1", "b2"):
            if getattr(self, name) == 1:
                raise FieldError(name, "1 forgets nothing and learns nothing: it must be below 1")
        at_least(self, 0, "weight_decay")
        above(self, 0, "eps", "update_clip", "clip_norm")
        for name in _NOT_READ[self.name]:
            value, default = getattr(self, name), getattr(OptimizerSettings, name)
            if value != default:
                other = "adamw" if self.name == "adafactor" else "adafactor"
                raise FieldError(name, f"{value} is {other}'s: set it to {default}, or optimizer.name={other}")
        if self.lora is not None and self.master_weights != "float32":
            raise FieldError("master_weights", f"{self.master_weights} is not for adapters: set lora.base instead")


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


@dataclass(frozen=True)
class Trainable:
    """The part of the parameters that an optimiser sees; everything else is constant in a step.

    `layers` maps the keys of a parameter to its trainable layers along axis 0, or to None when all of it is trainable.
    """

    layers: Mapping[tuple[str, ...], slice | None]

    @staticmethod
    def of(params: Params, settings: OptimizerSettings) -> Trainable:
        """What `settings` admit of `params`, which may be abstract. Where there are adapters, the rest is frozen.

        Raises `UserError` when nothing is left to train or the layer range lies outside the model.
        """
        try:
            pattern = re.compile(settings.trainable)
        except re.error as error:
            raise UserError(f"optimizer.trainable={settings.trainable!r} is no regular expression: {error}") from error
        leaves = _flat(saved_params(params))
        layers = {
            keys: _layer_range(".".join(keys), leaf.shape, settings)
            for keys, leaf in leaves.items()
            if pattern.fullmatch(".".join(keys))
        }
        if not layers:
            paths = [".".join(keys) for keys in leaves]
            raise UserError(
                f"optimizer.trainable={settings.trainable!r} matches no parameter; paths are like {paths[0]}, "
                f"{paths[-1]}"
            )
        return Trainable(layers)

    def take(self, params: Params) -> Params:
        """The trainable part: a nested dict without what is frozen, stacked parameters cut to their layers."""
        leaves = _flat(params)
        taken = {keys: leaves[keys] if cut is None else leaves[keys][cut] for keys, cut in self.layers.items()}
        return unflatten_dict(taken)

    def put(self, params: Params, part: Params) -> Params:
        """`params` with the trainable part replaced."""
        leaves = _flat(params)
        for keys, new in _flat(part).items():
            cut, leaf = self.layers[keys], leaves[keys]
            leaves[keys] = new if cut is None else jnp.concatenate([leaf[: cut.start], new, leaf[cut.stop :]])
        return unflatten_dict(leaves)


def saved_params(params: Params) -> Params:
    """What a checkpoint holds: the adapters alone where there are any, whose base is saved elsewhere; else all."""
    adapters = {keys: leaf for keys, leaf in _flat(params).items() if is_adapter(".".join(keys))}
    return unflatten_dict(adapters) if adapters else params


def with_saved(params: Params, saved: Params) -> Params:
    """`params` with what `saved_params` gave of others like them."""
    return unflatten_dict({**_flat(params), **_flat(saved)})


def _flat(tree: Params) -> dict[tuple[str, ...], Any]:
    return cast(dict[tuple[str, ...], Any], flatten_dict(tree))


def _layer_range(path: str, shape: tuple[int, ...], settings: OptimizerSettings) -> slice | None:
    if settings.trainable_layers is None or not path.startswith(STACKED_PREFIX):
        return None
    start, stop = settings.trainable_layers
    if not 0 <= start < stop <= shape[0]:
        raise UserError(f"optimizer.trainable_layers={[start, stop]}: the model has layers 0..{shape[0] - 1}")
    return None if stop - start == shape[0] else slice(start, stop)


def make_optimizer(
    settings: OptimizerSettings, total_steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The gradient transformation of a `Trainable` part, clipping by its global norm first, and the schedule."""
    schedule = make_schedule(settings.schedule, total_steps)
    if settings.name == "adafactor":
        rule = optax.adafactor(
            schedule,
            multiply_by_parameter_scale=settings.scale_by_parameter,
            clipping_threshold=settings.update_clip,
            momentum=settings.b1 or None,
            dtype_momentum=jnp.dtype(settings.momentum_dtype),
        )
    else:
        rule = optax.adamw(
            schedule,
            b1=settings.b1,
            b2=settings.b2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            mu_dtype=jnp.dtype(settings.momentum_dtype),
            mask=_is_matrix,
        )
    clip = optax.identity() if settings.clip_norm is None else optax.clip_by_global_norm(settings.clip_norm)
    return optax.chain(clip, rule), schedule


def master_weights(params: Params, settings: OptimizerSettings) -> Params:
    """Parameters, concrete or abstract, in the dtype they are trained in."""
    if settings.master_weights == "float32":
        return params

    def cast(leaf: Any, matrix: bool) -> Any:
        if not matrix or leaf.dtype != jnp.float32:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, settings.master_weights)
        return leaf.astype(settings.master_weights)

    return jax.tree.map(cast, params, _is_matrix(params))


def _is_matrix(params: Params) -> Params:
    """Weight decay applies to matrices and embeddings, not to norms' scales and biases."""

    def leaf(path: tuple[Any, ...], _: Any) -> bool:
        return not path_name(path).endswith((".scale", ".bias"))

    return jax.tree_util.tree_map_with_path(leaf, params)
