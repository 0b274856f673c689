"""What a run says of itself: goodput, input wait, model FLOPs, predictions, profiler traces, and the watchdog."""

from __future__ import annotations

import dataclasses
import errno
import signal
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from test_trainer import ADAMW, run_apart, trainer
from training_helpers import OBJECTIVE, CountedBatches, make_batch, tiny_config, tiny_model

from blockrank.chips import CHIPS
from blockrank.config import build, compose
from blockrank.costs.hlo import Program
from blockrank.costs.prediction import TrainingCosts
from blockrank.costs.step_flops import Counts, StepFlops
from blockrank.errors import UserError
from blockrank.layout import TokenLayout
from blockrank.losses import Objective, TrainingBatch
from blockrank.models.loading import random_decoder
from blockrank.training.goodput import Goodput, goodput_text
from blockrank.training.optimizer import OptimizerSettings, Trainable, make_optimizer
from blockrank.training.profile import ProfiledSteps
from blockrank.training.recipe import TrainConfig
from blockrank.training.settings import TrainerSettings
from blockrank.training.state import create_state, split_model
from blockrank.training.step import make_train_step, ranking_loss_fn, ranking_share_fn
from blockrank.training.tracking import read_metrics
from blockrank.training.watchdog import EXIT_STATUS, Watchdog


def rows_of(folder: Path, name: str) -> list[dict]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if name in row]


def costs(chip: str | None, objective: Objective = OBJECTIVE) -> TrainingCosts:
    params = split_model(tiny_model())[1]
    found = TrainingCosts.of(tiny_config(), params, Trainable.of(params, ADAMW), objective, objective)
    return dataclasses.replace(found, chip=chip and CHIPS[chip])


def test_goodput_counts_of_a_phase_what_no_step_overlaps():
    times = iter([0.0, 0.0, 2.0, 2.0, 5.0, 9.0, 10.0, 12.0])
    goodput = Goodput(lambda: next(times))
    with goodput.phase("data"):
        pass  # 0 to 2, before the first step
    with goodput.phase("data"):
        pass  # 2 to 5, while the first step runs from 2 to 4
    assert goodput.stepped(2.0, 4.0) == 2.0
    assert goodput.stepped(5.0, 9.0) == 4.0
    with goodput.phase("checkpoint"):
        pass  # 9 to 10
    seconds = goodput.seconds()
    wanted = {"step": 6.0, "data": 3.0, "checkpoint": 1.0, "other": 2.0, "wall": 12.0}
    assert {name: value for name, value in seconds.items() if value} == wanted
    assert goodput_text(seconds) == "goodput 50.0% of 12 s; data 25.0%, other 16.7%, checkpoint 8.3%"


def test_a_step_that_waits_in_the_queue_is_not_counted_twice():
    times = iter([0.0, 9.0])
    goodput = Goodput(lambda: next(times))
    assert goodput.stepped(1.0, 4.0) == 3.0
    assert goodput.stepped(2.0, 6.0) == 2.0  # given to the device at 2, which was free at 4
    assert goodput.seconds()["step"] == 5.0


def test_the_log_has_pace_memory_and_goodput(tmp_path, capsys):
    def slow(step: int):
        time.sleep(0.3 if step == 3 else 0.0)
        return make_batch(step)

    trainer(tmp_path, total_steps=4, batches=CountedBatches(slow), costs=costs(None)).run()
    rows = rows_of(tmp_path, "train/loss")
    assert len(rows) == 4
    assert rows[2]["train/input_wait_s"] >= 0.3
    for row in rows:
        assert row["train/seconds_per_step"] > 0
        assert row["train/host_peak_bytes"] > 1e7
        assert row["train/model_flops"] > 0
        assert {"train/padding_share", "train/truncated_share", "train/tokens_per_second", "train/eta_s"} <= row.keys()
        assert "train/mfu" not in row  # of no known chip
    (end,) = rows_of(tmp_path, "train/goodput")
    parts = {name: value for name, value in end.items() if name.startswith("goodput/") and name != "goodput/wall_s"}
    assert sum(parts.values()) == pytest.approx(end["goodput/wall_s"])
    assert min(parts[f"goodput/{name}_s"] for name in ("step", "compile", "checkpoint")) > 0
    assert end["train/goodput"] == pytest.approx(parts["goodput/step_s"] / end["goodput/wall_s"])
    assert "goodput " in capsys.readouterr().out


def test_memory_and_time_are_predicted_from_the_program_that_runs(tmp_path):
    run = trainer(tmp_path, total_steps=4, costs=costs("v6e"))
    run.run()
    (start,) = rows_of(tmp_path, "predicted/argument_bytes")
    (end,) = rows_of(tmp_path, "measured/peak_bytes")
    program, *others = run._programs.known.values()
    assert not others
    planned = program.run.memory_analysis()
    assert start["predicted/temporary_bytes"] == planned.temp_size_in_bytes
    assert start["predicted/argument_bytes"] == planned.argument_size_in_bytes
    assert end["predicted/total_bytes"] == start["predicted/total_bytes"] > start["predicted/argument_bytes"]
    assert end["predicted/seconds_per_step"] == start["predicted/seconds_per_step"] > 0
    measured = [row["train/seconds_per_step"] for row in rows_of(tmp_path, "train/loss")]
    assert 0 < end["measured/seconds_per_step"] <= sum(measured)


def test_a_step_is_compiled_once_for_each_loss(tmp_path):
    attention = dataclasses.replace(OBJECTIVE, ntp_weight=0.0)
    between = (ranking_loss_fn(attention), ranking_share_fn(attention))
    run = trainer(tmp_path, total_steps=6, full_every=2, between=between, costs=costs(None))
    run.run()
    assert len(run._programs.known) == 2
    assert len(rows_of(tmp_path, "predicted/argument_bytes")) == 2
    assert [step._cache_size() for step in run._programs._steps.values()] == [0, 0]  # nothing was compiled by a call


# --- model FLOPs ----------------------------------------------------------------------------------


def dense_batch(lists: int = 2) -> TrainingBatch:
    """Lists without padding: a prefix of 5 tokens, documents of 8 and 8, a suffix of 11 of which 3 are the answer."""
    blocks = [[list(range(1, 6)), [7] * 8, [8] * 8, list(range(2, 13))] for _ in range(lists)]
    layout = TokenLayout.from_blocks(
        blocks, signals=(-5, -4), answer_length=3, row_length=16, suffix_offset=None, vocab_size=64
    )
    return TrainingBatch(layout, jnp.array([[True, False]] * lists))


@pytest.mark.parametrize(
    ("trainable", "ntp_weight", "aux_weight"),
    [
        (r".*", 1.0, 0.1),
        (r".*", 1.0, 0.0),
        (r".*", 0.0, 1.0),
        (r"embed.*|blocks\.attention\..*", 1.0, 0.0),
        (r"embed.*|blocks\.mlp\.down\..*", 0.0, 1.0),
        (r"head.*", 1.0, 0.0),
    ],
)
def test_model_flops_are_those_of_the_products_that_the_compiled_step_has(trainable, ntp_weight, aux_weight):
    """Without padding, and with all pairs of the dense oracle counted as visible, the program computes nothing else."""
    config = dataclasses.replace(tiny_config(3), tie_embeddings=False, intermediate_size=48)
    objective = dataclasses.replace(
        OBJECTIVE,
        score_layer=1,
        visibility="dense",
        ntp_weight=ntp_weight,
        aux_weight=aux_weight,
        attention_backend="reference",
    )
    batch, settings = dense_batch(), OptimizerSettings(name="adamw", trainable=trainable)
    graphdef, params = split_model(random_decoder(config, 0))
    chosen = Trainable.of(params, settings)
    rule, schedule = make_optimizer(settings, 10)
    step = make_train_step(graphdef, ranking_loss_fn(objective), rule, schedule, chosen)
    program = step.lower(create_state(params, rule, chosen), jax.device_put(batch)).compile()
    tokens, lists = 32, 2
    real = Counts.of(batch.layout, "dense")
    assert real == Counts(
        tokens=lists * tokens,
        pairs=lists * tokens * (tokens + 1) // 2,
        documents=lists * 16,
        signals=lists * 2,
        scored=lists * 2 * 16,
        labels=lists * 3,
    )
    computed = dataclasses.replace(real, pairs=lists * tokens**2)
    flops = StepFlops.of(config, params, chosen, objective).total(computed)
    assert Program(program.as_text()).costs.flops == pytest.approx(flops, rel=0.01)


def test_frozen_layers_need_no_gradients_below_the_first_trained_one():
    """The program's scan computes them all the same; the definition does not count them."""
    params = split_model(tiny_model(3))[1]
    totals = {}
    for layers in ((0, 3), (1, 3), (2, 3)):
        settings = OptimizerSettings(trainable=r"blocks\.mlp\.down\..*", trainable_layers=layers)
        totals[layers] = StepFlops.of(tiny_config(3), params, Trainable.of(params, settings), OBJECTIVE).token
    down, block = 16 * 32, 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32
    assert totals[0, 3] == 2 * (3 * block + 2 * block + 3 * down)
    assert totals[1, 3] == 2 * (3 * block + 1 * block + 2 * down)
    assert totals[2, 3] == 2 * (3 * block + 1 * down)


def test_counts_do_not_depend_on_padding_packing_and_shards():
    layout = make_batch(1).data.layout
    lists = [[block.tolist() for block in blocks] for blocks in layout.unpack()]
    options = {"signals": (-4, -3), "answer_length": 2, "suffix_offset": 64}
    real = Counts.of(TokenLayout.from_blocks(lists, row_length=16, **options), "blockrank")
    wide = TokenLayout.from_blocks(lists, row_length=64, packing="chunked", **options)
    assert Counts.of(wide, "blockrank") == real
    rows = wide.shape.rows
    assert Counts.of(wide.split(rows), "blockrank") == real
    assert real.tokens == sum(len(block) for blocks in lists for block in blocks)
    assert Counts.of(wide, "dense").pairs > real.pairs


def test_mfu_is_the_model_flops_per_second_of_the_chip(tmp_path, monkeypatch):
    monkeypatch.setattr("blockrank.training.telemetry.chip_of", lambda _: CHIPS["v6e"])
    trainer(tmp_path, total_steps=3, costs=costs("v6e")).run()
    batch = make_batch(2)
    flops = costs(None).flops(batch.data, full=True)
    row = rows_of(tmp_path, "train/loss")[1]
    assert row["train/model_flops"] == flops
    assert row["train/mfu"] == pytest.approx(flops / row["train/seconds_per_step"] / CHIPS["v6e"].flops)


# --- profiler -------------------------------------------------------------------------------------


def traced_steps(folder: Path) -> list[int]:
    """The steps marked in the traces below a folder."""
    found = []
    for file in sorted(folder.rglob("*.xplane.pb")):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                found += [dict(event.stats)["step_num"] for event in line.events if event.name == "train"]
    return sorted(found)


def test_chosen_steps_are_traced_and_on_resume_those_still_to_come(tmp_path):
    trainer(tmp_path, total_steps=6, profile=ProfiledSteps.parse("steps:3-4")).run()
    assert traced_steps(tmp_path / "profile") == [3, 4]

    class StopAt(CountedBatches):
        def __next__(self):
            batch = super().__next__()
            if self.next == 3:
                signal.raise_signal(signal.SIGTERM)
            return batch

    again, profile = tmp_path / "again", ProfiledSteps.parse("steps:4-5")
    assert trainer(again, total_steps=6, batches=StopAt(), profile=profile).run().status == "interrupted"
    assert not (again / "profile").exists()
    trainer(again, total_steps=6, profile=profile).run()
    assert traced_steps(again / "profile") == [4, 5]


def test_steps_to_profile_are_a_key_of_the_command():
    assert build(TrainConfig, compose("train", ["+exp=quickstart", "profile=steps:10-13"])).profile == "steps:10-13"
    assert ProfiledSteps.parse("steps:10-13") == ProfiledSteps(10, 13)
    assert ProfiledSteps.parse("steps:7") == ProfiledSteps(7, 7)
    for text in ("10-13", "steps:", "steps:0-3", "steps:5-3", "steps:1-2-3", "steps:a-b", "steps:-3"):
        with pytest.raises(UserError, match=r"config key profile: .*write profile=steps:FIRST-LAST"):
            build(TrainConfig, compose("train", ["+exp=quickstart", f"profile='{text}'"]))


def test_steps_beyond_the_run_are_not_profiled(tmp_path):
    with pytest.raises(UserError, match="profile=steps:7-9: the run has 6 steps"):
        trainer(tmp_path, total_steps=6, profile=ProfiledSteps(7, 9))


# --- watchdog -------------------------------------------------------------------------------------


class Stalled(CountedBatches):
    """Waits before its third batch until `until()` holds."""

    def __init__(self, until):
        super().__init__()
        self.until = until

    def __next__(self):
        if self.next == 2:
            self.wait_for_a_shard()
        return super().__next__()

    def wait_for_a_shard(self):
        while not self.until():
            time.sleep(0.05)


def test_a_stalled_iterator_has_its_stack_dumped_and_the_run_goes_on(tmp_path, capsys):
    file = tmp_path / "stalled_process_0.txt"
    batches = Stalled(lambda: file.exists() and "wait_for_a_shard" in file.read_text())
    result = trainer(
        tmp_path, total_steps=4, batches=batches, settings=TrainerSettings(batch_size=4, watchdog_s=1)
    ).run()
    assert result.status == "finished"
    assert "no training step finished for" in file.read_text()
    assert "wait_for_a_shard" in capsys.readouterr().err


def test_a_stall_is_told_on_a_full_disk_too(tmp_path, monkeypatch, capfd):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    watchdog = Watchdog(0.05, tmp_path)
    deadline = time.monotonic() + 60
    while not watchdog.file.exists() or watchdog.file.read_text().count("no training step finished") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watchdog.close()
    assert "No space left on device" in watchdog.file.read_text()
    assert "test_a_stall_is_told_on_a_full_disk_too" in capfd.readouterr().err


EXIT = """
from test_telemetry import Stalled
settings = TrainerSettings(batch_size=4, watchdog_s=5, watchdog_exit=True)
trainer(folder, total_steps=4, batches=Stalled(lambda: False), settings=settings).run()
"""


def test_the_watchdog_can_end_the_process_and_the_run_resumes(tmp_path):
    process = run_apart(tmp_path, EXIT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_STATUS
    assert "wait_for_a_shard" in err
    assert trainer(tmp_path, total_steps=4).run().status == "finished"
    assert len(rows_of(tmp_path, "train/loss")) == 4
