"""Where the numbers of a run go: always a local `metrics.jsonl`, a progress display, and Weights & Biases if wanted.

A metric is named `group/name_in_snake_case` (`validation/ndcg_at_10`): letters, digits, `_` and one `/`, which every
backend can sort and filter. Only process 0 records anything. No tracker ever stops a run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from blockrank.data.files import atomic_write
from blockrank.errors import UserError

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
STEP = "step"


@dataclass(frozen=True)
class TrackerSettings:
    """Weights & Biases: `online`, `offline` (files to sync later) or `disabled`; `metrics.jsonl` is always written."""

    mode: Literal["online", "offline", "disabled"] = "disabled"
    project: str = "blockrank"
    entity: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    init_timeout_s: int = 60


class Tracker(Protocol):
    """Something that takes numbers at a step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def metric_name(name: str) -> str:
    """A name every backend accepts: `nDCG@10` -> `ndcg_at_10`, `AP(rel=2)` -> `ap_rel_2`; groups keep their `/`."""
    parts = [re.sub(r"[^a-z0-9]+", "_", part.lower().replace("@", "_at_")).strip("_") for part in name.split("/")]
    return "/".join(part for part in parts if part) or "unnamed"


class JsonLines:
    """Appends one JSON object per step to a file, whole lines only.

    `resume_step` None starts a new file; otherwise lines of later steps (written after the checkpoint that training
    resumes from) and a torn last line are removed, so that no step is there twice. Lines that cannot be written (a full
    disk) are told once, kept, and written with a later line. Raises `UserError` if the file cannot be made.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None):
        self.path = Path(path)
        kept = [] if resume_step is None else [row for row in read_metrics(self.path) if row[STEP] <= resume_step]
        try:
            with atomic_write(self.path) as file:
                file.write("".join(_line(row) for row in kept).encode("utf-8"))
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror or error}") from error
        self._waiting = b""
        self._told = False

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._waiting += _line({STEP: step, **values}).encode("utf-8")
        self._write()

    def close(self) -> None:
        if self._waiting:
            self._write()
        if self._waiting:
            log.warning("%s: %d lines are lost", self.path, self._waiting.count(b"\n"))
        self._file.close()

    def _write(self) -> None:
        try:
            while self._waiting:
                written = self._file.write(self._waiting)
                self._waiting = self._waiting[written:]
        except OSError as error:
            self._tell(error)
            return
        self._told = False

    def _tell(self, error: OSError) -> None:
        if not self._told:
            log.warning("%s: %s; its lines wait in memory until it can be written", self.path, error.strerror or error)
        self._told = True


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, in file order, without torn lines; none if there is no such file."""
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get(STEP), int):
            rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    """Strict JSON: floats with all digits, NaN and infinities as strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value

    return json.dumps({key: plain(value) for key, value in row.items()}, allow_nan=False, ensure_ascii=False) + "\n"


class WandbTracker:
    """Weights & Biases with `step` as the axis of every metric. The first failure is one warning and the end of it."""

    def __init__(self, settings: TrackerSettings, folder: str | Path, config: Mapping[str, Any]):
        self._run: Any = None
        folder = Path(folder)
        try:
            import wandb

            id_file = folder / "wandb_id"
            run_id = id_file.read_text().strip() if id_file.exists() else secrets.token_hex(4)
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=settings.name or folder.name,
                tags=list(settings.tags),
                dir=str(folder),
                mode=settings.mode,
                id=run_id,
                resume="allow" if settings.mode == "online" else None,
                config=dict(config),
                settings=wandb.Settings(init_timeout=settings.init_timeout_s, console="off"),
            )
            id_file.write_text(run_id)
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP)
        except Exception as error:
            self._fail(error)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
            self._run.log({STEP: step, **numbers})
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._run = None
        reason = (str(error) or type(error).__name__).splitlines()[0]
        log.warning("Weights & Biases is off for this run (%s); metrics stay in %s", reason, METRICS_FILE)


class ProgressDisplay:
    """A bar with loss, P@1, tokens/s and ETA on a terminal; elsewhere one plain line every `every` steps."""

    def __init__(self, total_steps: int, *, start: int = 0, every: int = 10, console: Console | None = None):
        self._total, self._every = total_steps, max(every, 1)
        self._console = console or Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._values: dict[str, float] = {}
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("training", total=total_steps, completed=start, status="")
            self._bar.start()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._values |= {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
        status = self._status()
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
        elif "train/loss" in values and (step % self._every == 0 or step in (1, self._total)):
            self._console.print(f"step {step}/{self._total}  {status}", highlight=False, soft_wrap=True)
        validation = "  ".join(f"{k} {float(v):.4f}" for k, v in values.items() if k.startswith("validation/"))
        if validation:
            self._console.print(f"step {step}/{self._total}  {validation}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _status(self) -> str:
        shown = (
            ("train/loss", "loss {:.4f}"),
            ("train/attention_p_at_1", "P@1 {:.3f}"),
            ("train/tokens_per_second", "{:,.0f} tokens/s"),
            ("train/eta_s", "ETA {:.0f} s"),
        )
        return "  ".join(form.format(self._values[name]) for name, form in shown if name in self._values)


class Trackers:
    """Several trackers as one. Values of other kinds than numbers (query ids) reach only those that keep them."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = list(trackers)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def make_trackers(
    settings: TrackerSettings,
    folder: str | Path,
    config: Mapping[str, Any],
    *,
    total_steps: int,
    resume_step: int | None = None,
    display_every: int = 10,
) -> Trackers:
    """The trackers of a run in `folder`; none on processes other than 0."""
    if jax.process_index() != 0:
        return Trackers([])
    trackers: list[Tracker] = [JsonLines(Path(folder) / METRICS_FILE, resume_step)]
    if settings.mode != "disabled":
        os.environ.setdefault("WANDB_SILENT", "true")
        trackers.append(WandbTracker(settings, folder, config))
    return Trackers([*trackers, ProgressDisplay(total_steps, start=resume_step or 0, every=display_every)])
