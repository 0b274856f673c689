"""A decoder block; L blocks of any kind stacked along a leading axis and scanned: one compiled body for any depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from blockrank.models.config import DecoderConfig
from blockrank.models.layers import Attention, GatedMLP, RMSNorm
from blockrank.parallel import active_mesh, gather_weight

Attend = Callable[..., Array]
Remat = Literal["none", "dots", "full"]
M = TypeVar("M", bound=nnx.Module)


def _all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """Saves every result but those on the way from a layer's parameters to its gathered weights."""
    return primitive.name not in ("convert_element_type", "sharding_constraint", "custom_vjp_call")


REMAT_POLICIES = {
    "none": _all_but_weights,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Block(nnx.Module):
    """Pre-norm attention and gated MLP, each with its residual."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], attend: Attend, window: Array | int | None = None
    ) -> Float[Array, "B T D"]:
        normed = self.attention_norm(x)
        attention = self.attention
        out = attend(
            attention.queries(normed, positions),
            attention.keys(normed, positions),
            attention.values(normed),
            sliding_window=window,
        )
        x = x + attention.out(out.reshape(*x.shape[:2], -1))
        return x + self.mlp(self.mlp_norm(x))


def stack_layers(create: Callable[[nnx.Rngs], M], num_layers: int, *, rngs: nnx.Rngs) -> M:
    """`num_layers` modules as one, whose every parameter has a leading layer axis [L, ...]."""

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs: nnx.Rngs) -> M:
        return create(rngs)

    return stacked(rngs)


def stacked_blocks(config: DecoderConfig, *, rngs: nnx.Rngs) -> Block:
    """All blocks of a decoder."""
    return stack_layers(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs)


def take_layers(stacked: M, index: int | slice) -> M:
    """One layer (int) or a shorter stack (slice) of a stacked module."""
    graph, state = nnx.split(stacked)
    return nnx.merge(graph, jax.tree.map(lambda p: p[index], state))


def gathered(module: M, prefix: str, dtype: jax.typing.DTypeLike) -> M:
    """A part of a model about to run; under a mesh, with weights in `dtype` gathered from all (`gather_weight`)."""
    if active_mesh() is None:
        return module
    graph, state = nnx.split(module)
    flat = [
        (path, leaf.replace(gather_weight(".".join((prefix, *map(str, path))), leaf.get_value(), dtype)))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def scan_blocks(
    blocks: M,
    step: Callable[[M, Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    *,
    remat: Remat = "none",
) -> tuple[Any, Any]:
    """`carry, y = step(block, carry, x)` over all layers; returns the last carry and the stacked ys.

    `remat`: what the backward pass recomputes inside a layer: nothing (on several devices, casts and gathered weights),
    all but matrix products, or everything.
    """
    graph, state = nnx.split(blocks)

    def body(carry: Any, layer: tuple[Any, Any]) -> tuple[Any, Any]:
        return step(nnx.merge(graph, layer[0]), carry, layer[1])

    if remat != "none" or active_mesh() is not None:
        body = jax.checkpoint(body, policy=REMAT_POLICIES[remat], prevent_cse=False)
    return jax.lax.scan(body, carry, (state, xs))


def layer_windows(config: DecoderConfig) -> Int[Array, " L"] | None:
    """Each layer's sliding window as scan input, None if all layers are global."""
    if all(window is None for window in config.windows):
        return None
    unbounded = jnp.iinfo(jnp.int32).max
    return jnp.asarray([unbounded if window is None else window for window in config.windows], jnp.int32)
