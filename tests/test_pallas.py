"""Both Pallas backends, interpreted, against the dense oracle: values, gradients, isolation, and what goes to `xla`."""

from __future__ import annotations

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from kernel_helpers import assert_equals_the_oracle, through
from strategies import HASTE, SHAPE, batches, numbered_prompt
from test_attention import ENCODER, Heads, lay_out, tensors

from blockrank.attention import pallas_codes
from blockrank.attention.dispatch import attend, resolve_backend
from blockrank.attention.visibility import BLOCKRANK, DENSE, Visibility
from blockrank.prompts.encode import PromptSegments

BACKENDS = pytest.mark.parametrize("backend", ["pallas_tpu", "pallas_gpu"])

BATCH = [
    numbered_prompt(5, [9, 3, 12, 5, 16, 1], 6),
    numbered_prompt(8, [4, 4], 8),
    numbered_prompt(1, [], 2),
]
"""With padding everywhere: rows and whole rows, prefixes, suffixes, and a list without documents."""


@BACKENDS
@pytest.mark.parametrize(
    ("pattern", "heads"),
    [(BLOCKRANK, Heads(2, 2, 64)), (BLOCKRANK, Heads(1, 3, 80)), (DENSE, Heads(1, 2, 128))],
    ids=["blockrank, head_dim 64", "blockrank, head_dim 80", "dense, head_dim 128"],
)
def test_values_and_gradients_equal_the_oracle(backend: str, pattern: Visibility, heads: Heads) -> None:
    assert_equals_the_oracle(backend, lay_out(BATCH, pattern, row_length=24, bucket=False), pattern, heads)


@BACKENDS
@settings(max_examples=6, deadline=None)
@given(batches(), st.integers(0, 10**6))
def test_random_packings(backend: str, batch: list[PromptSegments], seed: int) -> None:
    batch = [*batch, *[numbered_prompt(1, [], 2)] * (3 - len(batch))]
    assert_equals_the_oracle(backend, lay_out(batch, BLOCKRANK, shape=SHAPE), BLOCKRANK, Heads(1, 2, 16), seed)


@BACKENDS
def test_documents_do_not_reach_one_another(backend: str) -> None:
    """Of the gradient of one document's output, exactly nothing arrives outside the prefix and itself."""
    layout = lay_out([BATCH[0]] * 3, BLOCKRANK, shape=SHAPE)
    q, k, v, cotangent = tensors(layout, Heads(1, 2, 16))
    segments = np.asarray(layout.segment_ids)
    for document in (0, 4):
        alone = cotangent * (segments == document)[..., None, None, None]
        results = through(q, k, v, alone, layout, pattern=BLOCKRANK, backend=backend)
        for name in ("dq", "dk", "dv"):
            touched = np.asarray(results[name]).any(axis=tuple(range(2, results[name].ndim)))
            allowed = segments == document if name == "dq" else (segments == document) | (segments == -1)
            assert touched.any(), name
            assert not touched[~allowed].any(), name


@BACKENDS
def test_bfloat16_stays_close_to_float32(backend: str) -> None:
    layout = lay_out([BATCH[0]] * 3, BLOCKRANK, shape=SHAPE)
    narrow = tuple(jnp.asarray(x, jnp.bfloat16) for x in tensors(layout, Heads(1, 2, 16)))
    wide = tuple(x.astype(jnp.float32) for x in narrow)
    fast = through(*narrow, layout, pattern=BLOCKRANK, backend=backend)
    slow = through(*wide, layout, pattern=BLOCKRANK, backend="reference")
    for name in slow:
        assert fast[name].dtype == jnp.bfloat16
        error = np.abs(np.asarray(fast[name], np.float32) - np.asarray(slow[name]))
        assert error.max() < 0.02 * max(1.0, np.abs(slow[name]).max()), name


@BACKENDS
def test_what_the_kernels_cannot_take_goes_to_xla_with_one_line(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    layout = lay_out([BATCH[0]] * 3, BLOCKRANK, shape=SHAPE)
    q, k, v, _ = (jnp.asarray(x) for x in tensors(layout, Heads(1, 2, 16)))
    pallas_codes.log_fallback.cache_clear()
    with caplog.at_level(logging.INFO, pallas_codes.__name__):
        run = partial(attend, layout=layout, visibility=ENCODER, sliding_window=4)
        jax.eval_shape(partial(run, backend=backend), q, k, v)
        ours, xla = (jax.jit(partial(run, backend=name), compiler_options=HASTE)(q, k, v) for name in (backend, "xla"))
    np.testing.assert_array_equal(ours, xla)
    assert [r.getMessage() for r in caplog.records] == [f"{backend} cannot take a sliding window: computed by xla"]


PLATFORMS = pytest.mark.parametrize(
    ("platform", "kind", "kernels"),
    [("tpu", "TPU v6 lite", "pallas_tpu"), ("gpu", "NVIDIA H100 80GB HBM3", "pallas_gpu")],
    ids=["tpu", "gpu"],
)


@PLATFORMS
def test_auto_takes_the_kernels_where_they_can_run(
    platform: str, kind: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del kind
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert resolve_backend("auto") == kernels
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert resolve_backend("auto") == "xla", "the compiler cannot split a kernel over devices"
    assert resolve_backend(kernels) == kernels


@PLATFORMS
def test_auto_goes_by_the_devices_compiled_for(platform: str, kind: str, kernels: str) -> None:
    """Those of the active mesh, while this process has CPUs only."""
    device = jax.sharding.AbstractDevice(kind, 1, platform)

    def chosen(size: int, axis: AxisType) -> str:
        mesh = AbstractMesh((size,), ("data",), axis_types=(axis,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            return resolve_backend("auto")

    assert chosen(1, AxisType.Auto) == kernels
    assert chosen(8, AxisType.Auto) == "xla", "the compiler cannot split a kernel over devices"
    assert chosen(8, AxisType.Manual) == kernels
    assert resolve_backend("auto") == "xla"
