"""What the tests of the Pallas kernels share: both sides of a comparison with the dense oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from strategies import HASTE
from test_attention import Heads, tensors

from blockrank.attention.dispatch import attend
from blockrank.attention.visibility import Visibility
from blockrank.layout import PAD, TokenLayout

TOLERANCE = 1e-5


def with_gradients(function: Callable, arrays: tuple, cotangents: tuple) -> tuple:
    """Outputs of `function(*arrays)`, and the gradients of their products with `cotangents`."""
    out, pull = jax.vjp(function, *arrays)
    return out, pull(cotangents)


@partial(jax.jit, static_argnames=("pattern", "backend"), compiler_options=HASTE)
def through(q, k, v, cotangent, layout, *, pattern: Visibility, backend: str):
    out, grads = with_gradients(
        lambda *x: attend(*x, layout=layout, visibility=pattern, backend=backend), (q, k, v), cotangent
    )
    return {"out": out, "dq": grads[0], "dk": grads[1], "dv": grads[2]}


def assert_equals_the_oracle(
    backend: str, layout: TokenLayout, pattern: Visibility, heads: Heads, seed: int = 0
) -> None:
    arrays = tensors(layout, heads, seed)
    ours, oracle = (through(*arrays, layout, pattern=pattern, backend=name) for name in (backend, "reference"))
    padding = layout.segment_ids == PAD
    for name in oracle:
        np.testing.assert_allclose(ours[name], oracle[name], rtol=0, atol=TOLERANCE, err_msg=name)
        assert not np.asarray(ours[name])[padding].any(), name


def dense(q, k, v, mask, scale):
    """Output [B T K G H] and log-sum-exp [B T K G] under a mask [B T S]."""
    logits = scale * jnp.einsum("btkgh,bskh->btkgs", q, k, precision="highest")
    logits = jnp.where(mask[:, :, None, None], logits, -jnp.inf)
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
    return jnp.einsum("btkgs,bskh->btkgh", weights, v, precision="highest"), lse


def assert_same(function: Callable, oracle: Callable, arrays: tuple) -> None:
    """Outputs, log-sum-exps and the gradients of both."""
    out = jax.eval_shape(oracle, *arrays)
    cotangents = tuple(np.random.default_rng(9).standard_normal(x.shape).astype(np.float32) for x in out)
    blind = np.isneginf(jax.jit(oracle)(*arrays)[1])
    cotangents = cotangents[0], np.where(blind, 0, cotangents[1])
    run = partial(jax.jit, compiler_options=HASTE)
    ours = jax.tree.leaves(run(lambda *x: with_gradients(function, x, cotangents))(*arrays))
    theirs = jax.tree.leaves(run(lambda *x: with_gradients(oracle, x, cotangents))(*arrays))
    for mine, yours in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, np.where(np.isnan(yours), 0, yours), rtol=0, atol=TOLERANCE)


def normal(seed: int, *shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
