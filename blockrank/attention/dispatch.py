"""One door to every backend: who sees whom comes in as a `Visibility`, how it is computed as a name."""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal, get_args

import jax
from jaxtyping import Array, Float

from blockrank.attention.pallas_tpu import pallas_tpu_attention
from blockrank.attention.reference import reference_attention
from blockrank.attention.visibility import Tokens, Visibility
from blockrank.attention.xla import xla_attention
from blockrank.errors import UserError
from blockrank.layout import TokenLayout

Backend = Literal["auto", "reference", "xla", "pallas_tpu"]
logger = logging.getLogger(__name__)


def resolve_backend(name: str) -> str:
    """The backend a name stands for on this platform; what `auto` takes is logged once."""
    if name not in get_args(Backend):
        raise UserError(f"attention_backend={name!r} is unknown: choose one of {', '.join(get_args(Backend))}")
    if name != "auto":
        return name
    chosen = "pallas_tpu" if jax.default_backend() == "tpu" and _one_device_runs_this() else "xla"
    _log_choice(jax.default_backend(), chosen)
    return chosen


def _one_device_runs_this() -> bool:
    """Whether kernels may run here: the compiler cannot split one over devices, only `shard_map` can."""
    return jax.device_count() == 1 or bool(jax.sharding.get_abstract_mesh().manual_axes)


@cache
def _log_choice(platform: str, chosen: str) -> None:
    logger.info("attention backend on %s: %s", platform, chosen)


def attend(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    layout: TokenLayout,
    visibility: Visibility,
    backend: str = "auto",
    sliding_window: Array | int | None = None,
) -> Float[Array, "B T K G H"]:
    """Softmax attention over a layout, logits scaled by H^-1/2. Padding and blind queries give 0.

    Raises `UserError` for a layout with positions the visibility is not meant for.
    """
    visibility.check_positions(layout)
    scale = q.shape[-1] ** -0.5
    resolved = resolve_backend(backend)
    if resolved == "reference":
        mask = visibility.materialize(Tokens.of(layout), sliding_window)
        return reference_attention(q, k, v, mask, scale)
    attention = pallas_tpu_attention if resolved == "pallas_tpu" else xla_attention
    return attention(q, k, v, layout, visibility, sliding_window, scale)
