"""One door to every backend: who sees whom comes in as a `Visibility`, how it is computed as a name."""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal, get_args

import jax
from jaxtyping import Array, Float

from blockrank.attention.reference import reference_attention
from blockrank.attention.visibility import Tokens, Visibility
from blockrank.attention.xla import xla_attention
from blockrank.errors import UserError
from blockrank.layout import TokenLayout

Backend = Literal["auto", "reference", "xla"]
logger = logging.getLogger(__name__)


@cache
def resolve_backend(name: str) -> str:
    """The backend a name stands for on this platform; `auto` is logged once."""
    if name not in get_args(Backend):
        raise UserError(f"attention_backend={name!r} is unknown: choose one of {', '.join(get_args(Backend))}")
    if name != "auto":
        return name
    logger.info("attention backend on %s: xla", jax.default_backend())
    return "xla"


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
    if resolve_backend(backend) == "reference":
        mask = visibility.materialize(Tokens.of(layout), sliding_window)
        return reference_attention(q, k, v, mask, scale)
    return xla_attention(q, k, v, layout, visibility, sliding_window, scale)
