"""States times weights: the one product that linear layers and their adapters are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from blockrank.attention.precision import matmul_precision
from blockrank.parallel import target_platform


def product(x: Float[Array, "*n i"], kernel: Float[Array, "i o"]) -> Float[Array, "*n o"]:
    """`x @ kernel` in the dtype of `x`, accumulated in float32.

    On CPUs bfloat16 is multiplied as it is. Left alone, XLA would widen both sides to float32 first, and be slower than
    with float32; a product that is declared to end in float32 is as fast as the CPU's bfloat16 instructions allow.
    """
    if x.dtype == jnp.bfloat16 and target_platform() == "cpu":
        return _bfloat16_product(x, kernel)
    return jnp.matmul(x, kernel.astype(x.dtype), precision=matmul_precision(x.dtype))


@jax.custom_vjp
def _bfloat16_product(x: Array, kernel: Array) -> Array:
    return _dot(x, kernel.astype(x.dtype), ((x.ndim - 1,), (0,))).astype(x.dtype)


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _bfloat16_product(x, kernel), (x, kernel)


def _backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = saved
    rows = tuple(range(x.ndim - 1))
    of_x = _dot(gradient, kernel.astype(x.dtype), ((x.ndim - 1,), (1,)))
    return of_x.astype(x.dtype), _dot(x, gradient, (rows, rows)).astype(kernel.dtype)


def _dot(a: Array, b: Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)


_bfloat16_product.defvjp(_forward, _backward)
