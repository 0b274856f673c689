"""Softmax attention over keys that lie in several places: each place's partial result, merged by log-sum-exp.

A suffix token sees every document. Where documents are spread over devices or kernels, each computes the attention over
its own keys and the log-sum-exp of its logits, and the merge weighs the outputs by their shares of the softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

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
    shares = partial_shares(jnp.stack(list(lses)))
    return jnp.sum(shares[..., None] * stacked.astype(jnp.float32), axis=0).astype(stacked.dtype)


def partial_shares(lses: Float[Array, "P *n"]) -> Float[Array, "P *n"]:
    """Each part's share of the softmax over all parts, float32; all 0, with zero gradient, where all are -inf."""
    logits = jnp.moveaxis(lses.astype(jnp.float32), 0, -1)
    return jnp.moveaxis(masked_softmax(logits, jnp.isfinite(logits)), -1, 0)


@dataclass(frozen=True)
class Shards:
    """The streams of one list: `count` of them, each on a device of its own along mesh axis `axis`.

    Without an axis all are in the batch: B is then `count` times the lists, all first shards before all second ones.
    """

    count: int
    axis: str | None = None

    def is_first(self, entries: int) -> Bool[Array, " B"]:
        """Which of a batch's entries are their list's first shard: what all shards hold alike counts there."""
        if self.axis is None:
            return jnp.arange(entries) < entries // self.count
        return jnp.full(entries, jax.lax.axis_index(self.axis) == 0)

    def shares(self, lse: Float[Array, "B *n"]) -> Float[Array, "B *n"]:
        """`partial_shares` of each entry among its list's shards."""
        if self.axis is None:
            return partial_shares(lse.reshape(self.count, -1, *lse.shape[1:])).reshape(lse.shape)
        return partial_shares(jax.lax.all_gather(lse, self.axis))[jax.lax.axis_index(self.axis)]

    def sum(self, x: Float[Array, "B *n"]) -> Float[Array, "B *n"]:
        """The sum over a list's shards, given to each of them."""
        if self.axis is None:
            total = x.reshape(self.count, -1, *x.shape[1:]).sum(axis=0, keepdims=True)
            return jnp.broadcast_to(total, (self.count, *total.shape[1:])).reshape(x.shape)
        return jax.lax.psum(x, self.axis)

    def merge(self, outputs: Float[Array, "B Q K G H"], lses: Float[Array, "B Q K G"]) -> Float[Array, "B Q K G H"]:
        """Attention over the keys of all shards from each shard's partial result, given to each of them.

        Equals `merge_partial`. Terms are added up in the dtype of `outputs`, so that bfloat16 halves what is sent.
        """
        return self.sum((self.shares(lses)[..., None] * outputs.astype(jnp.float32)).astype(outputs.dtype))
