"""`models.products`: one product, whatever the dtype, and its gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockrank.models.products import product, scaled_product

BFLOAT16 = jnp.bfloat16


def draw(*shape: int, seed: int = 0) -> jax.Array:
    """Values that bfloat16 holds exactly, in float32."""
    return jax.random.normal(jax.random.key(seed), shape).astype(BFLOAT16).astype(jnp.float32)


def wide(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64)


def is_rounded(got: jax.Array, exact: np.ndarray, relative: float = 2.0**-8) -> bool:
    """No element is further away than `relative` (half a unit in bfloat16's last place) and float32's own rounding."""
    return bool(np.all(np.abs(wide(got.astype(jnp.float32)) - exact) <= relative * np.abs(exact) + 1e-5))


@pytest.mark.parametrize("leading", [(), (5,), (2, 7), (2, 3, 4)])
@pytest.mark.parametrize("kernel_dtype", [jnp.float32, BFLOAT16])
def test_bfloat16_is_the_exact_product_rounded_once(leading: tuple[int, ...], kernel_dtype: jnp.dtype) -> None:
    x, kernel, weights = draw(*leading, 24), draw(24, 10, seed=1), draw(*leading, 10, seed=2)

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(product(x, kernel).astype(jnp.float32) * weights)

    out = jax.jit(product)(x.astype(BFLOAT16), kernel.astype(kernel_dtype))
    of_x, of_kernel = jax.jit(jax.grad(loss, (0, 1)))(x.astype(BFLOAT16), kernel.astype(kernel_dtype))
    assert (out.dtype, of_x.dtype, of_kernel.dtype) == (BFLOAT16, BFLOAT16, kernel_dtype)
    assert is_rounded(out, wide(x) @ wide(kernel))
    assert is_rounded(of_x, wide(weights) @ wide(kernel).T)
    exact = wide(x).reshape(-1, 24).T @ wide(weights).reshape(-1, 10)
    assert is_rounded(of_kernel, exact, 0 if kernel_dtype == jnp.float32 else 2.0**-8)


def test_bfloat16_is_multiplied_without_being_widened() -> None:
    x, kernel = draw(8, 24).astype(BFLOAT16), draw(24, 10)

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(product(x, kernel).astype(jnp.float32))

    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, kernel).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 2
    assert all(line.count("bf16>") == 2 and line.count("f32>") == 1 for line in products)


@pytest.mark.parametrize("dtype", [jnp.float32, BFLOAT16])
def test_a_product_with_codes_is_that_with_what_they_stand_for(dtype: jnp.dtype) -> None:
    x, weights = draw(3, 5, 24), draw(3, 5, 10, seed=2)
    codes, scale = jax.random.randint(jax.random.key(1), (24, 10), -127, 128, jnp.int8), jnp.abs(draw(10, seed=3)) / 64

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(scaled_product(x, codes, scale).astype(jnp.float32) * weights)

    out, of_x = jax.jit(scaled_product)(x.astype(dtype), codes, scale), jax.jit(jax.grad(loss))(x.astype(dtype))
    kernel = wide(codes) * wide(scale)
    assert (out.dtype, of_x.dtype) == (dtype, dtype)
    assert is_rounded(out, wide(x) @ kernel, 2.0**-8 if dtype == BFLOAT16 else 1e-6)
    exact = wide(weights) @ kernel.T
    error = np.abs(wide(of_x.astype(jnp.float32)) - exact).max() / np.abs(exact).max()
    assert error < (2.0**-7 if dtype == BFLOAT16 else 1e-6)


def test_gradients_through_a_scan_with_recomputed_layers() -> None:
    x, kernels = draw(6, 16), draw(3, 16, 16, seed=1) / 4

    def loss(kernels: jax.Array, dtype: jnp.dtype) -> jax.Array:
        body = jax.checkpoint(lambda state, kernel: (product(state, kernel), None))
        return jnp.mean(jnp.square(jax.lax.scan(body, x.astype(dtype), kernels)[0].astype(jnp.float32)))

    exact, narrow = (jax.jit(jax.grad(loss), static_argnums=1)(kernels, dtype) for dtype in (jnp.float32, BFLOAT16))
    assert float(jnp.linalg.norm(narrow - exact) / jnp.linalg.norm(exact)) < 0.02
