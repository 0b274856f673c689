"""What a run survives: kills, signals at every moment, full disks, losses that are not finite."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from killed_helpers import kill_and_resume, unfinished
from survival_helpers import Line, curve, small_batch
from survival_helpers import small_trainer as trainer
from training_helpers import CountedBatches

from blockrank.errors import UserError
from blockrank.training.checkpoint import Checkpoints, CheckpointSettings
from blockrank.training.settings import RunRecord, TrainerSettings
from blockrank.training.state import split_model
from blockrank.training.stopping import Stopped, StopSignals
from blockrank.training.tracking import JsonLines, read_metrics


class SmallBatches(CountedBatches):
    def __init__(self) -> None:
        super().__init__(small_batch)


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""tensorstore reports a failed write once more to an event loop that Orbax has closed by then."""

VALIDATED = TrainerSettings(batch_size=4, validate_every=2)


def ask_to_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def assert_same_run(folder: Path, whole: Path) -> None:
    """The same data and losses at every step, and the same weights at the end."""
    assert curve(folder) == curve(whole)
    like = split_model(Line())[1]
    found, wanted = (Checkpoints(run / "checkpoints", read_only=True).restore_params(like) for run in (folder, whole))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not unfinished(folder)


@pytest.mark.parametrize(
    ("kills", "steps"), [(3, 30), pytest.param(20, 240, marks=pytest.mark.slow)], ids=["three", "twenty"]
)
def test_killed_at_random_moments_it_resumes_to_the_bit(tmp_path, kills, steps, capsys):
    trainer(tmp_path / "whole", total_steps=steps).run()
    tally = kill_and_resume(tmp_path / "killed", steps, kills, seed=kills)
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.resumed_from == sorted(tally.resumed_from)
    assert tally.in_a_save
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def validations(folder: Path) -> list[tuple[int, float]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row["validation/p_at_1"]) for row in rows if "validation/p_at_1" in row]


def test_a_signal_during_validation_saves_at_once_and_the_next_run_makes_up_for_it(tmp_path):
    def measure(_, step):
        return {"p_at_1": step / 10}

    def measure_and_stop(_, step):
        if step == 4:
            ask_to_stop()
            raise AssertionError("the validation goes on after the signal")
        return measure(None, step)

    trainer(tmp_path / "whole", validate=measure, settings=VALIDATED).run()
    stopped = trainer(tmp_path / "parts", validate=measure_and_stop, settings=VALIDATED).run()
    assert (stopped.status, stopped.step, stopped.checkpoint) == ("interrupted", 4, tmp_path / "parts/checkpoints/4")
    assert validations(tmp_path / "parts") == [(2, 0.2)]
    assert trainer(tmp_path / "parts", validate=measure, settings=VALIDATED).run().status == "finished"
    assert validations(tmp_path / "parts") == validations(tmp_path / "whole") == [(2, 0.2), (4, 0.4), (6, 0.6)]
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("moment", ["save", "compile", "data"])
def test_a_signal_at_other_moments_ends_with_a_committed_step(tmp_path, moment):
    trainer(tmp_path / "whole").run()
    run = trainer(tmp_path / "parts")
    if moment == "save":
        run.record = RunRecord({"seed": 0}, write_files=lambda _: ask_to_stop())
    elif moment == "data":

        class Batches(SmallBatches):
            def get_state(self):
                if not self.next:
                    ask_to_stop()
                return super().get_state()

        run.batches = Batches()
    else:
        find = run._programs.find

        def compiling(*arguments):
            ask_to_stop()
            return find(*arguments)

        run._programs.find = compiling
    stopped = run.run()
    assert stopped.status == "interrupted"
    assert stopped.step == (2 if moment == "save" else 1)
    assert Checkpoints(tmp_path / "parts" / "checkpoints", read_only=True).latest == stopped.step
    trainer(tmp_path / "parts").run()
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_signal_before_the_first_step_saves_nothing_and_loses_nothing(tmp_path, capsys):
    with StopSignals() as signals:
        with pytest.raises(Stopped):
            ask_to_stop()
        ask_to_stop()  # later ones are ignored
        stopped = trainer(tmp_path, signals=signals).run()
    assert (stopped.status, stopped.step, stopped.checkpoint) == ("interrupted", 0, None)
    assert "resumable" in capsys.readouterr().out
    assert trainer(tmp_path).run().status == "finished"


COMMAND = """
import blockrank.train as command
from survival_helpers import CountedBatches, small_batch, small_trainer

class StopAt(CountedBatches):
    def __next__(self):
        if self.next == 3:
            signal.raise_signal(signal.SIGTERM)
        return super().__next__()

def train(config, console, signals):
    if moments[0] == "loading":
        signal.raise_signal(signal.SIGTERM)
    batches = (StopAt if moments[0] == "training" else CountedBatches)(small_batch)
    return small_trainer(config.output_dir, batches=batches, signals=signals).run()

command.train, moments = train, ["loading", "training", "never"]
while moments:
    try:
        command.main()
    except SystemExit as end:
        print("status", end.code)
    del moments[0]
"""


def test_the_command_tells_its_status_when_it_was_stopped(tmp_path):
    """Of the command all is real but what it trains."""
    arguments = ["model=tiny", "data=pydocs", f"output_dir={tmp_path / 'run'}", "trainer.exit_code_when_stopped=75"]
    code = f"import signal, sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{COMMAND}"
    told = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *arguments], capture_output=True, text=True)
    lines = [line for line in told.stdout.splitlines() if line.startswith(("status", "stopped"))]
    assert [line.partition(";")[0] for line in lines] == [
        *("stopped outside of training steps", "status 75", "stopped at step 4 of 6", "status 75", "status 0"),
    ], told.stderr[-2000:]


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing_at(step: int) -> RunRecord:
    """A run whose save of one step fails."""

    def write(folder: Path) -> None:
        if any(part.startswith(f"{step}.") for part in folder.parts):
            no_space()

    return RunRecord({"seed": 0}, write_files=write)


def test_a_save_that_fails_stops_with_the_last_good_step_and_nothing_half_written(tmp_path):
    trainer(tmp_path / "whole").run()
    folder = tmp_path / "parts"
    with pytest.raises(UserError, match=r"step 4 was not saved .*No space left.*last good checkpoint is .*/2") as told:
        trainer(folder, record=failing_at(4)).run()
    assert "\n" not in str(told.value)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["2"]
    trainer(folder).run()
    assert_same_run(folder, tmp_path / "whole")


def test_a_save_that_fails_can_be_a_warning_but_not_the_last(tmp_path, caplog):
    trainer(tmp_path / "whole").run()
    settings = CheckpointSettings(every_steps=2, on_error="continue")
    with caplog.at_level(logging.WARNING):
        result = trainer(tmp_path / "parts", record=failing_at(4), checkpoints=settings).run()
    assert result.status == "finished"
    assert any("step 4 was not saved" in message for message in caplog.messages)
    assert Checkpoints(tmp_path / "parts" / "checkpoints", read_only=True).steps == [2, 6]
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    with pytest.raises(UserError, match=r"step 6, the last, is not saved .* last good checkpoint is of step 4"):
        trainer(tmp_path / "last", record=failing_at(6), checkpoints=settings).run()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2M", "blockrank", str(folder)], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    assert shutil.disk_usage(disk).free == 0
    return ballast


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_full_disk(tmp_path, small_disk, on_error):
    """The real thing: TensorStore's writes fail in the background, the log's at once."""
    trainer(tmp_path / "whole").run()
    folder = small_disk / "run"

    class Filling(SmallBatches):
        def __next__(self):
            if self.next == 2:
                fill(small_disk)
            if self.next == 5:
                (small_disk / "ballast").unlink()
            return super().__next__()

    checkpoints = CheckpointSettings(every_steps=2, on_error=on_error)
    run = trainer(folder, batches=Filling(), checkpoints=checkpoints)
    if on_error == "stop":
        with pytest.raises(UserError, match=r"step 4 was not saved in .*/2"):
            run.run()
        (small_disk / "ballast").unlink()
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["2"]
        trainer(folder).run()
    else:
        assert run.run().status == "finished"
        assert Checkpoints(folder / "checkpoints", read_only=True).steps == [2, 6]
    assert_same_run(folder, tmp_path / "whole")


def test_lines_of_the_log_wait_for_room(small_disk, caplog):
    lines = JsonLines(small_disk / "metrics.jsonl")
    lines.log(1, {"train/loss": 1.0})
    ballast = fill(small_disk)
    for step in range(2, 400):
        lines.log(step, {"train/loss": float(step)})
    assert len(read_metrics(small_disk / "metrics.jsonl")) < 399
    assert sum("wait in memory" in message for message in caplog.messages) == 1
    ballast.unlink()
    lines.log(400, {"train/loss": 0.5})
    lines.close()
    assert [row["step"] for row in read_metrics(small_disk / "metrics.jsonl")] == list(range(1, 401))


def poisoned(bad: int):
    """Batches of which one has a loss that is not finite."""

    def make(step: int):
        batch = small_batch(step)
        return (
            dataclasses.replace(batch, data=(batch.data[0] * np.float32("nan"), batch.data[1]))
            if step == bad
            else batch
        )

    return CountedBatches(make)


def test_what_a_loss_that_is_not_finite_leaves_behind_gives_the_batch_again(tmp_path):
    with pytest.raises(UserError, match="step 3"):
        trainer(tmp_path, batches=poisoned(3)).run()
    record = json.loads((tmp_path / "not_finite_step_3.json").read_text())
    again = SmallBatches()
    again.set_state(record["iterator"])
    batch = next(again)
    assert list(batch.query_ids) == record["query_ids"]
    np.testing.assert_array_equal(batch.data[1], small_batch(3).data[1])


def test_skipped_updates_are_counted_across_a_resume(tmp_path):
    settings = TrainerSettings(batch_size=4, on_nonfinite="skip", max_skipped=1)
    first = trainer(tmp_path, batches=poisoned(3), settings=settings)
    first.total_steps = 4
    first.run()
    assert [r["train/skipped"] for r in read_metrics(tmp_path / "metrics.jsonl") if "train/loss" in r] == [0, 0, 1, 1]
    with pytest.raises(UserError, match=r"step 5.*more than trainer\.max_skipped=1 updates were skipped"):
        trainer(tmp_path, batches=poisoned(5), settings=settings).run()
