"""The training loop: batches in, steps, validation, checkpoints and logs out; resumable to the bit."""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from blockrank.config import differences
from blockrank.errors import UserError, at_least, between
from blockrank.parallel import LISTS, spread_lists
from blockrank.training.batches import HostBatch
from blockrank.training.checkpoint import FOLDER, Checkpoints, CheckpointSettings
from blockrank.training.optimizer import OptimizerSettings, Trainable, make_optimizer, master_weights
from blockrank.training.state import TrainState, count_parameters, place_new_state, split_model, state_shapes
from blockrank.training.step import LossFn, Metrics, ShareFn, Step, make_train_step
from blockrank.training.telemetry import Meter
from blockrank.training.tracking import METRICS_FILE, TrackerSettings, make_trackers

log = logging.getLogger(__name__)


class Batches(Protocol):
    """An iterator of batches that knows its position. The state is JSON and valid for the same data only."""

    def __next__(self) -> HostBatch: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


Validate = Callable[[Any, int], Mapping[str, float]]
"""(model, step) -> metrics, named without the `validation/` prefix."""


@dataclass(frozen=True)
class TrainerSettings:
    """`batch_size` lists per step over all devices, in `accumulation` micro-batches, for `num_epochs` or `total_steps`.

    `on_nonfinite`: `stop` at a loss or gradient that is not finite, or `skip` that update, at most `max_skipped` times.
    `max_share_without_positive`: stop when more lists than that (of at least 100 seen) have no positive document.
    `resume`: continue from the newest checkpoint in the output folder; otherwise an earlier run there is an error.
    """

    batch_size: int = 32
    accumulation: int = 1
    num_epochs: int = 1
    total_steps: int | None = None
    validate_every: int = 0
    log_every: int = 10
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped: int = 10
    max_share_without_positive: float = 0.1
    resume: bool = True

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "accumulation", "num_epochs", "total_steps", "log_every")
        at_least(self, 0, "validate_every", "max_skipped")
        between(self, 0, 1, "max_share_without_positive")

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raises `UserError` unless every micro-batch gives all groups of devices as many lists."""
        groups = math.prod(mesh.shape[axis] for axis in LISTS)
        if self.batch_size % (self.accumulation * groups):
            raise UserError(
                f"trainer.batch_size={self.batch_size} in trainer.accumulation={self.accumulation} micro-batches does "
                f"not divide over the {groups} groups of devices of mesh.data x mesh.fsdp: make it a multiple of "
                f"{self.accumulation * groups}"
            )


@dataclass(frozen=True)
class TrainResult:
    """`status` is `finished`, or `interrupted` when a signal ended the run early; `model` has the trained weights."""

    status: Literal["finished", "interrupted"]
    step: int
    model: Any
    checkpoint: Path
    metrics: Path


@dataclass(frozen=True)
class RunRecord:
    """What is saved with a run besides its state.

    `identity` decides data order and numerics: a checkpoint with another one is refused. `meta` is any JSON;
    `write_files` writes template and tokenizer.
    """

    identity: Mapping[str, Any]
    meta: Mapping[str, Any] = field(default_factory=dict)
    write_files: Callable[[Path], None] | None = None


@dataclass
class _Pending:
    step: int
    metrics: Metrics
    batch: HostBatch


class Trainer:
    """Trains `model` on `batches`, writing into `folder`.

    Every `full_every`-th step minimises `loss_fn`, the steps between `between`'s, where given.

    With a `mesh`, the state is spread over it (`parallel.RULES`), lists over `data` and `fsdp`, their rows over `doc`;
    `batches` then holds this host's `list_part` of every batch. `model` may hold host arrays.

    `model`'s parameters are consumed (donated to the first step). SIGTERM and SIGINT end the run after
    the current step with a checkpoint; a second SIGINT stops at once.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nnx.Module,
        batches: Batches,
        loss_fn: LossFn,
        *,
        total_steps: int,
        optimizer: OptimizerSettings,
        settings: TrainerSettings,
        record: RunRecord,
        checkpoints: CheckpointSettings | None = None,
        tracker: TrackerSettings | None = None,
        share_fn: ShareFn | None = None,
        full_every: int = 1,
        between: tuple[LossFn, ShareFn | None] | None = None,
        validate: Validate | None = None,
        mesh: Mesh | None = None,
    ):
        self.folder, self.batches, self.total_steps = Path(folder), batches, total_steps
        self.settings, self.record, self.validate, self.mesh = settings, record, validate, mesh
        if mesh is not None:
            settings.check_mesh(mesh)
        self._checkpoint_settings = checkpoints or CheckpointSettings()
        self._tracker_settings = tracker or TrackerSettings()
        self._graphdef, params = split_model(model)
        params = master_weights(params, optimizer)
        rule, schedule = make_optimizer(optimizer, total_steps)
        trainable = Trainable.of(params, optimizer)

        def step_fn(loss_fn: LossFn, share_fn: ShareFn | None) -> Step:
            options = {"accumulation": settings.accumulation, "share_fn": share_fn}
            return make_train_step(self._graphdef, loss_fn, rule, schedule, trainable, **options)

        self._full_every = full_every
        self._full_step = step_fn(loss_fn, share_fn)
        self._step_between = self._full_step if between is None else step_fn(*between)
        self._shapes = state_shapes(params, rule, trainable, mesh)
        self._create = partial(place_new_state, params, rule, trainable, mesh)
        self._stop: int | None = None
        self._pending: _Pending | None = None
        self._seen = self._without_positive = 0
        self._meter = Meter(total_steps, count_parameters(params))

    def run(self) -> TrainResult:
        """Trains to the end, or to a signal. Raises `UserError` for a loss that is not finite or unusable data."""
        self._checkpoints = Checkpoints(self.folder / FOLDER, self._checkpoint_settings)
        resumed = self._restore()
        if resumed is None:
            self._state = self._create()
        del self._create  # and with it the initial parameters
        self._trackers = make_trackers(
            self._tracker_settings,
            self.folder,
            self.record.meta,
            total_steps=self.total_steps,
            resume_step=resumed,
            display_every=self.settings.log_every,
        )
        try:
            with self._signals():
                step = self._loop(resumed or 0)
            self._checkpoints.wait()
        finally:
            self._trackers.close()
            self._checkpoints.close()
        if self._stop is not None:
            print(f"stopped at step {step} of {self.total_steps}; resumable: run the same command again")
        return TrainResult(
            "finished" if self._stop is None else "interrupted",
            step,
            self._model(self._state),
            self._checkpoints.path(step),
            self.folder / METRICS_FILE,
        )

    def _restore(self) -> int | None:
        latest = self._checkpoints.latest
        if latest is None:
            return None
        if not self.settings.resume:
            raise UserError(f"{self.folder} holds a run already (step {latest}): choose another output_dir, or resume")
        saved = self._checkpoints.restore_json("meta", latest).get("identity", {})
        wanted = json.loads(json.dumps(self.record.identity))
        saved, wanted = ({k: v for k, v in each.items() if v is not None} for each in (saved, wanted))
        if saved != wanted:
            raise UserError(
                f"{self.folder} holds a run with another configuration ({differences(saved, wanted)}): "
                "choose another output_dir"
            )
        self._state, data = self._checkpoints.restore(self._shapes, latest)
        self.batches.set_state(data["iterator"])
        self._seen, self._without_positive = data["seen"], data["without_positive"]
        return latest

    def _loop(self, step: int) -> int:
        settings, every = self.settings, self._checkpoint_settings.every_steps
        self._meter.restart()
        while step < self.total_steps and self._stop is None:
            try:
                batch = next(self.batches)
            except StopIteration:
                log.warning("the data ended at step %d of %d", step, self.total_steps)
                break
            self._count(batch)
            step_fn = self._step_between if step % self._full_every else self._full_step
            self._state, metrics = self._run_step(step_fn, batch)
            step += 1
            self._flush()
            self._pending = _Pending(step, metrics, batch)
            done = step == self.total_steps
            if self.validate is not None and settings.validate_every and (done or step % settings.validate_every == 0):
                self._flush()
                self._save(step, self._validation(step))
            elif done or (every and step % every == 0):
                self._flush()
                self._save(step)
        self._flush()
        self._save(step)
        return step

    def _run_step(self, step: Step, batch: HostBatch) -> tuple[TrainState, Metrics]:
        if self.mesh is None:
            return step(self._state, jax.device_put(batch.data))
        with jax.set_mesh(self.mesh):
            return step(self._state, spread_lists(batch.data.split(self.mesh.shape["doc"]), self.mesh))

    def _flush(self) -> None:
        """Logs the step before: fetching its numbers then costs no time, the next step already runs."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        metrics = {name: value.item() for name, value in jax.device_get(pending.metrics).items()}
        finite = metrics.pop("finite")
        values: dict[str, Any] = {f"train/{name}": value for name, value in metrics.items()}
        values |= self._meter.step(pending.step, pending.batch)
        values["query_ids"] = list(pending.batch.query_ids)
        self._trackers.log(pending.step, values)
        if not finite:
            self._not_finite(pending, metrics)

    def _not_finite(self, pending: _Pending, metrics: Mapping[str, float]) -> None:
        what = "loss" if not math.isfinite(metrics["loss"]) else "gradient norm"
        file = self.folder / f"not_finite_step_{pending.step}.json"
        record = {"step": pending.step, "query_ids": pending.batch.query_ids, **{k: str(v) for k, v in metrics.items()}}
        file.write_text(json.dumps(record, indent=1))
        skipped = int(self._state.skipped)
        if self.settings.on_nonfinite == "skip" and skipped <= self.settings.max_skipped:
            log.warning(
                "step %d: %s is not finite, update skipped (%d so far); see %s", pending.step, what, skipped, file
            )
            return
        advice = "lower optimizer.schedule.peak, check these lists, or set trainer.on_nonfinite=skip"
        if self.settings.on_nonfinite == "skip":
            advice = f"more than trainer.max_skipped={self.settings.max_skipped} updates were skipped"
        raise UserError(f"step {pending.step}: the {what} is not finite (query ids in {file}): {advice}")

    def _count(self, batch: HostBatch) -> None:
        self._seen += len(batch.query_ids)
        self._without_positive += batch.without_positive
        share = self._without_positive / self._seen
        if self._seen >= 100 and share > self.settings.max_share_without_positive:
            raise UserError(
                f"{self._without_positive} of {self._seen} training lists have no positive document, more than "
                f"trainer.max_share_without_positive={self.settings.max_share_without_positive}: check the qrels"
            )

    def _validation(self, step: int) -> dict[str, float]:
        assert self.validate is not None
        found = {f"validation/{k}": float(v) for k, v in self.validate(self._model(self._state), step).items()}
        self._trackers.log(step, found)
        self._meter.restart()
        return found

    def _save(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        data = {
            "iterator": self.batches.get_state(),
            "seen": self._seen,
            "without_positive": self._without_positive,
        }
        meta = {**self.record.meta, "identity": dict(self.record.identity), "step": step}
        self._checkpoints.save(self._state, data=data, meta=meta, write_files=self.record.write_files, metrics=metrics)
        if jax.default_backend() == "cpu":
            self._checkpoints.wait()  # the copy being written would share the memory of the next step
        self._meter.restart()

    def _model(self, state: TrainState) -> Any:
        return nnx.merge(self._graphdef, state.params)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """While training, SIGTERM and the first SIGINT only ask to stop."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, _: Any) -> None:
            if self._stop is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._stop = number

        previous = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
