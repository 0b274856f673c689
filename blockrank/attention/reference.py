"""The oracle: dense masked attention in float32, and the masked softmax all backends share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_exponentials(
    logits: Float[Array, "*n S"], mask: Bool[Array, "*#n S"]
) -> tuple[Float[Array, "*n S"], Float[Array, "*n 1"], Float[Array, "*n"]]:
    """Softmax over the last axis before its division: weights, 0 outside `mask`, and their sum, 1 for blind rows.

    And the log-sum-exp of the visible logits, -inf with zero gradient for blind rows.
    """
    logits = jnp.where(mask, logits, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf))
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(logits - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    return weights, total, jnp.where(seen, peak + jnp.log(total), -jnp.inf)[..., 0]


def masked_softmax(logits: Float[Array, "*n S"], mask: Bool[Array, "*#n S"]) -> Float[Array, "*n S"]:
    """Softmax over the last axis where `mask`; a row with nothing visible is all zero, with zero gradient."""
    return masked_softmax_lse(logits, mask)[0]


def masked_softmax_lse(
    logits: Float[Array, "*n S"], mask: Bool[Array, "*#n S"]
) -> tuple[Float[Array, "*n S"], Float[Array, "*n"]]:
    """`masked_softmax`, and the log-sum-exp of the visible logits: -inf, with zero gradient, where there are none."""
    weights, total, lse = masked_exponentials(logits, mask)
    return weights / total, lse


def reference_attention(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
    scale: float,
) -> Float[Array, "B T K G H"]:
    """Attention by a dense mask. Quadratic in memory; any device; rows that see nothing give 0."""
    return reference_partial(q, k, v, mask, scale)[0]


def reference_partial(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
    scale: float,
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B T K G"]]:
    """`reference_attention` and the float32 log-sum-exp of each query's logits, -inf for one that sees nothing."""
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("btkgh,bskh->bkgts", q.astype(jnp.float32), k.astype(jnp.float32), precision=highest)
    weights, lse = masked_softmax_lse(logits * scale, mask[:, None, None])
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(jnp.float32), precision=highest)
    return out.astype(q.dtype), jnp.moveaxis(lse, 3, 1)
