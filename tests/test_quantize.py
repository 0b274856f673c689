"""Kernels in int8: what a code may be off by, and that a quantised model computes with the weights it stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from strategies import HASTE, random_prompt, tiny_config, tiny_decoder

from blockrank.api import Reranker
from blockrank.attention.visibility import BLOCKRANK
from blockrank.errors import UserError
from blockrank.layout import TokenLayout
from blockrank.models.decoder import Decoder, TruncatedDecoder
from blockrank.models.layers import Linear
from blockrank.models.loading import cast_parameters, flat_parameters
from blockrank.models.quantize import LARGEST, dequantize_kernel, parameter_bytes, quantize_kernel, quantize_model
from blockrank.rankers.readout import attention_scores

LAYER = 2


def decoder() -> Decoder:
    """With biases and norms of queries and keys, and a head of its own."""
    return tiny_decoder(replace(tiny_config(3, tie_embeddings=False), qkv_bias=True, qk_norm=True))


def scores(model: Decoder | TruncatedDecoder) -> np.ndarray:
    prompts = [random_prompt(0, 7, [9, 3, 12, 5], 9), random_prompt(1, 3, [4, 8], 6)]
    layout = TokenLayout.from_segments(prompts, row_length=16, suffix_offset=256)
    graph, state = nnx.split(model)

    def score(state: nnx.State) -> jax.Array:
        return attention_scores(nnx.merge(graph, state), layout, LAYER, visibility=BLOCKRANK, aggregation="sum")

    return np.asarray(jax.jit(score, compiler_options=HASTE)(state))


def dequantized(model: Decoder) -> Decoder:
    """The float32 model that a quantised one stands for."""
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    for path in [path for path in flat if path[-1] == "kernel_scale"]:
        kernel = *path[:-1], "kernel"
        flat[kernel] = nnx.Param(dequantize_kernel(flat[kernel][...], flat.pop(path)[...]))
    plain = decoder()
    nnx.update(plain, nnx.from_flat_state(list(flat.items())))
    return plain


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(5, 3), (2, 8, 4), (1, 1)]),
    exponent=st.integers(-20, 20),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_no_weight_moves_by_more_than_half_a_step_and_codes_survive_a_round_trip(
    seed: int, shape: tuple[int, ...], exponent: int, dtype: str
) -> None:
    rng = np.random.default_rng(seed)
    kernel = jnp.asarray(rng.standard_normal(shape) * 2.0**exponent, dtype).at[..., 0].set(0)
    codes, scale = quantize_kernel(kernel)
    assert codes.dtype == jnp.int8
    assert scale.shape == (*shape[:-2], shape[-1])
    restored = dequantize_kernel(codes, scale)
    step = np.asarray(scale)[..., None, :]
    assert (np.abs(np.asarray(kernel, np.float32) - restored) <= step * (0.5 + LARGEST * 2.0**-22)).all()
    again, same = quantize_kernel(restored)
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_allclose(same, scale, rtol=2.0**-22)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_computes_with_the_weights_its_codes_stand_for(dtype: str) -> None:
    layer = Linear(64, 48, bias=True, rngs=nnx.Rngs(0))
    layer.bias = nnx.Param(jnp.linspace(-1, 1, 48))
    small = quantize_model(nnx.List([layer]))[0]
    assert small.kernel_scale is not None
    x = jax.random.normal(jax.random.key(1), (7, 64)).astype(dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(dequantize_kernel(small.kernel[...], small.kernel_scale[...]))
    rounding = 1e-6 if dtype == "float32" else 2.0**-7
    np.testing.assert_allclose(np.asarray(small(x), np.float64), exact + np.linspace(-1, 1, 48), atol=rounding)
    moved = np.abs(np.asarray(x, np.float64) @ np.asarray(layer.kernel[...]) - exact)
    bound = np.abs(np.asarray(x, np.float64)).sum(axis=1)[:, None] * np.asarray(small.kernel_scale[...]) / 2
    assert (moved <= bound * (1 + 1e-4)).all()
    assert moved.max() > 0


def test_scores_are_those_of_the_weights_that_the_codes_stand_for() -> None:
    """Also after a cut, and when the cut comes first."""
    whole = decoder()
    small = quantize_model(whole)
    expected = scores(dequantized(small))
    for model in (small, small.truncate(LAYER), quantize_model(whole.truncate(LAYER))):
        np.testing.assert_allclose(scores(model), expected, rtol=0, atol=1e-5)
    assert np.abs(scores(whole) - expected).max() > 1e-5


def test_kernels_of_blocks_take_a_byte_a_weight_and_nothing_casts_them() -> None:
    whole = decoder()
    small = cast_parameters(quantize_model(whole), jnp.bfloat16)
    before, after = flat_parameters(whole), flat_parameters(small)
    kernels = [path for path in before if path.startswith("blocks.") and path.endswith(".kernel")]
    assert len(kernels) == 7
    assert [path for path, leaf in after.items() if leaf.dtype == jnp.int8] == kernels
    assert {leaf.dtype for path, leaf in after.items() if path.endswith("kernel_scale")} == {jnp.dtype("float32")}
    assert {leaf.dtype for path, leaf in after.items() if path in before and path not in kernels} == {
        jnp.dtype("bfloat16")
    }
    rest = sum(leaf.size for path, leaf in before.items() if path not in kernels)
    scales = sum(before[path].size // before[path].shape[-2] for path in kernels)
    assert parameter_bytes(small) == sum(before[path].size for path in kernels) + 2 * rest + 4 * scales
    assert {leaf.dtype for leaf in flat_parameters(whole).values()} == {jnp.dtype("float32")}


def test_other_weights_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="weights='int4' is unknown: choose int8, or leave it out"):
        Reranker.from_pretrained(tmp_path / "nothing", weights="int4")
