"""Pallas GPU backend: one kernel (`pallas_triton`) for prefix and rows, for the suffix, and for dense prompts.

Lowered for other platforms than CUDA the kernel is interpreted: slow, for tests.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from blockrank.attention.pallas_codes import (
    UNSEEN,
    dense_codes,
    log_fallback,
    own_intervals,
    suffix_codes,
    why_not_streamed,
)
from blockrank.attention.pallas_triton import Codes, stream_attention
from blockrank.attention.visibility import DENSE, Tokens, Visibility
from blockrank.attention.xla import xla_attention, xla_partial
from blockrank.layout import PAD, TokenLayout


def pallas_gpu_attention(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    layout: TokenLayout,
    visibility: Visibility,
    sliding_window: Array | int | None,
    scale: float,
) -> Float[Array, "B T K G H"]:
    """Attention over a whole layout; equals the oracle in values and gradients.

    Takes BlockRank's pattern and dense causal attention without windows, in float32 or bfloat16. Anything else is
    computed by `xla` and logged once.
    """
    obstacle = "a sliding window" if sliding_window is not None else why_not_streamed(q, k, v, visibility)
    if obstacle is not None:
        log_fallback("pallas_gpu", obstacle)
        return xla_attention(q, k, v, layout, visibility, sliding_window, scale)
    segments, positions = jnp.asarray(layout.segment_ids), jnp.asarray(layout.positions)
    if visibility == DENSE:
        return _up_to(q, k, v, *dense_codes(segments, positions), scale)[0]
    outputs, suffix, prefix = [], layout.suffix, layout.shape.prefix
    ahead = slice(0, suffix.start)
    if suffix.start:
        codes = _document_codes(segments[:, ahead], prefix)
        out, _ = stream_attention(q[:, ahead], k[:, ahead], v[:, ahead], codes, shared=prefix, scale=scale)
        outputs.append(out)
    if layout.shape.suffix:
        outputs.append(_up_to(q[:, suffix], k, v, *suffix_codes(segments[:, suffix], segments), scale)[0])
    return jnp.concatenate(outputs, axis=1)


def pallas_gpu_partial(
    q: Float[Array, "B Q K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    queries: Tokens,
    keys: Tokens,
    visibility: Visibility,
    scale: float,
) -> tuple[Float[Array, "B Q K G H"], Float[Array, "B Q K G"]]:
    """The suffix's attention to the keys of a stream that ends with it, and the float32 log-sum-exps (-inf: blind).

    Keys marked as padding are not counted. What the kernel cannot take is computed by `xla` and logged once.
    """
    obstacle = why_not_streamed(q, k, v, visibility)
    if obstacle is not None:
        log_fallback("pallas_gpu", obstacle)
        return xla_partial(q, k, v, queries, keys, visibility, scale)
    return _up_to(q, k, v, *suffix_codes(queries.segment_ids, keys.segment_ids), scale)


def _up_to(
    q: Array, k: Array, v: Array, query_codes: Int[Array, "B T"], key_codes: Int[Array, "B S"], scale: float
) -> tuple[Array, Array]:
    """Each query sees the keys whose codes are at most its own."""
    return stream_attention(q, k, v, Codes(jnp.zeros_like(query_codes), query_codes, key_codes), scale=scale)


def _document_codes(segment_ids: Int[Array, "B T"], prefix: int) -> Codes:
    """Codes of a stream of prefix and rows: indices, from the first of its own segment to its own for each token."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    real = segment_ids != PAD
    own = own_intervals(segment_ids[:, None])[:, 0, 0]
    return Codes(jnp.where(index < prefix, 0, own), jnp.where(real, index, -1), jnp.where(real, index, UNSEEN))
