"""The oracle: dense masked attention in float32, and the masked softmax all backends share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_exponentials(
    logits: Float[Array, "*n S"], mask: Bool[Array, "*#n S"]
) -> tuple[Float[Array, "*n S"], Float[Array, "*n 1"]]:
    """Softmax over the last axis before its division: weights, 0 outside `mask`, and their sum, 1 for blind rows."""
    logits = jnp.where(mask, logits, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights, jnp.where(total > 0, total, 1.0)


def masked_softmax(logits: Float[Array, "*n S"], mask: Bool[Array, "*#n S"]) -> Float[Array, "*n S"]:
    """Softmax over the last axis where `mask`; a row with nothing visible is all zero, with zero gradient."""
    weights, total = masked_exponentials(logits, mask)
    return weights / total


def reference_attention(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
    scale: float,
) -> Float[Array, "B T K G H"]:
    """Attention by a dense mask. Quadratic in memory; any device; rows that see nothing give 0."""
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("btkgh,bskh->bkgts", q.astype(jnp.float32), k.astype(jnp.float32), precision=highest)
    weights = masked_softmax(logits * scale, mask[:, None, None])
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(jnp.float32), precision=highest)
    return out.astype(q.dtype)
