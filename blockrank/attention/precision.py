"""What a matrix product's precision means here."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 means float32 on every platform; narrower types use the platform's fast path."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
