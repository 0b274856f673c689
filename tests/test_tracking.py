"""metrics.jsonl, Weights & Biases that may fail, and the progress display."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
import time

import jax
import pytest
from rich.console import Console

from blockrank.training.tracking import (
    JsonLines,
    ProgressDisplay,
    TrackerSettings,
    WandbTracker,
    make_trackers,
    metric_name,
    read_metrics,
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("nDCG@10", "ndcg_at_10"),
        ("validation/nDCG@10", "validation/ndcg_at_10"),
        ("AP(rel=2)", "ap_rel_2"),
        ("train/loss", "train/loss"),
        ("@", "at"),
    ],
)
def test_metric_names_are_safe(given, expected):
    assert metric_name(given) == expected


def test_json_lines_keep_every_digit(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.log(1, {"train/loss": 0.1 + 0.2, "query_ids": ["q1", "q2"]})
    lines.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "train/loss": 0.30000000000000004, "query_ids": ["q1", "q2"]}
    ]


def test_not_finite_values_stay_valid_json(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.log(1, {"train/loss": math.nan})
    lines.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)["train/loss"] == "nan"


def test_resume_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": s, "train/loss": s / 10}) + "\n" for s in range(498, 703)) + '{"step": 7'
    )
    lines = JsonLines(path, resume_step=500)
    lines.log(501, {"train/loss": -1.0})
    lines.close()
    assert [(r["step"], r["train/loss"]) for r in read_metrics(path)] == [
        (498, 49.8),
        (499, 49.9),
        (500, 50.0),
        (501, -1.0),
    ]


def test_a_new_run_does_not_append_to_an_old_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    JsonLines(path).close()
    assert read_metrics(path) == []


def test_missing_wandb_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        tracker = WandbTracker(TrackerSettings(mode="online"), tmp_path, {})
        tracker.log(1, {"train/loss": 1.0})
        tracker.close()
    assert len(caplog.records) == 1
    assert "metrics.jsonl" in caplog.text


class BrokenRun:
    """A run whose connection is gone."""

    def log(self, _):
        raise ConnectionError("unreachable host")


def test_wandb_failing_in_the_middle_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = WandbTracker(TrackerSettings(mode="online"), tmp_path, {})
    caplog.clear()
    tracker._run = BrokenRun()
    with caplog.at_level(logging.WARNING):
        tracker.log(1, {"train/loss": 1.0})
        tracker.log(2, {"train/loss": 1.0})
        tracker.close()
    assert len(caplog.records) == 1
    assert "unreachable host" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_writes_its_files(tmp_path):
    tracker = WandbTracker(TrackerSettings(mode="offline"), tmp_path, {"lr": 1.0})
    tracker.log(5, {"train/loss": 1.0, "query_ids": ["q"]})
    tracker.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert (tmp_path / "wandb_id").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_unreachable_wandb_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="blockrank"):
        trackers = make_trackers(TrackerSettings(mode="online", init_timeout_s=5), tmp_path, {}, total_steps=3)
        trackers.log(1, {"train/loss": 1.0})
        trackers.close()
    assert time.monotonic() - started < 60
    assert "off for this run" in caplog.text
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": 1.0}]


def test_other_processes_record_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    trackers = make_trackers(TrackerSettings(mode="online"), tmp_path, {}, total_steps=3)
    trackers.log(1, {"train/loss": 1.0})
    trackers.close()
    assert list(tmp_path.iterdir()) == []


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    display = ProgressDisplay(20, every=10, console=Console(file=out, force_terminal=False, width=200))
    for step in range(1, 21):
        display.log(step, {"train/loss": 1.0 / step, "train/attention_p_at_1": 0.5, "train/tokens_per_second": 1234.0})
    display.log(20, {"validation/ndcg_at_10": 0.75})
    display.close()
    assert out.getvalue().splitlines() == [
        "step 1/20  loss 1.0000  P@1 0.500  1,234 tokens/s",
        "step 10/20  loss 0.1000  P@1 0.500  1,234 tokens/s",
        "step 20/20  loss 0.0500  P@1 0.500  1,234 tokens/s",
        "step 20/20  validation/ndcg_at_10 0.7500",
    ]


def test_a_bar_on_a_terminal():
    out = io.StringIO()
    display = ProgressDisplay(2, console=Console(file=out, force_terminal=True, width=120))
    display.log(1, {"train/loss": 0.25})
    display.close()
    assert "1/2" in out.getvalue()
    assert "loss 0.2500" in out.getvalue()
