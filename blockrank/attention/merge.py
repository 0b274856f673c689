"""Softmax attention over keys that lie in several places: each place's partial result, merged by log-sum-exp.

A suffix token sees every document. Where documents are spread over devices or kernels, each computes the attention over
its own keys and the log-sum-exp of its logits, and the merge weighs the outputs by their shares of the softmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from blockrank.attention.reference import masked_softmax


def merge_partial(
    outputs: Float[Array, "P *n K G H"] | Sequence[Float[Array, "*n K G H"]],
    lses: Float[Array, "P *n K G"] | Sequence[Float[Array, "*n K G"]],
) -> Float[Array, "*n K G H"]:
    """Attention over all keys from P partial results, stacked or listed.

    `lses` are float32 log-sum-exps of the scaled logits; a part in which a query sees nothing has lse -inf (and output
    0), and a query that sees nothing anywhere gets 0 with zero gradients. The sum is taken in float32; the result has
    the dtype of `outputs`. Differentiable in both arguments.
    """
    stacked = jnp.stack(list(outputs))
    logits = jnp.moveaxis(jnp.stack(list(lses)).astype(jnp.float32), 0, -1)
    shares = jnp.moveaxis(masked_softmax(logits, jnp.isfinite(logits)), -1, 0)
    return jnp.sum(shares[..., None] * stacked.astype(jnp.float32), axis=0).astype(stacked.dtype)
