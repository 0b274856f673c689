"""Master weights in bfloat16: rounding is unbiased and seeded by the step, and a run keeps each dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_trainer import ADAMW, trainer

from blockrank.training.checkpoint import Checkpoints
from blockrank.training.optimizer import OptimizerSettings
from blockrank.training.rounding import add_updates, stochastic_round
from blockrank.training.state import split_model

DRAWS = 1 << 16


def draws(value: float, seed: int = 0) -> np.ndarray:
    return np.asarray(stochastic_round(jnp.full(DRAWS, value, jnp.float32), jax.random.key(seed)), np.float32)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0 + 2**-7), (2.0 - 2**-7, 2.0), (2.0**-130, 2.0**-130 + 2.0**-133)])
@pytest.mark.parametrize("share", [0.125, 0.5, 0.96875])
def test_a_value_becomes_either_neighbour_and_is_itself_on_average(
    low: float, high: float, share: float, sign: int
) -> None:
    """Also across a power of two, and below the least normal number."""
    found = sign * draws(sign * (low + share * (high - low)))
    assert set(found.tolist()) == {low, high}
    five_sigma = 5 * np.sqrt(share * (1 - share) / DRAWS)
    assert np.mean(found == high) == pytest.approx(share, abs=five_sigma)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, np.inf, -np.inf, np.nan])
def test_what_bfloat16_holds_stays(value: float) -> None:
    np.testing.assert_array_equal(draws(value), np.full(DRAWS, value, np.float32))


def test_the_step_decides_how_weights_are_rounded() -> None:
    params = {"a": {"kernel": jnp.ones((64, 8), jnp.bfloat16)}, "b": {"kernel": jnp.ones((64, 8), jnp.bfloat16)}}
    updates = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-9), params)
    once, again, later = (add_updates(params, updates, jnp.int32(step)) for step in (3, 3, 4))
    one, other = once["a"]["kernel"], once["b"]["kernel"]
    np.testing.assert_array_equal(one, again["a"]["kernel"])
    assert (one != later["a"]["kernel"]).any()
    assert (one != other).any()


def test_small_updates_add_up() -> None:
    """A hundredth of what rounding to nearest needs to move a weight; float32 is left as it is."""
    update = -(2.0**-15)
    params = {"kernel": jnp.ones(1 << 12, jnp.bfloat16), "scale": jnp.ones(3)}
    updates = {"kernel": jnp.full(1 << 12, update), "scale": jnp.full(3, update)}
    for step in range(64):
        params = add_updates(params, updates, jnp.int32(step))
    moved = np.asarray(params["kernel"], np.float32).mean() - 1
    assert moved == pytest.approx(64 * update, rel=0.2)
    np.testing.assert_array_equal(params["scale"], np.float32(1 + 64 * update))
    assert jnp.bfloat16(1) + jnp.bfloat16(update) == 1


def test_a_run_keeps_matrices_in_bfloat16_and_continues_to_the_bit(tmp_path: Path) -> None:
    settings: OptimizerSettings = replace(ADAMW, master_weights="bfloat16", momentum_dtype="bfloat16")
    whole = trainer(tmp_path / "whole", total_steps=4, optimizer=settings).run()
    trainer(tmp_path / "parts", total_steps=2, optimizer=settings).run()
    parts = trainer(tmp_path / "parts", total_steps=4, optimizer=settings).run()
    dtypes = {}
    for result in (whole, parts):
        params = split_model(result.model)[1]
        dtypes = jax.tree.map(lambda p: p.dtype.name, params)
        assert dtypes["blocks"]["mlp"]["up"]["kernel"] == dtypes["embed"]["embedding"] == "bfloat16"
        assert dtypes["blocks"]["mlp_norm"]["scale"] == dtypes["final_norm"]["scale"] == "float32"
    for a, b in zip(*(jax.tree.leaves(split_model(r.model)[1]) for r in (whole, parts)), strict=True):
        np.testing.assert_array_equal(a, b)
    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), split_model(whole.model)[1])
    saved = Checkpoints(tmp_path / "parts" / "checkpoints", read_only=True).restore_params(like, as_saved=True)
    assert jax.tree.map(lambda p: p.dtype.name, saved) == dtypes
