"""Pallas TPU backend: packed rows by one kernel, prefix, suffix and dense prompts by another.

Rows see the prefix and their own documents (`pallas_rows`); everything else is a comparison of codes over streamed keys
(`pallas_flash`). Lowered for other platforms the kernels are interpreted: slow, for tests.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from blockrank.attention.pallas_codes import dense_codes, log_fallback, suffix_codes, why_not_streamed
from blockrank.attention.pallas_flash import flash_attention
from blockrank.attention.pallas_rows import row_attention, row_attention_fits
from blockrank.attention.visibility import BLOCKRANK, DENSE, Tokens, Visibility
from blockrank.attention.xla import xla_attention, xla_partial
from blockrank.layout import PREFIX, TokenLayout


def pallas_tpu_attention(
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
    obstacle = why_not(q, k, v, layout, visibility, sliding_window)
    if obstacle is not None:
        log_fallback("pallas_tpu", obstacle)
        return xla_attention(q, k, v, layout, visibility, sliding_window, scale)
    segments, positions = jnp.asarray(layout.segment_ids), jnp.asarray(layout.positions)
    if visibility == DENSE:
        query_codes, key_codes = dense_codes(segments, positions)
        return flash_attention(q, k, v, query_codes, key_codes, scale=scale)[0]
    outputs = []
    prefix, rows, suffix = layout.prefix, layout.rows, layout.suffix
    if layout.shape.prefix:
        codes = dense_codes(segments[:, prefix], positions[:, prefix])
        outputs.append(flash_attention(q[:, prefix], k[:, prefix], v[:, prefix], *codes, scale=scale)[0])
    if rows.stop > rows.start:
        shape = (q.shape[0], layout.shape.rows, layout.shape.row_length)
        own_q, own_k, own_v = (x[:, rows].reshape(*shape, *x.shape[2:]) for x in (q, k, v))
        out, _ = row_attention(
            own_q,
            own_k,
            own_v,
            k[:, prefix],
            v[:, prefix],
            segments[:, rows].reshape(shape),
            jnp.sum(segments[:, prefix] == PREFIX, axis=1, dtype=jnp.int32),
            scale=scale,
        )
        outputs.append(out.reshape(q[:, rows].shape))
    if layout.shape.suffix:
        codes = suffix_codes(segments[:, suffix], segments)
        outputs.append(flash_attention(q[:, suffix], k, v, *codes, scale=scale)[0])
    return jnp.concatenate(outputs, axis=1)


def pallas_tpu_partial(
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
        log_fallback("pallas_tpu", obstacle)
        return xla_partial(q, k, v, queries, keys, visibility, scale)
    return flash_attention(q, k, v, *suffix_codes(queries.segment_ids, keys.segment_ids), scale=scale)


def why_not(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    layout: TokenLayout,
    visibility: Visibility,
    sliding_window: Array | int | None,
) -> str | None:
    """What of a call the kernels cannot take, in words; None if nothing."""
    if sliding_window is not None:
        return "a sliding window"
    sizes = layout.shape
    rows = sizes.row_length, sizes.prefix, q.shape[-1], q.dtype.itemsize
    obstacle = why_not_streamed(q, k, v, visibility)
    if obstacle is None and visibility == BLOCKRANK and not row_attention_fits(*rows):
        return f"rows of {sizes.row_length} tokens with a prefix of {sizes.prefix}"
    return obstacle
