"""Schedules, update rules, clipping and the trainable part, against values worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from blockrank.errors import UserError
from blockrank.training.optimizer import (
    OptimizerSettings,
    ScheduleSettings,
    Trainable,
    make_optimizer,
    make_schedule,
)


def params(layers: int = 4) -> dict:
    key = jax.random.key(0)
    return {
        "embed": {"embedding": jax.random.normal(key, (8, 4))},
        "blocks": {
            "attention": {"query": {"kernel": jnp.full((layers, 4, 4), 0.5)}},
            "mlp": {"gate": {"kernel": jnp.full((layers, 4, 6), 0.5)}},
            "mlp_norm": {"scale": jnp.ones((layers, 4))},
        },
    }


def constant(peak: float) -> ScheduleSettings:
    return ScheduleSettings(peak=peak, warmup_steps=0, decay="constant")


def one_update(settings: OptimizerSettings, grads: dict, start: dict) -> dict:
    optimizer, _ = make_optimizer(settings, total_steps=10)
    trainable = Trainable.of(start, settings)
    part = trainable.take(start)
    updates, _ = jax.jit(optimizer.update)(trainable.take(grads), optimizer.init(part), part)
    return updates


def test_schedule_warms_up_linearly_then_follows_the_cosine():
    schedule = make_schedule(ScheduleSettings(peak=3e-7, warmup_steps=50), total_steps=250)
    assert float(schedule(0)) == 0.0
    np.testing.assert_allclose(float(schedule(25)), 1.5e-7, rtol=1e-6)
    np.testing.assert_allclose(float(schedule(50)), 3e-7, rtol=1e-6)
    np.testing.assert_allclose(float(schedule(150)), 1.5e-7, rtol=1e-6)
    np.testing.assert_allclose(float(schedule(250)), 0.0, atol=1e-14)


def test_schedule_shorter_than_its_warm_up_still_ends_at_the_peak():
    schedule = make_schedule(ScheduleSettings(peak=1.0, warmup_steps=50), total_steps=4)
    np.testing.assert_allclose([float(schedule(i)) for i in range(5)], [0.0, 0.25, 0.5, 0.75, 1.0], rtol=1e-6)


def test_adamw_first_update_is_the_signed_learning_rate():
    start = params()
    grads = jax.tree.map(lambda p: jnp.full_like(p, -0.01), start)
    settings = OptimizerSettings(name="adamw", schedule=constant(1e-3), clip_norm=None)
    for update in jax.tree.leaves(one_update(settings, grads, start)):
        np.testing.assert_allclose(update, 1e-3, rtol=1e-4)


def test_adamw_decays_matrices_only():
    start = params()
    grads = jax.tree.map(jnp.zeros_like, start)
    settings = OptimizerSettings(name="adamw", schedule=constant(0.1), weight_decay=0.2, clip_norm=None)
    updates = one_update(settings, grads, start)
    np.testing.assert_allclose(updates["blocks"]["mlp"]["gate"]["kernel"], -0.1 * 0.2 * 0.5, rtol=1e-6)
    assert not np.any(updates["blocks"]["mlp_norm"]["scale"])


def test_adafactor_update_is_absolute_and_enters_through_the_momentum():
    """Constant gradient: the rescaled gradient is 1 in every entry, so the first step is -lr * (1 - b1)."""
    start = params()
    grads = jax.tree.map(lambda p: jnp.full_like(p, 0.02), start)
    updates = one_update(OptimizerSettings(schedule=constant(1e-2), clip_norm=None), grads, start)
    for update in jax.tree.leaves(updates):
        np.testing.assert_allclose(update, -1e-2 * 0.1, rtol=1e-4)


def test_adafactor_factors_matrices_but_never_the_layer_axis():
    start = {"blocks": {"mlp": {"gate": {"kernel": jnp.ones((4, 128, 256))}}}}
    optimizer, _ = make_optimizer(OptimizerSettings(), total_steps=10)
    shapes = {leaf.shape for leaf in jax.tree.leaves(optimizer.init(start))}
    assert (4, 128) in shapes
    assert (4, 256) in shapes


def test_clipping_scales_to_the_global_norm():
    start = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    big, small = (
        make_optimizer(OptimizerSettings(name="adamw", schedule=constant(1.0), eps=1.0, clip_norm=c), 10)[0]
        for c in (None, 1.0)
    )
    unclipped, _ = big.update(grads, big.init(start), start)
    clipped, _ = small.update(grads, small.init(start), start)
    np.testing.assert_allclose(unclipped["a"][0], -3.0 / (3.0 + 1.0), rtol=1e-5)
    np.testing.assert_allclose(clipped["a"][0], -0.6 / (0.6 + 1.0), rtol=1e-5)
    np.testing.assert_allclose(clipped["b"][0], -0.8 / (0.8 + 1.0), rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_frozen_parameters_and_layers_do_not_move_at_all(name):
    start = params()
    settings = OptimizerSettings(
        name=name, schedule=constant(0.1), trainable=r"blocks\.attention\..*", trainable_layers=(1, 3)
    )
    optimizer, _ = make_optimizer(settings, total_steps=10)
    trainable = Trainable.of(start, settings)
    state, now = optimizer.init(trainable.take(start)), start
    for step in range(3):
        grads = jax.tree.map(lambda p: jnp.sin(p + step), now)  # noqa: B023
        part = trainable.take(now)
        updates, state = optimizer.update(trainable.take(grads), state, part)
        now = trainable.put(now, optax.apply_updates(part, updates))
    query, before = now["blocks"]["attention"]["query"]["kernel"], start["blocks"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(query[jnp.array([0, 3])], before[jnp.array([0, 3])])
    assert np.all(query[1:3] != before[1:3])
    np.testing.assert_array_equal(now["embed"]["embedding"], start["embed"]["embedding"])
    np.testing.assert_array_equal(now["blocks"]["mlp"]["gate"]["kernel"], start["blocks"]["mlp"]["gate"]["kernel"])


def test_what_is_frozen_has_no_optimizer_state():
    settings = OptimizerSettings(name="adamw", trainable=r"blocks\.attention\..*", trainable_layers=(1, 3))
    optimizer, _ = make_optimizer(settings, total_steps=10)
    state = optimizer.init(Trainable.of(params(), settings).take(params()))
    assert {leaf.shape for leaf in jax.tree.leaves(state)} == {(), (2, 4, 4)}


@pytest.mark.parametrize("layers", [None, (0, 4), (0, 2), (1, 3), (3, 4)])
def test_putting_back_what_was_taken_changes_nothing(layers):
    trainable = Trainable.of(params(), OptimizerSettings(trainable="blocks.*", trainable_layers=layers))
    restored = trainable.put(params(), trainable.take(params()))
    jax.tree.map(np.testing.assert_array_equal, restored, params())


def test_frozen_gradients_do_not_count_in_the_clipped_norm():
    start = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    settings = OptimizerSettings(name="adamw", schedule=constant(1.0), eps=1.0, clip_norm=1.0, trainable="a")
    updates = one_update(settings, {"a": jnp.array([0.5]), "b": jnp.array([100.0])}, start)
    np.testing.assert_allclose(updates["a"], -0.5 / 1.5, rtol=1e-5)
    assert set(updates) == {"a"}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("adafactor", "weight_decay", 0.1),
        ("adafactor", "b2", 0.99),
        ("adafactor", "eps", 1e-6),
        ("adamw", "scale_by_parameter", True),
        ("adamw", "update_clip", 2.0),
    ],
)
def test_what_an_update_rule_does_not_read_is_refused(name, key, value):
    other = {"adafactor": "adamw", "adamw": "adafactor"}[name]
    with pytest.raises(UserError, match=rf"^{key}={value} is {other}'s: set it to .*, or optimizer.name={other}$"):
        OptimizerSettings(name=name, **{key: value})
    OptimizerSettings(name=other, **{key: value})


@pytest.mark.parametrize("setting", [{"eps": 0.0}, {"b1": 1.0}, {"b2": 1.0}, {"name": "adafactor", "b1": 1.0}])
def test_settings_whose_update_is_no_number_or_nothing_are_refused(setting):
    """Adam without eps divides 0 by 0 where a gradient is 0, with a decay of 1 everywhere; Adafactor would not move."""
    with pytest.raises(UserError, match=f"{list(setting)[-1]}="):
        OptimizerSettings(**{"name": "adamw", **setting})


def test_bad_filters_are_told():
    with pytest.raises(UserError, match="no parameter"):
        Trainable.of(params(), OptimizerSettings(trainable="decoder.*"))
    with pytest.raises(UserError, match="no regular expression"):
        Trainable.of(params(), OptimizerSettings(trainable="*"))
    with pytest.raises(UserError, match=r"layers 0\.\.3"):
        Trainable.of(params(), OptimizerSettings(trainable_layers=(2, 5)))


def test_optimizer_works_on_shapes_alone():
    shapes, settings = jax.eval_shape(params), OptimizerSettings(trainable_layers=(0, 2))
    optimizer, _ = make_optimizer(settings, total_steps=3)
    state = jax.eval_shape(lambda p: optimizer.init(Trainable.of(p, settings).take(p)), shapes)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
