"""Several processes on this machine train as one process with all of their devices does."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from training_helpers import make_batch

from blockrank.config import build, compose
from blockrank.errors import UserError
from blockrank.hosts import DistributedConfig
from blockrank.training.batches import HostBatch
from blockrank.training.host_batches import HostBatches
from blockrank.training.recipe import TrainConfig
from blockrank.training.saved_model import load_checkpoint_model
from blockrank.training.state import split_model
from blockrank.training.tracking import read_metrics

STEPS = 4
LISTS = 20


def lists_file(folder: Path, unlike: bool = False) -> Path:
    """Lists of very different sizes, so that parts of a batch are laid out differently."""
    rng = random.Random(0)
    words = ["cats", "dogs", "cows", "ducks", "bees", "owls", "frogs", "lions", "bears", "wolves"]
    rows = []
    for number in range(LISTS):
        longest = 30 if number % 3 == 0 else 4
        texts = [" ".join(rng.choices(words, k=rng.randint(1, longest))) for _ in range(6)]
        documents = [{"doc_id": f"d{number}-{j}", "title": "", "text": f"{j} {text}"} for j, text in enumerate(texts)]
        query = f"which animal is {rng.choice(words)}" + (" here" if unlike else "")
        rows.append({"query": query, "query_id": f"q{number}", "documents": documents, "answer_ids": [f"d{number}-0"]})
    file = folder / ("other.jsonl" if unlike else "train.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def command(file: Path, output: Path, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "-m", "blockrank.train", "model=tiny", "data=icr", f"data.path={file}"),
        *(f"output_dir={output}", "lists.candidates=own", "lists.num_candidates=6", "trainer.batch_size=8"),
        *("mesh.data=2", "mesh.fsdp=2", "mesh.doc=2", f"trainer.total_steps={STEPS}", "trainer.log_every=1"),
        *("optimizer.schedule.peak=1e-2", "optimizer.schedule.warmup_steps=1"),
        *("distributed.heartbeat_timeout_s=900", *overrides),
    ]


def environment(devices: int, **more: Any) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    flags += " --xla_cpu_collective_timeout_seconds=900 --xla_cpu_collective_call_terminate_timeout_seconds=900"
    added = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **{name: str(value) for name, value in more.items()}}
    return {**os.environ, **added}


def slurm(process: int, port: int) -> dict[str, Any]:
    """What SLURM tells a task of `srun --ntasks=2`."""
    return {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": 2,
        "SLURM_PROCID": process,
        "SLURM_LOCALID": process,
        "JAX_COORDINATOR_PORT": port,
    }


def start(arguments: Sequence[str], env: dict[str, str]) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parent.parent
    return subprocess.Popen(arguments, env=env, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], status: int | None = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=600)
    assert status is None or process.returncode == status, f"{process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
    return out, err


def steps_of(run: Path) -> list[dict[str, Any]]:
    """What was logged of each step."""
    return [row for row in read_metrics(run / "metrics.jsonl") if "train/loss" in row]


def parameters(run: Path) -> Any:
    return split_model(load_checkpoint_model(run).model)[1]


@pytest.mark.slow
def test_two_processes_of_four_devices_train_as_one_of_eight(tmp_path: Path) -> None:
    file, port = lists_file(tmp_path), free_port()
    pair = [start(command(file, tmp_path / "two"), environment(4, **slurm(i, port))) for i in range(2)]
    (out, _), (silent, _) = [finish(process) for process in pair]
    finish(start(command(file, tmp_path / "one"), environment(8)))
    assert "checkpoint: " in out
    torn = r"\[Gloo\]|.*peer rank|JAX distributed|Connecting to JAX"  # Gloo's threads write into each other's lines
    assert [line for line in silent.splitlines() if line and not re.match(torn, line)] == []
    ours, theirs = (steps_of(tmp_path / name) for name in ("two", "one"))
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    for one, other in zip(ours, theirs, strict=True):
        assert len(one["query_ids"]) == 8
        assert one["query_ids"] == other["query_ids"]
        for name in ("loss", "ntp_loss", "aux_loss", "grad_norm", "truncated_share", "padding_share"):
            np.testing.assert_allclose(one[f"train/{name}"], other[f"train/{name}"], rtol=2e-5, err_msg=name)
    assert {*(i for row in ours[:3] for i in row["query_ids"][: LISTS - 16 if row is ours[2] else 8])} == {
        f"q{i}" for i in range(LISTS)
    }
    compare_parameters(tmp_path / "two", tmp_path / "one")


def compare_parameters(one: Path, other: Path) -> None:
    """The newest checkpoints, both read by this one process of one device."""
    leaves = zip(*(jax.tree.leaves(parameters(run)) for run in (one, other)), strict=True)
    for ours, theirs in leaves:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def flags(process: int, port: int) -> list[str]:
    return [
        f"distributed.coordinator=localhost:{port}",
        "distributed.num_processes=2",
        f"distributed.process_id={process}",
    ]


@pytest.mark.slow
def test_a_signal_to_one_stops_both_after_the_same_step_and_one_process_goes_on(tmp_path: Path) -> None:
    file, port, steps = lists_file(tmp_path), free_port(), "trainer.total_steps=60"
    two, one = tmp_path / "two", tmp_path / "one"
    pair = [start(command(file, two, steps, *flags(i, port)), environment(4)) for i in range(2)]
    while len(read_metrics(two / "metrics.jsonl")) < 2 and all(process.poll() is None for process in pair):
        time.sleep(0.05)
    pair[1].send_signal(signal.SIGTERM)
    (out, _), _ = [finish(process) for process in pair]
    stopped = read_metrics(two / "metrics.jsonl")[-1]["step"]
    assert 2 <= stopped < 60
    assert f"stopped at step {stopped} of 60; resumable" in out
    assert [path.name for path in (two / "checkpoints").iterdir() if path.name.isdigit()] == [str(stopped)]
    for folder in (two, one):
        finish(start(command(file, folder, steps), environment(8)))
    ours, theirs = steps_of(two), steps_of(one)
    assert [row["query_ids"] for row in ours] == [row["query_ids"] for row in theirs]
    np.testing.assert_allclose(*([row["train/loss"] for row in rows] for rows in (ours, theirs)), rtol=1e-4)


@pytest.mark.slow
def test_a_process_with_other_lists_is_named_by_both(tmp_path: Path) -> None:
    files, port = [lists_file(tmp_path), lists_file(tmp_path, unlike=True)], free_port()
    pair = [start(command(files[i], tmp_path / "run", *flags(i, port)), environment(4)) for i in range(2)]
    for _, err in [finish(process, 2) for process in pair]:
        assert "error: what training lists are drawn from of process 1 differs from that of process 0" in err


@pytest.mark.slow
def test_a_killed_process_ends_the_other(tmp_path: Path) -> None:
    file, port, run = lists_file(tmp_path), free_port(), tmp_path / "run"
    more = ["trainer.total_steps=100000", "distributed.heartbeat_timeout_s=10"]
    pair = [start([*command(file, run, *flags(i, port)), *more], environment(4)) for i in range(2)]
    while len(read_metrics(run / "metrics.jsonl")) < 2 and all(process.poll() is None for process in pair):
        time.sleep(0.05)
    pair[1].kill()
    finish(pair[1], -signal.SIGKILL)
    finish(pair[0], None)
    assert pair[0].returncode != 0


@pytest.mark.parametrize(
    ("environment", "joins"),
    [
        ({}, False),
        (slurm(1, 1234), True),
        ({**slurm(0, 1234), "SLURM_NTASKS": 1}, False),
        ({"SLURM_JOB_ID": 7, "SLURM_NTASKS": 2}, False),  # a shell that salloc gave, outside of srun
        ({"TPU_ML_PLATFORM": "JAX"}, True),
        ({"TPU_ML_PLATFORM": "JAX", "JAX_PLATFORMS": "tpu,cpu"}, True),
        ({"TPU_ML_PLATFORM": "JAX", "JAX_PLATFORMS": "cpu"}, False),
    ],
)
def test_the_environment_says_whether_there_are_several(environment: dict[str, Any], joins: bool) -> None:
    environment = {name: str(value) for name, value in environment.items()}
    found = DistributedConfig(heartbeat_timeout_s=7).arguments(environment)
    assert found == ({"heartbeat_timeout_seconds": 7} if joins else None)
    assert DistributedConfig(num_processes=1).arguments(environment) is None
    told = DistributedConfig("host:1", 4, 3).arguments(environment)
    assert told is not None
    assert (told["coordinator_address"], told["num_processes"], told["process_id"]) == ("host:1", 4, 3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distributed.process_id=1"], "config key distributed: coordinator, num_processes and process_id go together"),
        (
            ["distributed.coordinator=a:1", "distributed.num_processes=2", "distributed.process_id=2"],
            "config key distributed: process_id=2 is none of 0 to 1",
        ),
        (["distributed.num_processes=0"], "config key distributed.num_processes: 0 must be at least 1"),
    ],
)
def test_processes_that_make_no_run_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(TrainConfig, compose("train", ["model=tiny", *overrides]))


class Part:
    """The stream of one process."""

    def __init__(self, batches: Sequence[HostBatch | Exception]):
        self.given = iter(batches)

    def __next__(self) -> HostBatch:
        batch = next(self.given)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def get_state(self) -> int:
        return 3

    def set_state(self, state: int) -> None:
        assert state == 3

    def query_ids(self) -> tuple[str, ...]:
        return ("q0", "q1")


def in_threads(streams: Sequence[tuple[list[HostBatch | Exception], int]]) -> list[Any]:
    """What each process's `HostBatches` gives, or raises, until it ends; threads stand for processes."""
    barrier, told = threading.Barrier(len(streams)), {}

    def follow(process: int) -> list[Any]:
        def gather(values: np.ndarray) -> np.ndarray:
            told[process] = values
            barrier.wait(60)
            everything = np.stack([told[i] for i in range(len(streams))])
            barrier.wait(60)
            return everything

        batches, part = streams[process]
        host, found = HostBatches(Part(batches), part, gather), []
        try:
            while True:
                found.append(next(host))
        except StopIteration:
            return found
        except ValueError as error:
            return [*found, error]

    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(follow, range(len(streams))))


def test_parts_get_one_layout_and_counts_of_the_whole() -> None:
    """Processes 0 and 1 share the devices of one part, so its lists count once."""
    large = make_batch(1, 2, documents=5)
    small = dataclasses.replace(make_batch(2, 2, documents=3), without_positive=1, truncated_share=0.5)
    same, copy, other = in_threads([([large], 0), ([large], 0), ([small], 1)])
    assert len(same) == len(copy) == len(other) == 1
    shape = large.data.layout.shape.union(small.data.layout.shape)
    for found, batch in zip((same[0], copy[0], other[0]), (large, large, small), strict=True):
        assert found.data.layout.shape == shape
        for ours, theirs in zip(found.data.layout.unpack(), batch.data.layout.unpack(), strict=True):
            for one, two in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(one, two)
        documents = batch.data.layout.shape.documents
        np.testing.assert_array_equal(found.data.positive[:, :documents], batch.data.positive)
        assert not found.data.positive[:, documents:].any()
        assert found.tokens == large.tokens + small.tokens
        assert found.padding_share == 1 - found.tokens / (4 * shape.tokens)
        assert (found.without_positive, found.truncated_share) == (1, 3 / 16)
        assert found.query_ids == ("q0", "q1")


def test_an_end_or_an_error_of_one_part_is_all_parts_end() -> None:
    batch = make_batch(1)
    assert [len(found) for found in in_threads([([batch], 0), ([batch, batch], 1)])] == [1, 1]
    good, bad = in_threads([([batch, batch], 0), ([batch, UserError("no such file")], 1)])
    assert [type(found) for found in good] == [type(found) for found in bad] == [HostBatch, UserError]
    assert str(bad[1]) == "no such file"
    assert "process 1 of 2 could not make its part of a batch" in str(good[1])
