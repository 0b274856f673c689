"""States times weights: the one product that linear layers and their adapters are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

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
def scaled_product(
    x: Float[Array, "*n i"], codes: Int8[Array, "i o"], scale: Float[Array, " o"]
) -> Float[Array, "*n o"]:
    """`x @ (codes * scale)` in the dtype of `x`, accumulated and scaled in float32. Neither codes nor scales learn."""
    y = _dot(x, codes.astype(x.dtype), ((x.ndim - 1,), (0,)))
    return (y * scale).astype(x.dtype)


def _scaled_forward(x: Array, codes: Array, scale: Array) -> tuple[Array, tuple[Array, Array]]:
    return scaled_product(x, codes, scale), (codes, scale)


def _scaled_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    codes, scale = saved
    scaled = (gradient * scale).astype(gradient.dtype)
    return _dot(scaled, codes.astype(gradient.dtype), ((gradient.ndim - 1,), (1,))).astype(gradient.dtype), None, None


scaled_product.defvjp(_scaled_forward, _scaled_backward)


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
    precision = matmul_precision(a.dtype)
    return jax.lax.dot_general(a, b, (contracted, ((), ())), precision, preferred_element_type=jnp.float32)


_bfloat16_product.defvjp(_forward, _backward)
