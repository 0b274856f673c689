"""Kernels in int8: a quarter of float32's bytes, half of bfloat16's.

Weights only, symmetric, one scale per output channel and layer: W[i, o] is about code[i, o] * scale[o], with the scale
that takes the channel's largest weight to 127. Codes are exact in bfloat16, so the product of activations and codes is
what it would be with the weights `code * scale`, up to rounding. Embeddings, head, norms and biases keep their type.

L layers, i inputs, o outputs.
"""

from __future__ import annotations

from typing import Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int8

from blockrank.errors import UserError
from blockrank.models.layers import Linear, Quantized

Weights = Literal["int8"]
LARGEST = 127
M = TypeVar("M", bound=nnx.Module)


def check_weights(name: str | None) -> None:
    """Raise `UserError` unless kernels can be held as `name` says."""
    if name is not None and name not in get_args(Weights):
        raise UserError(f"weights={name!r} is unknown: choose {' or '.join(get_args(Weights))}, or leave it out")


def quantize_kernel(kernel: Float[Array, "*L i o"]) -> tuple[Int8[Array, "*L i o"], Float[Array, "*L o"]]:
    """Codes from -127 to 127 and float32 scales; no weight moves by more than half its channel's scale."""
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), axis=-2)
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return jnp.round(kernel / scale[..., None, :]).astype(jnp.int8), scale


def dequantize_kernel(codes: Int8[Array, "*L i o"], scale: Float[Array, "*L o"]) -> Float[Array, "*L i o"]:
    """The float32 weights that codes and scales stand for."""
    return codes.astype(jnp.float32) * scale[..., None, :]


def quantize_model(model: M) -> M:
    """The model with the kernels of its linear layers in int8, but for a head's; the rest is shared.

    A layer that is quantised already stays as it is. Works on stacked blocks, and on models cut before the score layer.
    """
    graph, state = nnx.split(model)
    copy = nnx.merge(graph, state)
    for path, layer in nnx.iter_modules(copy):
        if isinstance(layer, Linear) and layer.kernel_scale is None and path != ("head",):
            codes, scale = jax.jit(quantize_kernel)(layer.kernel[...])
            layer.kernel, layer.kernel_scale = Quantized(codes), Quantized(scale)
    return copy


def parameter_bytes(model: nnx.Module) -> int:
    """What a model's parameters take."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
