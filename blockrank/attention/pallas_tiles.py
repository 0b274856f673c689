"""What the Pallas TPU kernels share: one tile of queries against one tile of keys, forward and backward.

Tiles are transposed: logits are [keys, queries], queries along the 128 lanes. The softmax's maximum and sum are then
rows [1, queries], reductions run over sublanes (additions of whole registers), log-sum-exps are stored without lane
padding, and of the products only those with a small factor (keys or values) need a transposed operand.

The query heads of one kv head are folded into the queries (row t * G + g), so every tile of keys is read once for all
of them and the kernels know nothing of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from blockrank.attention.precision import matmul_precision
from blockrank.packing import round_up

LANES = 128
SUBLANES = 16
"""Rows of a packed bfloat16 register; float32 has 8."""
MAX_QUERY_TILE = 640
"""Folded queries per tile: a [128, 512] tile of logits is 64 registers, and 5 * 128 serves rows of 160 whole."""
HIDDEN = -1e30
"""The logit of a key that a query does not see."""
FLOOR = -1e20
"""Running maxima start here: above `HIDDEN`, so that exp(HIDDEN - maximum) is 0 even where nothing is seen."""
BLIND = 1e30
"""The log-sum-exp that makes every weight of a query 0 in the backward pass."""

NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))
TN = (((0,), (0,)), ((), ()))


def query_tile(queries: int) -> int:
    """Queries per tile: as few equal tiles as allowed, each a multiple of 128. Padding to whole tiles keeps it."""
    return round_up(pl.cdiv(queries, pl.cdiv(queries, MAX_QUERY_TILE)), LANES)


def key_tile(keys: int, largest: int, otherwise: int) -> int:
    """All keys as one tile if they are few, else tiles of `otherwise`."""
    whole = round_up(max(keys, 1), SUBLANES)
    return whole if whole <= largest else otherwise


def pad_axis(x: Array, axis: int, size: int, fill: int = 0) -> Array:
    """`x` padded at the end of `axis` to `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill)


def product(a: Array, b: Array, dimensions: tuple) -> Array:
    return jax.lax.dot_general(
        a, b, dimensions, precision=matmul_precision(a.dtype), preferred_element_type=jnp.float32
    )


class Softmax(NamedTuple):
    """Scratch of an online softmax over key tiles, float32: maximum and sum [1, N], weighted values [H, N]."""

    peak: Array
    total: Array
    values: Array

    @staticmethod
    def scratch(queries: int, head_dim: int) -> list[Any]:
        row = pltpu.VMEM((1, queries), jnp.float32)
        return [row, row, pltpu.VMEM((head_dim, queries), jnp.float32)]

    def reset(self) -> None:
        self.peak[...] = jnp.full_like(self.peak, FLOOR)
        self.total[...] = jnp.zeros_like(self.total)
        self.values[...] = jnp.zeros_like(self.values)

    def add(
        self,
        q: Float[Array, "N H"],
        k: Float[Array, "S H"],
        v: Float[Array, "S H"],
        visible: Bool[Array, "S N"],
        scale: float,
    ) -> None:
        logits = jnp.where(visible, scale * product(k, q, NT), HIDDEN)
        peak = jnp.maximum(self.peak[...], jnp.max(logits, axis=0, keepdims=True))
        decay = jnp.exp(self.peak[...] - peak)
        weights = jnp.exp(logits - peak)
        self.peak[...] = peak
        self.total[...] = decay * self.total[...] + jnp.sum(weights, axis=0, keepdims=True)
        self.values[...] = decay * self.values[...] + product(v, weights.astype(v.dtype), TN)

    def result(self) -> tuple[Float[Array, "N H"], Float[Array, "1 N"]]:
        """Attention output and log-sum-exp, both float32: 0 and -inf for queries that saw nothing."""
        total = self.total[...]
        seen = total > 0
        safe = jnp.where(seen, total, 1.0)
        out = self.values[...] * jnp.where(seen, 1.0 / safe, 0.0)
        return out.T, jnp.where(seen, self.peak[...] + jnp.log(safe), -jnp.inf)


class Cotangent(NamedTuple):
    """What the backward pass needs of a query tile: dO [N, H]; lse and delta = sum(dO * O) - dlse, float32 [1, N]."""

    out: Float[Array, "N H"]
    lse: Float[Array, "1 N"]
    delta: Float[Array, "1 N"]


def tile_gradients(
    q: Float[Array, "N H"],
    k: Float[Array, "S H"],
    v: Float[Array, "S H"],
    cotangent: Cotangent,
    visible: Bool[Array, "S N"],
    scale: float,
) -> tuple[Float[Array, "H N"], Float[Array, "S H"], Float[Array, "S H"]]:
    """One tile's share of (dq transposed, dk, dv), float32; dq and dk are still to be multiplied by the scale."""
    logits = jnp.where(visible, scale * product(k, q, NT), HIDDEN)
    weights = jnp.exp(logits - cotangent.lse)
    dv = product(weights.astype(v.dtype), cotangent.out, NN)
    dlogits = (weights * (product(v, cotangent.out, NT) - cotangent.delta)).astype(q.dtype)
    return product(k, dlogits, TN), product(dlogits, q, NN), dv


def backward_rows(
    out: Float[Array, "*n N H"], lse: Float[Array, "*n 1 N"], dout: Float[Array, "*n N H"], dlse: Float[Array, "*n 1 N"]
) -> tuple[Float[Array, "*n 1 N"], Float[Array, "*n 1 N"]]:
    """lse and delta as `Cotangent` holds them: a blind query's weights and gradients come out 0."""
    seen = jnp.isfinite(lse)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)[..., None, :] - dlse
    return jnp.where(seen, lse, BLIND), jnp.where(seen, delta, 0.0)


def block(shape: tuple[int | None, ...], *where: int | Callable | None) -> pl.BlockSpec:
    """A block whose index along each dimension is that of a grid axis, 0 (None), or a function of all grid indices."""

    def index(*at: Any) -> tuple:
        return tuple(0 if w is None else at[w] if isinstance(w, int) else w(*at) for w in where)

    return pl.BlockSpec(shape, index)


class Blocks(NamedTuple):
    """What of each input and output a grid step sees, and the scratch it keeps."""

    inputs: Sequence[pl.BlockSpec]
    outputs: Sequence[pl.BlockSpec]
    scratch: Sequence[Any]


def run_kernel(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    blocks: Blocks,
    shapes: Sequence[jax.ShapeDtypeStruct],
    scalars: Sequence[Array],
    inputs: Sequence[Array],
    *,
    parallel: int,
    multiplications: int,
) -> list[Array]:
    """Compiled where the program is lowered for a TPU, interpreted elsewhere.

    `scalars` are flattened and prefetched; steps of the first `parallel` grid axes are independent of one another;
    `multiplications` (nothing skipped) tells XLA's scheduler and cost analysis what runs in here.
    """
    scalars = [x.reshape(-1) for x in scalars]
    moved = sum(x.size * x.dtype.itemsize for x in (*inputs, *shapes))
    call = partial(
        pl.pallas_call,
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=list(blocks.inputs),
            out_specs=list(blocks.outputs),
            scratch_shapes=list(blocks.scratch),
        ),
        out_shape=list(shapes),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * multiplications,
            transcendentals=multiplications // inputs[0].shape[-1],
            bytes_accessed=moved,
        ),
    )
    return jax.lax.platform_dependent(*scalars, *inputs, tpu=call(), default=call(interpret=True))


def like(x: Array, dtype: jnp.dtype | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)
