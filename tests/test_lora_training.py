"""Training adapters: a base that never moves, a narrow base, saving and resuming, and the configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_lora import LORA, adapted, gradients, loss_of
from training_helpers import OBJECTIVE, CountedBatches, make_batch, tiny_config, tiny_model

from blockrank.config import build, compose, to_plain
from blockrank.errors import UserError
from blockrank.models.loading import cast_parameters, flat_parameters, weights_fingerprint
from blockrank.models.lora import LoraSettings, abstract_start, is_adapter, merge_adapters
from blockrank.models.quantize import quantize_model
from blockrank.training.checkpoint import Checkpoints, CheckpointSettings
from blockrank.training.dry_run import abstract_step
from blockrank.training.optimizer import OptimizerSettings, ScheduleSettings, Trainable, make_optimizer
from blockrank.training.recipe import TrainConfig
from blockrank.training.state import create_state, split_model
from blockrank.training.step import make_train_step, ranking_loss_fn, ranking_share_fn
from blockrank.training.tracking import read_metrics
from blockrank.training.trainer import RunRecord, Trainer, TrainerSettings

ADAMW = OptimizerSettings(name="adamw", schedule=ScheduleSettings(peak=1e-2, warmup_steps=1, decay="constant"))


def test_steps_move_adapters_and_no_bit_of_the_base():
    graphdef, params = split_model(adapted(trained=False))
    optimizer, schedule = make_optimizer(ADAMW, 10)
    trainable = Trainable.of(params, ADAMW)
    before = jax.tree.map(np.array, params)
    state = create_state(params, optimizer, trainable)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.optimizer_state)}
    assert all(shape == () or LORA.rank in shape[1:] for shape in shapes)
    share = ranking_share_fn(OBJECTIVE)
    step = make_train_step(
        graphdef, ranking_loss_fn(OBJECTIVE), optimizer, schedule, trainable, accumulation=2, share_fn=share
    )
    for number in (1, 2, 3):
        state, _ = step(state, make_batch(number).data)

    def compare(path, new, old):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if is_adapter(name):
            assert np.any(np.asarray(new) != old), name
        else:
            np.testing.assert_array_equal(new, old, err_msg=name)

    jax.tree_util.tree_map_with_path(compare, state.params, before)


def test_trainable_and_layers_choose_among_adapters():
    _, params = split_model(adapted())
    settings = dataclasses.replace(ADAMW, trainable=r".*\.query\..*", trainable_layers=(0, 1))
    taken = Trainable.of(params, settings).take(params)
    assert jax.tree.map(jnp.shape, taken) == {
        "blocks": {"attention": {"query": {"lora": {"a": (1, 16, 2), "b": (1, 2, 16)}}}}
    }


def test_a_narrow_base_keeps_float32_adapters():
    base = cast_parameters(tiny_model(), jnp.bfloat16)
    settings = dataclasses.replace(LORA, base="bfloat16")
    model = adapted(settings, trained=False, base=base)
    kinds = {is_adapter(path): leaf.dtype for path, leaf in flat_parameters(model).items()}
    assert kinds == {True: jnp.float32, False: jnp.bfloat16}
    planned = abstract_start(tiny_config(), jnp.dtype("float32"), settings)
    same = [jax.tree.map(lambda x: (x.shape, x.dtype), split_model(m)[1]) for m in (model, planned)]
    assert same[0] == same[1]
    found = gradients(model)
    assert all(found[path].dtype == jnp.float32 for path in found if is_adapter(path))


def test_an_int8_base_learns_as_the_weights_its_codes_stand_for():
    base = cast_parameters(tiny_model(), jnp.bfloat16)
    settings = dataclasses.replace(LORA, base="int8")
    model = adapted(settings, base=quantize_model(base))
    values = flat_parameters(model)
    kinds = {path: leaf.dtype for path, leaf in values.items() if not is_adapter(path)}
    for path in ("blocks.attention.query", "blocks.mlp.down"):
        assert (kinds[f"{path}.kernel"], kinds[f"{path}.kernel_scale"]) == (jnp.int8, jnp.float32)
    assert kinds["embed.embedding"] == jnp.bfloat16
    planned = abstract_start(tiny_config(), jnp.dtype("float32"), settings)
    same = [jax.tree.map(lambda x: (x.shape, x.dtype), split_model(m)[1]) for m in (model, planned)]
    assert same[0] == same[1]

    merged = merge_adapters(model)
    assert nnx.graphdef(merged) == nnx.graphdef(tiny_model())
    kernel, codes = flat_parameters(merged)["blocks.mlp.gate.kernel"], values["blocks.mlp.gate.kernel"]
    product = values["blocks.mlp.gate.lora.a"] @ values["blocks.mlp.gate.lora.b"] * LORA.alpha / LORA.rank
    np.testing.assert_allclose(kernel, codes * values["blocks.mlp.gate.kernel_scale"][:, None] + product, atol=1e-6)
    assert float(loss_of(model)) == pytest.approx(float(loss_of(merged)), rel=1e-5)

    dense, found = gradients(merged), gradients_of_adapters(model)
    for path in ("blocks.attention.key", "blocks.mlp.up"):
        wanted = LORA.alpha / LORA.rank * dense[f"{path}.kernel"] @ values[f"{path}.lora.b"].swapaxes(1, 2)
        np.testing.assert_allclose(found[f"{path}.lora.a"], wanted, atol=2e-5 * float(np.abs(wanted).max()))

    graphdef, params = split_model(model)
    before, trainable = jax.tree.map(np.array, params), Trainable.of(params, ADAMW)
    optimizer, schedule = make_optimizer(ADAMW, 10)
    step = make_train_step(graphdef, ranking_loss_fn(OBJECTIVE), optimizer, schedule, trainable)
    moved, _ = step(create_state(params, optimizer, trainable), make_batch(1).data)
    for (path, new), old in zip(
        jax.tree_util.tree_leaves_with_path(moved.params), jax.tree.leaves(before), strict=True
    ):
        assert is_adapter(jax.tree_util.keystr(path, simple=True, separator=".")) or np.array_equal(new, old), path


def gradients_of_adapters(model: nnx.Module) -> dict[str, jax.Array]:
    adapters = nnx.filterlib.to_predicate(lambda path, _: "lora" in path)
    graph, chosen, rest = nnx.split(model, adapters, ...)
    found = jax.jit(jax.grad(lambda state: loss_of(nnx.merge(graph, state, rest))))(chosen)
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(found)}


def trainer(folder: Path, total_steps: int = 6, base_seed: int = 0, **options) -> Trainer:
    base = tiny_model(seed=base_seed)
    return Trainer(
        folder,
        adapted(trained=False, base=base),
        CountedBatches(),
        ranking_loss_fn(OBJECTIVE),
        total_steps=total_steps,
        optimizer=ADAMW,
        record=RunRecord({"seed": 0, "base_weights": weights_fingerprint(base)}),
        checkpoints=CheckpointSettings(every_steps=2),
        **{"settings": TrainerSettings(batch_size=4), **options},
    )


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["train/loss"]) for r in read_metrics(folder / "metrics.jsonl") if "train/loss" in r]


def test_a_resumed_run_equals_one_that_never_stopped_and_saves_adapters_alone(tmp_path):
    whole = trainer(tmp_path / "whole").run()

    def stop(*_):
        raise KeyboardInterrupt

    settings = TrainerSettings(batch_size=4, validate_every=3)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "part", validate=stop, settings=settings).run()
    resumed = trainer(tmp_path / "part").run()
    assert losses(tmp_path / "part")[-4:] == losses(tmp_path / "whole")[-4:]
    for a, b in zip(*(jax.tree.leaves(nnx.state(run.model)) for run in (whole, resumed)), strict=True):
        np.testing.assert_array_equal(a, b)

    _, params = split_model(whole.model)
    checkpoints = Checkpoints(tmp_path / "whole" / "checkpoints", read_only=True)
    with pytest.raises(UserError, match=r"missing blocks\.attention\.key\.kernel"):
        checkpoints.restore_params(params)
    checkpoints.close()


def test_a_run_is_not_resumed_beside_another_base(tmp_path):
    trainer(tmp_path, total_steps=2).run()
    with pytest.raises(UserError, match="base_weights"):
        trainer(tmp_path, total_steps=2, base_seed=3).run()


def test_lora_is_read_from_the_configuration_and_planned_by_shapes():
    config = build(TrainConfig, compose("train", ["model=tiny", "optimizer.lora={rank: 4, base: bfloat16}"]))
    assert config.optimizer.lora == LoraSettings(rank=4, base="bfloat16")
    assert build(OptimizerSettings, to_plain(config.optimizer)) == config.optimizer
    state = abstract_step(config, config.mesh.abstract()).state
    assert sum(leaf.size for leaf in jax.tree.leaves(state.optimizer_state)) < 20_000
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params["embed"])} == {jnp.dtype("bfloat16")}


def test_a_bad_setting_names_its_key():
    changes = {"lora={rank: 0}": "lora.rank", "lora={targets: '*'}": "lora.targets"}
    for change, key in changes.items():
        with pytest.raises(UserError, match=rf"optimizer\.{key}"):
            build(TrainConfig, compose("train", [f"optimizer.{change}"]))
    with pytest.raises(UserError, match=r"optimizer\.master_weights"):
        build(TrainConfig, compose("train", ["optimizer.lora={}", "optimizer.master_weights=bfloat16"]))
