"""Training on several devices equals training on one. `test_sharded_training.py` runs this file with eight devices."""

from __future__ import annotations

import dataclasses
import io
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console
from training_helpers import OBJECTIVE, CountedBatches, make_batch

from blockrank.config import build, compose
from blockrank.models.config import DecoderConfig
from blockrank.models.loading import random_decoder
from blockrank.models.lora import LoraSettings, add_adapters
from blockrank.models.quantize import quantize_model
from blockrank.models.stack import Remat
from blockrank.parallel import MeshConfig, place_arrays, place_state, spread_lists, spread_parameters
from blockrank.train import train
from blockrank.training.checkpoint import CheckpointSettings
from blockrank.training.optimizer import OptimizerSettings, ScheduleSettings, Trainable, make_optimizer
from blockrank.training.recipe import TrainConfig
from blockrank.training.rounding import add_updates
from blockrank.training.settings import RunRecord, TrainerSettings
from blockrank.training.state import TrainState, place_new_state, split_model
from blockrank.training.step import make_train_step, ranking_loss_fn, ranking_share_fn
from blockrank.training.tracking import read_metrics
from blockrank.training.trainer import Trainer

LISTS = 8
CONSTANT = ScheduleSettings(peak=1e-2, warmup_steps=1, decay="constant")
OPTIMIZERS = {
    "adafactor": OptimizerSettings(schedule=CONSTANT),
    "adamw": OptimizerSettings(name="adamw", schedule=CONSTANT, eps=1e-3, weight_decay=0.1),
}


def model() -> Any:
    """Wide enough that Adafactor factors the second moments (128), with four kv heads for the axis `tensor`."""
    config = DecoderConfig(
        family="llama",
        vocab_size=128,
        hidden_size=128,
        intermediate_size=192,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        windows=(None,) * 2,
        tie_embeddings=False,
        initializer_range=0.1,
    )
    return random_decoder(config, 0)


def adapted(base: str) -> Any:
    """The model with adapters beside its frozen kernels, which are float32 or int8."""
    plain = quantize_model(model()) if base == "int8" else model()
    return add_adapters(plain, LoraSettings(rank=4, targets=r".*\.kernel", base=base), 1)  # type: ignore[arg-type]


def remembered() -> optax.GradientTransformation:
    """Keeps the last gradients in the optimiser's state, where a test can read them."""
    zeros = partial(jax.tree.map, jnp.zeros_like)
    return optax.GradientTransformation(zeros, lambda gradients, *_: (gradients, gradients))


def run_steps(
    optimizer: str, mesh: MeshConfig, accumulation: int, remat: Remat, base: str | None = None
) -> tuple[list[dict], TrainState]:
    """The metrics of three steps, and the state after them; with a `base`, of adapters beside it."""
    devices = None if mesh.single else mesh.make()
    graphdef, params = split_model(model() if base is None else adapted(base))
    settings = OPTIMIZERS[optimizer]
    rule, schedule = make_optimizer(settings, 10)
    rule = optax.chain(remembered(), rule)
    trainable = Trainable.of(params, settings)
    objective = dataclasses.replace(OBJECTIVE, remat=remat, aux_weight=1.0)
    step = make_train_step(
        graphdef,
        ranking_loss_fn(objective),
        rule,
        schedule,
        trainable,
        accumulation=accumulation,
        share_fn=ranking_share_fn(objective),
    )
    state = place_new_state(params, rule, trainable, devices)
    logged = []
    for number in (1, 2, 3):
        data = make_batch(number, LISTS, documents=5).data
        if devices is None:
            state, metrics = step(state, data)
        else:
            with jax.set_mesh(devices):
                state, metrics = step(state, spread_lists(data.split(mesh.doc), devices))
        logged.append(jax.device_get(metrics))
    return logged, state


@cache
def one_device(optimizer: str, base: str | None = None) -> tuple[list[dict], TrainState]:
    return run_steps(optimizer, MeshConfig(), 1, "none", base)


SHORT = [
    ("adafactor", MeshConfig(data=2, fsdp=2, doc=2), 2, "full"),
    ("adafactor", MeshConfig(fsdp=4, tensor=2), 1, "none"),
]
LONG = [
    ("adafactor", MeshConfig(data=8), 1, "none"),
    ("adafactor", MeshConfig(fsdp=8), 1, "full"),
    ("adafactor", MeshConfig(doc=8), 4, "none"),
    ("adafactor", MeshConfig(tensor=4), 2, "dots"),
    ("adafactor", MeshConfig(fsdp=4, tensor=2), 2, "none"),
    ("adamw", MeshConfig(fsdp=2, doc=4), 1, "dots"),
    ("adamw", MeshConfig(data=4, tensor=2), 2, "full"),
]


@pytest.mark.parametrize(
    ("optimizer", "mesh", "accumulation", "remat"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)],
    ids=str,
)
def test_losses_gradients_and_updates_equal_those_of_one_device(
    optimizer: str, mesh: MeshConfig, accumulation: int, remat: Remat
) -> None:
    expected = one_device(optimizer)
    found = run_steps(optimizer, mesh, accumulation, remat)
    check_equal(found, expected)
    check_spread(found[1], mesh)


@pytest.mark.parametrize(
    ("base", "mesh"),
    [
        ("int8", MeshConfig(data=2, fsdp=2, tensor=2)),
        pytest.param("float32", MeshConfig(data=2, fsdp=2, tensor=2), marks=pytest.mark.slow),
        pytest.param("int8", MeshConfig(fsdp=4, doc=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_learn_as_on_one_device(base: str, mesh: MeshConfig) -> None:
    found = run_steps("adamw", mesh, 1, "full", base)
    check_equal(found, one_device("adamw", base))
    leaves = jax.tree.leaves(found[1].params)
    frozen = [leaf for leaf in leaves if leaf.ndim >= 2 and min(leaf.shape[-2:]) >= 64]
    shares = {leaf.size // leaf.addressable_shards[0].data.size for leaf in frozen}
    assert shares == {mesh.fsdp * mesh.tensor}


def check_equal(found: tuple[list[dict], TrainState], expected: tuple[list[dict], TrainState]) -> None:
    (logged, state), (metrics, wanted) = found, expected
    for ours, theirs in zip(logged, metrics, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, atol=1e-6, err_msg=name)
    leaves = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree_util.tree_leaves_with_path(wanted), strict=True)
    for (path, ours), (_, theirs) in leaves:
        scale = max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))


def check_spread(state: TrainState, mesh: MeshConfig) -> None:
    """After a step as before it: matrices, gradients, momenta and factored moments lie in parts."""
    share = mesh.fsdp * mesh.tensor
    matrices = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim >= 2 and min(leaf.shape[-2:]) >= 64]
    assert len(matrices) >= 3 * 9
    assert {leaf.size // leaf.addressable_shards[0].data.size for leaf in matrices} == {share}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer_state):
        if ".v_row" in jax.tree_util.keystr(path) and leaf.size > 2 and "up" in jax.tree_util.keystr(path):
            assert leaf.size // leaf.addressable_shards[0].data.size == mesh.fsdp


SETTINGS = TrainerSettings(batch_size=LISTS, log_every=1)


def trained(folder: Path, mesh: MeshConfig, stop: int) -> list[dict[str, Any]]:
    """Trains until step `stop` of 4, continuing what is in the folder; the logged rows."""
    Trainer(
        folder,
        model(),
        CountedBatches(lambda step: make_batch(step, LISTS, documents=5), stop),
        ranking_loss_fn(OBJECTIVE),
        total_steps=4,
        optimizer=OPTIMIZERS["adafactor"],
        settings=SETTINGS,
        record=RunRecord({"seed": 0}),
        checkpoints=CheckpointSettings(every_steps=0),
        mesh=None if mesh.single else mesh.make(),
    ).run()
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.slow
def test_a_run_continues_on_another_mesh(tmp_path: Path) -> None:
    eight, one = MeshConfig(fsdp=4, doc=2), MeshConfig()
    whole = trained(tmp_path / "whole", one, 4)
    for name, meshes in {"fewer": (eight, one), "more": (one, eight), "other": (eight, MeshConfig(tensor=4))}.items():
        for mesh, stop in zip(meshes, (2, 4), strict=True):
            rows = trained(tmp_path / name, mesh, stop)
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        for ours, theirs in zip(rows, whole, strict=True):
            assert ours["query_ids"] == theirs["query_ids"]
            for key in ("train/loss", "train/grad_norm"):
                np.testing.assert_allclose(ours[key], theirs[key], rtol=2e-5, err_msg=f"{name} {key}")


def test_weights_in_bfloat16_are_rounded_alike_on_every_mesh() -> None:
    params = {"blocks": {"up": {"kernel": jnp.full((2, 128, 64), 1.0, jnp.bfloat16)}}}
    updates = jax.tree.map(lambda p: jnp.linspace(-0.01, 0.01, p.size).reshape(p.shape), params)
    expected = jax.jit(add_updates)(params, updates, 3)
    for mesh in (MeshConfig(fsdp=8), MeshConfig(fsdp=2, tensor=4)):
        devices = mesh.make()
        place = partial(place_state, parameters=params, mesh=devices)
        spread = (place_arrays(tree, place(tree)) for tree in (params, updates))
        with jax.set_mesh(devices):
            found = jax.jit(lambda *x: spread_parameters(add_updates(*x)))(*spread, 3)
        kernel = found["blocks"]["up"]["kernel"]
        assert kernel.addressable_shards[0].data.size == kernel.size // 8
        np.testing.assert_array_equal(kernel, expected["blocks"]["up"]["kernel"])


@pytest.mark.slow
def test_the_command_trains_validates_and_tests_on_a_mesh(tmp_path: Path) -> None:
    """Weights are read into the host's memory; held-out lists are scored on the mesh by weights that lie in parts."""
    names = ["cats", "dogs", "cows", "ducks", "bees", "owls", "frogs", "lions"]
    rows = [
        {
            "query": f"which animal is {name}",
            "query_id": f"q{i}",
            "documents": [{"doc_id": f"d{j}", "title": "", "text": f"about {other}"} for j, other in enumerate(names)],
            "answer_ids": [f"d{i}"],
        }
        for i, name in enumerate(names)
    ]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = "{split: train, candidates: own, depth: 4, measures: [nDCG@10], max_queries: 2}"
    losses = []
    for name, mesh in {"eight": ["mesh.fsdp=4", "mesh.doc=2"], "one": []}.items():
        options = ["model=tiny", "data=icr", f"data.path={file}", f"output_dir={tmp_path / name}", *mesh]
        options += ["lists.candidates=own", "lists.num_candidates=4", "trainer.batch_size=4", "trainer.total_steps=2"]
        options += [f"validation={held_out}", f"test={held_out}", "trainer.validate_every=2", "trainer.log_every=1"]
        text = io.StringIO()
        result = train(build(TrainConfig, compose("train", options)), Console(file=text, width=200))
        assert result.status == "finished"
        assert "trained" in text.getvalue()
        losses.append([row["train/loss"] for row in read_metrics(result.metrics) if "train/loss" in row])
    assert len(losses[0]) == 2
    np.testing.assert_allclose(*losses, rtol=2e-5)
