"""One door to every backend: who sees whom comes in as a `Visibility`, how it is computed as a name.

Under a mesh (`jax.set_mesh`) every device attends over its own streams and heads. Where a list lies in shards, only the
suffix looks beyond its own: each shard attends over what it holds, and the partial results are merged.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from blockrank.attention.merge import Shards
from blockrank.attention.pallas_gpu import pallas_gpu_attention, pallas_gpu_partial
from blockrank.attention.pallas_tpu import pallas_tpu_attention, pallas_tpu_partial
from blockrank.attention.reference import reference_attention, reference_partial
from blockrank.attention.visibility import Tokens, Visibility
from blockrank.attention.xla import xla_attention, xla_partial
from blockrank.errors import UserError
from blockrank.layout import PAD, TokenLayout
from blockrank.parallel import BATCH, active_mesh, target_platform

Backend = Literal["auto", "reference", "xla", "pallas_tpu", "pallas_gpu"]
KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}
"""What `auto` takes by platform where kernels can run; `xla` elsewhere."""
ATTENTION = {"xla": xla_attention, "pallas_tpu": pallas_tpu_attention, "pallas_gpu": pallas_gpu_attention}
PARTIAL = {"xla": xla_partial, "pallas_tpu": pallas_tpu_partial, "pallas_gpu": pallas_gpu_partial}
logger = logging.getLogger(__name__)


def resolve_backend(name: str) -> str:
    """The backend a name stands for on the platform that is compiled for; what `auto` takes is logged once."""
    if name not in get_args(Backend):
        raise UserError(f"attention_backend={name!r} is unknown: choose one of {', '.join(get_args(Backend))}")
    if name != "auto":
        return name
    platform = target_platform()
    chosen = KERNELS.get(platform, "xla") if _one_device_runs_this() else "xla"
    _log_choice(platform, chosen)
    return chosen


def _one_device_runs_this() -> bool:
    """Whether kernels may run here: the compiler cannot split one over devices, only `shard_map` can."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) or (jax.device_count() if mesh.empty else mesh.size) == 1


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

    Raises `UserError` for a layout with positions the visibility is not meant for, or one in shards whose documents the
    visibility lets see each other.
    """
    visibility.check_positions(layout)
    options = {"visibility": visibility, "backend": backend}
    if active_mesh() is None:
        return _attend(q, k, v, layout, sliding_window, shards=Shards(layout.shape.shards), **options)
    heads = PartitionSpec(*BATCH, None, "tensor")
    # Every float array names every axis, so gradients need none of the bookkeeping that kernels would have to declare.
    return jax.shard_map(
        partial(_attend, shards=Shards(layout.shape.shards, "doc"), **options),
        in_specs=(heads, heads, heads, BATCH, PartitionSpec()),
        out_specs=heads,
        check_vma=False,
    )(q, k, v, layout, None if sliding_window is None else jnp.asarray(sliding_window))


def attend_to(
    q: Float[Array, "B Q K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    queries: Tokens,
    keys: Tokens,
    visibility: Visibility,
    backend: str = "auto",
) -> Float[Array, "B Q K G H"]:
    """Attention of some tokens to any others, whose keys may come from elsewhere; on one device."""
    return _partial(q, k, v, queries, keys, visibility, resolve_backend(backend))[0]


def _attend(
    q: Array,
    k: Array,
    v: Array,
    layout: TokenLayout,
    window: Array | int | None,
    *,
    shards: Shards,
    visibility: Visibility,
    backend: str,
) -> Float[Array, "B T K G H"]:
    """`attend` on one device, among the shards of its lists."""
    backend = resolve_backend(backend)
    if shards.count == 1:
        return _whole(q, k, v, layout, visibility, backend, window)
    if not visibility.documents_apart or window is not None:
        raise UserError(
            f"visibility={visibility.name!r} lets documents see each other, so a list cannot be spread over devices: "
            "use a mesh with doc=1"
        )
    suffix, tokens = layout.suffix, Tokens.of(layout)
    rows = slice(0, suffix.start)
    out = _whole(q[:, rows], k[:, rows], v[:, rows], layout.without_suffix(), visibility, backend, None)
    queries = Tokens(*(field[:, suffix] for field in tokens))
    # Prefix and suffix are in every shard; the suffix may count them once.
    counted = shards.is_first(q.shape[0])[:, None] | (tokens.segment_ids >= 0)
    keys = tokens._replace(segment_ids=jnp.where(counted, tokens.segment_ids, PAD))
    partial_result = _partial(q[:, suffix], k, v, queries, keys, visibility, backend)
    return jnp.concatenate([out, shards.merge(*partial_result)], axis=1)


def _whole(
    q: Array,
    k: Array,
    v: Array,
    layout: TokenLayout,
    visibility: Visibility,
    backend: str,
    window: Array | int | None,
) -> Float[Array, "B T K G H"]:
    scale = q.shape[-1] ** -0.5
    if backend == "reference":
        return reference_attention(q, k, v, visibility.materialize(Tokens.of(layout), window), scale)
    return ATTENTION[backend](q, k, v, layout, visibility, window, scale)


def _partial(
    q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, visibility: Visibility, backend: str
) -> tuple[Float[Array, "B Q K G H"], Float[Array, "B Q K G"]]:
    """The suffix's queries over one shard's stream: outputs, and float32 log-sum-exps of the scaled logits."""
    scale = q.shape[-1] ** -0.5
    if backend == "reference":
        return reference_partial(q, k, v, visibility.allowed(queries, keys), scale)
    return PARTIAL[backend](q, k, v, queries, keys, visibility, scale)
