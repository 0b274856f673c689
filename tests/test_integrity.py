"""Damaged checkpoints: every file of one cut short, changed or gone is refused by name, or was of no consequence."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_checkpoint import assert_equal, save, tiny_state

from blockrank.errors import UserError
from blockrank.training.checkpoint import Checkpoints
from blockrank.training.integrity import DamageError, check_sums, checksums, seal, unseal

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""tensorstore reports a failed read once more to an event loop that Orbax has closed by then."""

PROMPT = "x: 1\n"


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with steps 1 and 2, files and metrics included."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"

    def write(files: Path) -> None:
        (files / "prompt.yaml").write_text(PROMPT)

    save(folder, tiny_state(step=1), tiny_state(step=2), write_files=write, metrics={"validation/ndcg_at_10": 0.5})
    return folder


def read_all(folder: Path, step: int) -> None:
    """Reads all of a step and compares it with what was saved. Any difference is an AssertionError."""
    checkpoints = Checkpoints(folder, read_only=True)
    try:
        found, data = checkpoints.restore(tiny_state(), step)
        assert_equal(found, tiny_state(step=step))
        assert data == {"next": step}
        assert checkpoints.restore_json("meta", step)["model"]["hidden_size"] == 16
        with checkpoints.files(step) as files:
            assert (files / "prompt.yaml").read_text() == PROMPT
    finally:
        checkpoints.close()


def refusal(folder: Path) -> str | None:
    """Why step 2 is refused; None if it was read and is what was saved."""
    try:
        read_all(folder, 2)
    except UserError as error:
        return str(error)
    return None


def files_of(step: Path) -> list[Path]:
    return sorted(file for file in step.rglob("*") if file.is_file())


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


def largest(folder: Path) -> Path:
    return max(files_of(folder), key=lambda file: file.stat().st_size)


def assert_refused_with_advice(text: str | None, folder: Path, item: str) -> None:
    assert text is not None
    assert "\n" not in text
    assert f"{folder / '2'} is damaged ({item}" in text
    assert f"use the one before, {folder / '1'}" in text


@pytest.mark.parametrize("item", ["params", "data", "meta", "checksums", "files"])
def test_what_is_damaged_is_named_and_the_step_before_offered(two_steps, item):
    folder = two_steps / "2" / item
    file = largest(folder) if item == "params" else folder / ("prompt.yaml" if item == "files" else "metadata")
    content = file.read_bytes()
    try:
        for damaged in (content[: len(content) // 2], flip(content, len(content) // 2), None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            assert_refused_with_advice(refusal(two_steps), two_steps, item)
            if damaged is None:
                read_all(two_steps, 1)
    finally:
        file.write_bytes(content)
    assert refusal(two_steps) is None


def test_one_changed_bit_of_a_weight_is_found_and_the_parameter_named(two_steps):
    """The damage that nothing below this library finds: the compressed block of an array still unpacks."""
    file = largest(two_steps / "2" / "params" / "ocdbt.process_0" / "d")
    content = file.read_bytes()
    try:
        found = []
        for at in range(len(content) // 8, len(content), len(content) // 4):
            file.write_bytes(flip(content, at))
            found.append(refusal(two_steps))
    finally:
        file.write_bytes(content)
    assert any(text and "kernel: not the values that were saved" in text for text in found), found


@pytest.mark.slow
def test_every_file_of_a_checkpoint_damaged_in_turn_is_refused_or_read_right(two_steps):
    refused, harmless = set(), set()
    step = two_steps / "2"
    for file in files_of(step):
        content = file.read_bytes()
        for damaged in (content[: len(content) // 2], flip(content, len(content) // 2), None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            text = refusal(two_steps)
            (harmless if text is None else refused).add(file.relative_to(step).parts[0])
            file.write_bytes(content)
    print(f"refused in {sorted(refused)}; of no consequence in {sorted(harmless)}")
    assert {"params", "optimizer", "data", "meta", "checksums", "files"} <= refused


@pytest.mark.parametrize("read_only", [True, False])
def test_damaged_metrics_are_told_with_their_step(two_steps, read_only):
    file = two_steps / "2" / "metrics" / "metrics"
    content = file.read_bytes()
    try:
        file.write_text('{"valid')
        with pytest.raises(
            UserError, match=f"{two_steps} cannot be opened .*{file} is damaged, delete {file.parents[1]}"
        ):
            Checkpoints(two_steps, read_only=read_only)
    finally:
        file.write_bytes(content)


def test_checksums_see_any_element_and_swaps_and_no_sharding():
    rng = np.random.default_rng(0)
    tree = {"a": jnp.asarray(rng.normal(size=(8, 6)), jnp.float32), "b": jnp.arange(5, dtype=jnp.bfloat16)}
    wanted = checksums(tree)
    check_sums(tree, wanted)
    for change in (
        tree["a"].at[7, 5].set(np.nextafter(np.float32(tree["a"][7, 5]), np.float32(9))),
        tree["a"].at[jnp.array([0, 1])].set(tree["a"][jnp.array([1, 0])]),
        tree["a"].T.reshape(8, 6),
    ):
        with pytest.raises(DamageError, match=r"^a: not the values"):
            check_sums({**tree, "a": change}, wanted)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert checksums(jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))) == wanted
    assert checksums({"z": jnp.zeros((3,), bool), "s": jnp.int32(3)}).keys() == {"z", "s"}


def test_sealed_json_is_the_same_or_refused():
    value = {"a": [1, 2.5, None], "b": {"c": "ü"}}
    sealed = seal(value)
    assert unseal(sealed) == value
    with pytest.raises(DamageError):
        unseal({**sealed, "value": {**value, "a": [1, 2.5]}})
    for other in ({}, [], None, {"value": value}):
        with pytest.raises(DamageError):
            unseal(other)
