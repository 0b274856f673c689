"""The Pallas TPU kernels compiled for v6e ahead of time by libtpu: no TPU is needed, and none is touched."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockrank.attention.dispatch import attend
from blockrank.attention.visibility import BLOCKRANK, DENSE, Visibility
from blockrank.layout import LayoutShape, TokenLayout

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: the extra `tpu` has it", allow_module_level=True)


@cache
def v6e() -> jax.sharding.Sharding:
    from jax.experimental import topologies

    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # other processes may compile at the same time
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4")
    assert topology.devices[0].device_kind == "TPU v6 lite"
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def shaped(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=v6e())


def layout_of(shape: LayoutShape, pattern: Visibility) -> TokenLayout:
    """A batch of one, no values."""

    def ints(size: int) -> jax.ShapeDtypeStruct:
        return shaped((1, size), np.dtype(np.int32))

    mask = shaped((1, shape.documents), np.dtype(bool))
    streams = [ints(shape.tokens)] * 3
    return TokenLayout(
        *streams, ints(shape.signals), ints(shape.labels), mask, shape=shape, sequential=pattern.sequential
    )


def kernels(
    head_dim: int, dtype: jnp.dtype, shape: LayoutShape, pattern: Visibility = BLOCKRANK, groups: int = 4
) -> int:
    """Compile output and gradients; how many kernels the program calls."""

    def run(q, k, v, cotangent, layout):
        out, pull = jax.vjp(lambda *x: attend(*x, layout=layout, visibility=pattern, backend="pallas_tpu"), q, k, v)
        return out, pull(cotangent)

    q = shaped((1, shape.tokens, 2, groups, head_dim), dtype)
    k = shaped((1, shape.tokens, 2, head_dim), dtype)
    compiled = jax.jit(run).trace(q, k, k, q, layout_of(shape, pattern)).lower(lowering_platforms=("tpu",)).compile()
    return (compiled.as_text() or "").count('custom_call_target="tpu_custom_call"')


def stream(prefix: int, rows: int, row_length: int, suffix: int) -> LayoutShape:
    return LayoutShape(rows, prefix, rows, row_length, suffix, 2, 0)


SMALL = stream(prefix=32, rows=2, row_length=256, suffix=32)
FORWARD_AND_BACKWARD = 6
"""Of prefix, rows and suffix."""


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, jnp.float32), (80, jnp.bfloat16), (128, jnp.bfloat16)])
def test_compiles(head_dim: int, dtype: jnp.dtype) -> None:
    assert kernels(head_dim, dtype, SMALL) == FORWARD_AND_BACKWARD


def test_dense_compiles() -> None:
    assert kernels(64, jnp.bfloat16, SMALL, DENSE) == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    "shape",
    [stream(300, 2, 512, 40), stream(1024, 2, 160, 32), stream(1, 3, 130, 1)],
    ids=["several tiles", "long prefix, chunked", "nothing whole"],
)
def test_every_head_dim_and_dtype_compiles(head_dim: int, dtype: jnp.dtype, shape: LayoutShape) -> None:
    assert kernels(head_dim, dtype, shape) == FORWARD_AND_BACKWARD


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3, 7, 8])
def test_every_grouping_compiles(groups: int) -> None:
    assert kernels(64, jnp.bfloat16, stream(96, 2, 512, 32), groups=groups) == FORWARD_AND_BACKWARD


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "row_length"), [(jnp.bfloat16, 2816), (jnp.float32, 1536)])
def test_the_longest_rows_compile(dtype: jnp.dtype, row_length: int) -> None:
    """What `row_attention_fits` lets through fits in VMEM."""
    assert kernels(128, dtype, stream(1024, 2, row_length, 32)) == FORWARD_AND_BACKWARD


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dense_compiles_in_chunks(dtype: jnp.dtype) -> None:
    assert kernels(128, dtype, stream(256, 8, 512, 32), DENSE) == 2
