"""Training on eight CPU devices, in a process of its own; and what a mesh refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blockrank.config import build, compose
from blockrank.errors import UserError
from blockrank.parallel import MeshConfig
from blockrank.training.dry_run import dry_run
from blockrank.training.recipe import TrainConfig


def test_training_on_several_devices_equals_training_on_one(run_on_eight_devices: Callable[..., None]) -> None:
    run_on_eight_devices("eight_devices_training.py")


@pytest.mark.slow
def test_every_axis_alone_another_mesh_and_the_command(run_on_eight_devices: Callable[..., None]) -> None:
    run_on_eight_devices("eight_devices_training.py", "-m", "slow")


def config(*overrides: str) -> TrainConfig:
    return build(TrainConfig, compose("train", ["model=tiny", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["mesh.data=3"],
            "trainer.batch_size=32 in trainer.accumulation=1 micro-batches does not divide over the 3 gr",
        ),
        (["mesh.fsdp=8", "trainer.accumulation=8"], "make it a multiple of 64"),
        (["mesh.tensor=4"], "2 kv heads do not divide over tensor=4 devices"),
        (["mesh.fsdp=32", "trainer.batch_size=96", "mesh.data=3", "model.config.hidden_size=48"], "over fsdp=32"),
        (["mesh.doc=2", "ranker.visibility=dense"], "ranker.visibility=dense lets documents see each other"),
    ],
)
def test_a_mesh_that_does_not_divide_is_told_from_shapes(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dry_run(config(*overrides))


def test_a_dry_run_tells_what_each_device_holds() -> None:
    text = dry_run(config("mesh.fsdp=4", "mesh.doc=2", "limits.document_tokens=160"))
    assert "{'data': 1, 'fsdp': 4, 'doc': 2, 'tensor': 1}; parameters and optimizer state of one device: " in text
    assert ", on each of 2 devices" in text
    assert MeshConfig(fsdp=-1).abstract().shape["fsdp"] >= 1
