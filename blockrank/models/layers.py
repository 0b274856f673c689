"""The pieces every transformer here is made of, each defined once.

B batch, T tokens, D model, F ffn, K kv heads, G query heads per kv head, H head dim.
Parameters keep their own dtype (usually float32 masters); computation follows the dtype of the activations.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from blockrank.models.config import DecoderConfig, RopeConfig
from blockrank.models.products import product, scaled_product


class Quantized(nnx.Param):
    """An int8 kernel or the float32 scales of its outputs: no cast of a model's parameters changes it."""


class Linear(nnx.Module):
    """`x @ kernel + bias` with kernel [in, out]; `x @ kernel * kernel_scale + bias` once it is quantised.

    Plus `lora(x)` where `blockrank.models.lora` put an adapter there.
    """

    kernel_scale: nnx.Param | None
    lora: Any

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, std: float = 0.02, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32))
        self.kernel_scale = nnx.data(None)
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32)) if bias else None
        self.lora = nnx.data(None)

    def __call__(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        y = self._product(x)
        y = y if self.bias is None else y + self.bias[...].astype(x.dtype)
        return y if self.lora is None else y + self.lora(x)

    def _product(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        kernel = self.kernel[...]
        return product(x, kernel) if self.kernel_scale is None else scaled_product(x, kernel, self.kernel_scale[...])


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.epsilon)
        return (self.scale[...].astype(x.dtype) * x32.astype(x.dtype)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm with scale and bias, computed in float32 (Ba et al., 2016)."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((size,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.epsilon)
        return (normed * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 [H/2] and the factor on cos and sin.

    The power is taken in float64, rounded to float32, and inverted in float32, as PyTorch's rounding comes out (within
    an ulp for every base and size tested): at position 16384 an ulp is worth 3e-5 in a score.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inverse = np.float32(1.0) / np.power(rope.theta, exponent).astype(np.float32)
    if rope.kind == "default":
        return inverse, 1.0
    if rope.kind == "linear":
        return inverse / np.float32(rope.factor), 1.0
    if rope.original_max_positions is None:
        raise ValueError(f"rope kind {rope.kind!r} needs original_max_positions")
    if rope.kind == "llama3":
        return _llama3_frequencies(inverse, rope, rope.original_max_positions), 1.0
    return _yarn_frequencies(inverse, rope, head_dim, rope.original_max_positions)


def _llama3_frequencies(inverse: np.ndarray, rope: RopeConfig, original: int) -> np.ndarray:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, the band between is blended."""
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    slowed = np.where(wavelength > original / rope.low_freq_factor, inverse / rope.factor, inverse)
    between = (wavelength <= original / rope.low_freq_factor) & (wavelength >= original / rope.high_freq_factor)
    return np.where(between, blended, slowed).astype(np.float32)


def _yarn_frequencies(inverse: np.ndarray, rope: RopeConfig, head_dim: int, original: int) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, extrapolate fast ones, ramp between."""

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    frequencies = inverse / rope.factor * ramp + inverse * (1 - ramp)

    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    factor = rope.attention_factor
    if factor is None and rope.mscale and rope.mscale_all_dim:
        factor = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return frequencies.astype(np.float32), magnitude(1.0) if factor is None else factor


def rotate(
    x: Float[Array, "B T *heads H"], positions: Int[Array, "B T"], rope: RopeConfig
) -> Float[Array, "B T *heads H"]:
    """Rotary embedding in the rotate-half convention; angles, cos and sin in float32."""
    frequencies, factor = rope_frequencies(rope, x.shape[-1])
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    shape = (*positions.shape, *(1,) * (x.ndim - 3), len(frequencies))
    cos, sin = (jnp.cos(angles) * factor).reshape(shape), (jnp.sin(angles) * factor).reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class GatedMLP(nnx.Module):
    """SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, bias=config.mlp_bias, std=config.initializer_range, rngs=rngs)

        self.gate = linear(config.hidden_size, config.intermediate_size)
        self.up = linear(config.hidden_size, config.intermediate_size)
        self.down = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class QueryKey(nnx.Module):
    """Queries and keys of one attention layer after RoPE: all that a score needs of it."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        options = {"bias": config.qkv_bias, "std": config.initializer_range, "rngs": rngs}
        self.query = Linear(config.hidden_size, heads, **options)
        self.key = Linear(config.hidden_size, kv_heads, **options)
        self.query_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.heads = (config.num_kv_heads, config.groups, config.head_dim)
        self.rope = config.rope

    def queries(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T K G H"]:
        q = self.query(x).reshape(*x.shape[:2], *self.heads)
        return rotate(q if self.query_norm is None else self.query_norm(q), positions, self.rope)

    def keys(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T K H"]:
        kv_heads, _, head_dim = self.heads
        k = self.key(x).reshape(*x.shape[:2], kv_heads, head_dim)
        return rotate(k if self.key_norm is None else self.key_norm(k), positions, self.rope)


class Attention(QueryKey):
    """Grouped-query attention's projections; who sees whom, and how it is computed, is the caller's `attend`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        std = config.initializer_range
        self.value = Linear(config.hidden_size, kv_heads, bias=config.qkv_bias, std=std, rngs=rngs)
        self.out = Linear(heads, config.hidden_size, bias=config.out_bias, std=std, rngs=rngs)

    def values(self, x: Float[Array, "B T D"]) -> Float[Array, "B T K H"]:
        kv_heads, _, head_dim = self.heads
        return self.value(x).reshape(*x.shape[:2], kv_heads, head_dim)
