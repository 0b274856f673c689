"""Compile other libraries' attention kernels and ours for a TPU v6e that is not there, and print what they cost.

python scripts/existing_kernels.py [dense|suffix] ...     needs the extra `tpu`; tokamax is compared where installed

Heads of Mistral-7B (32 of 128, 8 of keys and values), bfloat16, arrays [1, T, heads, 128] in and out. Dense: causal
over T tokens, all of them real, which is what every kernel can express. Suffix: 80 queries that see every key, with the
log-sum-exp where there is one. What runs in a kernel is as it declares to XLA, not measured; loops are counted once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

from blockrank.attention.pallas_codes import UNSEEN
from blockrank.attention.pallas_flash import flash_attention
from blockrank.costs.topology import Topology

KV_HEADS, GROUPS, HEAD_DIM = 8, 4, 128
SCALE = HEAD_DIM**-0.5
TILE = 512


def ours(q, k, v, causal: bool):
    """Output and log-sum-exp."""
    queries, keys = (jnp.arange(x.shape[1], dtype=jnp.int32)[None] for x in (q, k))
    codes = (queries, keys) if causal else (jnp.zeros_like(queries), jnp.where(keys < UNSEEN, 0, UNSEEN))
    grouped = q.reshape(1, q.shape[1], KV_HEADS, GROUPS, HEAD_DIM)
    out, lse = flash_attention(grouped, k, v, *codes, scale=SCALE)
    return out.reshape(q.shape), lse


def by_splash(q, k, v, causal: bool):
    rows = -(-q.shape[1] // TILE) * TILE if causal else 128
    q = jnp.pad(q, ((0, 0), (0, rows - q.shape[1]), (0, 0), (0, 0)))
    mask = splash_masks.CausalMask((rows, rows)) if causal else splash_masks.FullMask((rows, k.shape[1]))
    size = min(TILE, rows)
    sizes = splash.BlockSizes(
        block_q=size, block_kv=TILE, block_kv_compute=TILE,
        block_q_dkv=size, block_kv_dkv=TILE, block_kv_dkv_compute=TILE, block_q_dq=size, block_kv_dq=TILE,
    )  # fmt: skip
    kernel = splash.make_splash_mha_single_device(
        splash_masks.MultiHeadMask([mask] * q.shape[2]), block_sizes=sizes, save_residuals=not causal
    )
    result = kernel(*(x[0].swapaxes(0, 1) for x in (q * SCALE, k, v)))
    return (jnp.swapaxes(jnp.asarray(result), 0, 1)[None], None) if causal else result


def by_jax_flash(q, k, v, causal: bool):
    if not causal:
        raise NotImplementedError("its public function has no log-sum-exp")
    k, v = (jnp.repeat(x, GROUPS, axis=2) for x in (k, v))
    sizes = flash.BlockSizes(
        block_q=TILE, block_k_major=TILE, block_k=TILE, block_b=1,
        block_q_major_dkv=TILE, block_k_major_dkv=TILE, block_k_dkv=TILE, block_q_dkv=TILE,
        block_k_major_dq=TILE, block_k_dq=TILE, block_q_dq=TILE,
    )  # fmt: skip
    heads = (x.swapaxes(1, 2) for x in (q, k, v))
    return flash.flash_attention(*heads, causal=causal, sm_scale=SCALE, block_sizes=sizes).swapaxes(1, 2), None


def by_tokamax(q, k, v, causal: bool):
    if not causal:
        raise NotImplementedError("its public function has no log-sum-exp")
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax.dot_product_attention(q, k, v, is_causal=causal, scale=SCALE, implementation="mosaic"), None


def kernels() -> Iterator[tuple[str, Callable]]:
    yield "ours", ours
    yield f"splash, JAX {jax.__version__}", by_splash
    yield f"flash, JAX {jax.__version__}", by_jax_flash
    if find_spec("tokamax"):
        yield f"tokamax {version('tokamax')}", by_tokamax


def compile_for_v6e(function: Callable, queries: int, keys: int) -> str:
    where = jax.sharding.SingleDeviceSharding(Topology.of("v6e:2x2").devices[0])
    shapes = [(1, queries, KV_HEADS * GROUPS, HEAD_DIM), *[(1, keys, KV_HEADS, HEAD_DIM)] * 2]
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=where) for s in shapes]
    start = time.perf_counter()
    try:
        program = jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    took, costs = time.perf_counter() - start, program.cost_analysis() or {}
    memory = program.memory_analysis()
    assert memory is not None
    return (
        f"{costs.get('flops', 0) / 1e12:.3f} TFLOP declared, {costs.get('bytes accessed', 0) / 1e9:.2f} GB, "
        f"temporaries {memory.temp_size_in_bytes / 1e6:.0f} MB, compiled in {took:.0f} s"
    )


def main(parts: list[str]) -> None:
    for part in parts:
        causal = part == "dense"
        for keys in (7680, 37376) if causal else (7680,):
            for name, kernel in kernels():

                def forward(q, k, v, kernel=kernel, causal=causal):
                    return kernel(q, k, v, causal)

                def gradients(q, k, v, kernel=kernel, causal=causal):
                    def loss(*x):
                        out, lse = kernel(*x, causal)
                        total = jnp.sum(out.astype(jnp.float32))
                        return total if causal else total + jnp.sum(jax.tree.leaves(lse)[0])

                    return jax.grad(loss, (0, 1, 2))(q, k, v)

                for what, function in (("forward", forward), ("gradients", gradients)):
                    result = compile_for_v6e(function, keys if causal else 80, keys)
                    print(f"{part} | {keys} keys | {name} | {what} | {result}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["dense", "suffix"])
