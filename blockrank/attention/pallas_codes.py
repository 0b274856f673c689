"""What the Pallas backends ask of a layout: who sees whom, as integers to compare; and what no kernel takes."""

from __future__ import annotations

import logging
from functools import cache

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from blockrank.attention.visibility import BLOCKRANK, DENSE, Visibility
from blockrank.layout import PAD, SUFFIX

logger = logging.getLogger(__name__)
UNSEEN = 1 << 30
"""The code of a key that no query sees."""
HEAD_DIM_QUANTUM, MAX_HEAD_DIM = 16, 128


def dense_codes(
    segment_ids: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Codes of queries and keys where a token sees every token at its position or before, and padding nothing."""
    real = segment_ids != PAD
    return jnp.where(real, positions, -1), jnp.where(real, positions, UNSEEN)


def suffix_codes(
    suffix_ids: Int[Array, "B Q"], segment_ids: Int[Array, "B T"]
) -> tuple[Int[Array, "B Q"], Int[Array, "B T"]]:
    """Codes of suffix queries, and of a stream of keys that ends with the suffix: all before it, then its own past."""
    start = segment_ids.shape[1] - suffix_ids.shape[1]
    own = 1 + jnp.arange(suffix_ids.shape[1], dtype=jnp.int32)
    ahead = jnp.where(segment_ids[:, :start] == PAD, UNSEEN, 0)
    past = jnp.where(segment_ids[:, start:] == SUFFIX, own, UNSEEN)
    return jnp.where(suffix_ids == SUFFIX, own, -1), jnp.concatenate([ahead, past], axis=1)


def own_intervals(segment_ids: Int[Array, "B M R"]) -> Int[Array, "B M 2 R"]:
    """First and last row index that each token sees, both inclusive; (-1, -1) for padding."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[-1], dtype=jnp.int32), segment_ids.shape)
    before = jnp.pad(segment_ids[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1)
    first = jax.lax.cummax(jnp.where(segment_ids != before, index, 0), axis=2)
    return jnp.where((segment_ids >= 0)[..., None, :], jnp.stack([first, index], axis=2), -1)


def why_not_streamed(q: Array, k: Array, v: Array, visibility: Visibility) -> str | None:
    """What the kernels of streamed keys cannot take, in words; None if nothing."""
    head_dim, dtypes = q.shape[-1], {x.dtype for x in (q, k, v)}
    if visibility not in (BLOCKRANK, DENSE):
        return f"visibility {visibility.name!r}"
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        return f"dtypes {', '.join(sorted(d.name for d in dtypes))}"
    if head_dim % HEAD_DIM_QUANTUM or head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim}"
    return None


@cache
def log_fallback(backend: str, obstacle: str) -> None:
    logger.info("%s cannot take %s: computed by xla", backend, obstacle)
