"""The Pallas TPU kernels compiled for v6e ahead of time by libtpu: no TPU is needed, and none is touched."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockrank.attention.dispatch import attend
from blockrank.attention.visibility import BLOCKRANK, DENSE, Visibility
from blockrank.costs.topology import Topology
from blockrank.layout import LayoutShape, TokenLayout
from blockrank.parallel import MeshConfig, spread_lists

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: the extra `tpu` has it", allow_module_level=True)


@cache
def v6e() -> tuple[Any, ...]:
    devices = Topology.of("v6e:2x4").devices
    assert devices[0].device_kind == "TPU v6 lite"
    return devices


def shaped(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(v6e()[0]))


def layout_of(shape: LayoutShape, pattern: Visibility) -> TokenLayout:
    """A batch of one, no values."""

    def ints(size: int) -> jax.ShapeDtypeStruct:
        return shaped((1, size), np.dtype(np.int32))

    mask = shaped((1, shape.documents), np.dtype(bool))
    streams = [ints(shape.tokens)] * 3
    return TokenLayout(
        *streams, ints(shape.signals), ints(shape.labels), mask, shape=shape, sequential=pattern.sequential
    )


def calls(program: jax.stages.Compiled) -> int:
    """How many kernels a program calls."""
    return (program.as_text() or "").count('custom_call_target="tpu_custom_call"')


def kernels(
    head_dim: int, dtype: jnp.dtype, shape: LayoutShape, pattern: Visibility = BLOCKRANK, groups: int = 4
) -> int:
    """Compile output and gradients; how many kernels the program calls."""

    def run(q, k, v, cotangent, layout):
        out, pull = jax.vjp(lambda *x: attend(*x, layout=layout, visibility=pattern, backend="pallas_tpu"), q, k, v)
        return out, pull(cotangent)

    q = shaped((1, shape.tokens, 2, groups, head_dim), dtype)
    k = shaped((1, shape.tokens, 2, head_dim), dtype)
    program = jax.jit(run).trace(q, k, k, q, layout_of(shape, pattern))
    return calls(program.lower(lowering_platforms=("tpu",)).compile())


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


@pytest.mark.parametrize("sizes", [MeshConfig(doc=8), MeshConfig(doc=4, tensor=2)], ids=str)
def test_auto_compiles_to_kernels_on_every_device_of_a_mesh(sizes: MeshConfig) -> None:
    """A list in shards, heads on one or two devices each; the merge sends log-sum-exps and outputs of the suffix."""
    mesh = sizes.make(v6e())
    shape = replace(SMALL, shards=sizes.doc)
    layout = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, TokenLayout.blank(1, shape)))
    q, k = (jax.ShapeDtypeStruct((*layout.tokens.shape, *heads), jnp.bfloat16) for heads in ((2, 4, 128), (2, 128)))

    def run(q, k, v, layout):
        return attend(q, k, v, layout=layout, visibility=BLOCKRANK)

    with jax.set_mesh(mesh):
        program = (
            jax.jit(run).trace(*spread_lists((q, k, k, layout), mesh)).lower(lowering_platforms=("tpu",)).compile()
        )
    assert calls(program) == FORWARD_AND_BACKWARD // 2
    found = re.findall(r"= \(?(\w+\[[\d,]*\]).* (all-\w+?)(?:-start)?\(", program.as_text() or "")
    kv_heads = 2 // sizes.tensor
    assert sorted(kind for _, kind in found) == ["all-gather", "all-reduce"], "log-sum-exps, outputs"
    (sent,) = (shape for shape, kind in found if kind == "all-reduce")
    assert sorted(sent[5:-1].split(",")) == sorted(map(str, (1, 32, kv_heads, 4, 128)))


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
