"""Master weights in bfloat16: an update far below a weight's precision must still move it, on average."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from blockrank.training.optimizer import Params, path_name


def stochastic_round(x: Float[Array, "*n"], key: Array) -> Float[Array, "*n"]:
    """float32 -> bfloat16: one of the two neighbours of each value, the nearer the likelier, so that the mean is x.

    What bfloat16 holds stays as it is, and so do infinities and NaN. `key` decides alone, on however many devices `x`
    lies (Gupta et al., 2015, Deep Learning with Limited Numerical Precision).
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def add_updates(params: Params, updates: optax.Updates, step: Int[Array, ""]) -> Params:
    """`params + updates` in float32; what is kept in bfloat16 is rounded stochastically, anew at each `step`."""
    at_step = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), step)

    def add(path: Any, param: Array, update: Array) -> Array:
        new = param.astype(jnp.float32) + update.astype(jnp.float32)
        if param.dtype != jnp.bfloat16:
            return new.astype(param.dtype)
        return stochastic_round(new, jax.random.fold_in(at_step, zlib.crc32(path_name(path).encode())))

    return jax.tree_util.tree_map_with_path(add, params, updates)
