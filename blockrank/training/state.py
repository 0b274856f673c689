"""What training carries from step to step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from blockrank.parallel import place_arrays, place_state
from blockrank.training.optimizer import Params, Trainable, path_name


@partial(jax.tree_util.register_dataclass, data_fields=["step", "skipped", "params", "optimizer_state"], meta_fields=[])
@dataclass(frozen=True)
class TrainState:
    """`step` counts batches consumed, `skipped` those whose update was refused (a loss or gradient not finite).

    `params` is a nested dict of master weights, float32 or (`OptimizerSettings.master_weights`) matrices in bfloat16;
    `optimizer_state` is whatever the optimiser keeps.
    """

    step: Int[Array, ""]
    skipped: Int[Array, ""]
    params: Params
    optimizer_state: Any


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, Params]:
    """The model's structure and its parameters as a nested dict; `nnx.merge(graphdef, params)` gives the model again.

    Raises `ValueError` for a model with state that is not a parameter (it would silently not be saved).
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    if jax.tree.leaves(rest):
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(rest))]
        raise ValueError(f"the model holds state that is no parameter: {', '.join(names)}")
    return graphdef, nnx.to_pure_dict(params)


def create_state(params: Params, optimizer: optax.GradientTransformation, trainable: Trainable) -> TrainState:
    """Step 0. Works under `jax.eval_shape` for abstract `params`."""
    step, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return TrainState(step, skipped, params, optimizer.init(as_float32(trainable.take(params))))


def as_float32(params: Params) -> Params:
    """What the optimiser sees of parameters: its state is float32 unless it says otherwise."""
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)


def state_shapes(
    params: Params, optimizer: optax.GradientTransformation, trainable: Trainable, mesh: Mesh | None = None
) -> TrainState:
    """`create_state` by shapes alone, placed on the mesh where there is one. `params` may be abstract."""
    shapes = jax.eval_shape(lambda p: create_state(p, optimizer, trainable), params)
    return shapes if mesh is None else place_state(shapes, params, mesh)


def place_new_state(
    params: Params, optimizer: optax.GradientTransformation, trainable: Trainable, mesh: Mesh | None = None
) -> TrainState:
    """`create_state`; on a mesh no device ever holds more than its part, and `params` may be host arrays."""
    if mesh is None:
        return create_state(params, optimizer, trainable)
    placed = state_shapes(params, optimizer, trainable, mesh)
    params = place_arrays(params, placed.params)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, replace(placed, params={}))
    rest = jax.jit(lambda p: replace(create_state(p, optimizer, trainable), params={}), out_shardings=shardings)(params)
    return replace(rest, params=params)


def count_parameters(params: Params) -> int:
    """The number of scalars, of concrete or abstract parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
