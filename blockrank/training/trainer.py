"""The training loop: batches in, steps, validation, checkpoints and logs out; resumable to the bit."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh

from blockrank.config import differences
from blockrank.errors import UserError
from blockrank.hosts import first_request
from blockrank.parallel import list_part, spread_lists
from blockrank.paths import AnyPath
from blockrank.training.batches import HostBatch
from blockrank.training.checkpoint import Checkpoints, CheckpointSettings
from blockrank.training.health import Health
from blockrank.training.optimizer import (
    OptimizerSettings,
    Trainable,
    make_optimizer,
    master_weights,
    saved_params,
    with_saved,
)
from blockrank.training.profile import PROFILE_FOLDER, ProfiledSteps, Profiler
from blockrank.training.programs import StepPrograms
from blockrank.training.run_folder import RunFolder
from blockrank.training.settings import RunRecord, TrainerSettings, TrainResult
from blockrank.training.state import TrainState, place_new_state, split_model, state_shapes
from blockrank.training.step import LossFn, Metrics, ShareFn, Step, make_train_step
from blockrank.training.stopping import Stopped, StopSignals
from blockrank.training.telemetry import StepCosts, StepInFlight, Telemetry
from blockrank.training.tracking import METRICS_FILE, STEP, TrackerSettings, make_trackers, read_metrics
from blockrank.training.watchdog import Watchdog

log = logging.getLogger(__name__)


class Batches(Protocol):
    """An iterator of batches that knows its position. The state is JSON and valid for the same data only."""

    def __next__(self) -> HostBatch: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


Validate = Callable[[Any, int], Mapping[str, float]]
"""(model, step) -> metrics, named without the `validation/` prefix."""


@dataclass
class _Pending:
    step: int
    metrics: Metrics
    batch: HostBatch
    position: Any
    flight: StepInFlight


class Trainer:
    """Trains `model` on `batches`, writing into `folder`.

    Every `full_every`-th step minimises `loss_fn`, the steps between `between`'s, where given. `costs` tells the log
    what steps need; `profile` are steps to trace.

    With a `mesh`, the state is spread over it (`parallel.RULES`), lists over `data` and `fsdp`, their rows over `doc`;
    `batches` then holds this host's `list_part` of every batch. `model` may hold host arrays.

    `model`'s parameters are consumed (donated to the first step). SIGTERM and SIGINT end the run after
    the current step with a checkpoint, and a validation at once, which is made up for on resume; a second SIGINT stops
    at once.
    `signals`: what the caller has entered already, else the trainer listens for itself.
    """

    def __init__(
        self,
        folder: str | AnyPath | RunFolder,
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
        signals: StopSignals | None = None,
        costs: StepCosts | None = None,
        profile: ProfiledSteps | None = None,
    ):
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        self.batches, self.total_steps = batches, total_steps
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

        full = step_fn(loss_fn, share_fn)
        self._programs = StepPrograms(full_every, full, full if between is None else step_fn(*between))
        self._shapes = state_shapes(params, rule, trainable, mesh)
        self._create = partial(place_new_state, params, rule, trainable, mesh)
        self._own_signals = signals is None
        self._signals = signals or StopSignals()
        self._validation_due = False
        self._pending: _Pending | None = None
        self._health = Health(settings.on_nonfinite, settings.max_skipped, settings.max_share_without_positive)
        self._costs, self._profiler = costs, Profiler(profile, self.folder.local / PROFILE_FOLDER)
        if profile is not None and profile.first > total_steps:
            raise UserError(f"profile={profile}: the run has {total_steps} steps")

    def run(self) -> TrainResult:
        """Trains to the end, or to a signal. Raises `UserError` for a loss that is not finite or unusable data, and if
        the last step cannot be saved."""
        settings = self.settings
        watchdog = Watchdog(settings.watchdog_s, self.folder.local, exit=settings.watchdog_exit)
        devices = 1 if self.mesh is None else self.mesh.size // list_part(self.mesh)[1]
        self._telemetry = Telemetry(self.total_steps, devices, watchdog, self._costs)
        try:
            with self._signals if self._own_signals else nullcontext(), self._signals.noted():
                step, last = self._run()
        finally:
            self._telemetry.close()
        if step and step != last:
            known = "there is no checkpoint" if last is None else f"the last good checkpoint is of step {last}"
            raise UserError(
                f"step {step}, the last, is not saved in {self.folder.path}: {known}; see the warnings above"
            )
        interrupted = self._signals.requested is not None
        if interrupted and jax.process_index() == 0:
            print(f"stopped at step {step} of {self.total_steps}; resumable: run the same command again")
        return TrainResult(
            "interrupted" if interrupted else "finished",
            step,
            self._model(self._state),
            None if last is None else self._checkpoints.path(last),
            self.folder.local / METRICS_FILE,
        )

    def _run(self) -> tuple[int, int | None]:
        """The step that was reached, and the last that is saved."""
        self._checkpoints = Checkpoints(self.folder.checkpoints, self._checkpoint_settings)
        try:
            with self._telemetry.phase("restore"):
                resumed = self._restore()
                if resumed is None:
                    self._state = self._create()
            del self._create  # and with it the initial parameters
            self._trackers = make_trackers(
                self._tracker_settings,
                self.folder.local,
                self.record.meta,
                total_steps=self.total_steps,
                resume_step=resumed,
                display_every=self.settings.log_every,
            )
            try:
                step = self._loop(resumed or 0)
                with self._telemetry.phase("checkpoint"):
                    self._checkpoints.wait()
                self._report(step)
            finally:
                self._profiler.stop()
                self._trackers.close()
                self.folder.push()
            return step, self._checkpoints.latest
        finally:
            self._checkpoints.close()

    def _restore(self) -> int | None:
        latest = self._checkpoints.latest
        if latest is None:
            return None
        if not self.settings.resume:
            raise UserError(
                f"{self.folder.path} holds a run already (step {latest}): choose another output_dir, or resume"
            )
        saved = self._checkpoints.restore_json("meta", latest).get("identity", {})
        wanted = json.loads(json.dumps(self.record.identity))
        saved, wanted = ({k: v for k, v in each.items() if v is not None} for each in (saved, wanted))
        if saved != wanted:
            raise UserError(
                f"{self.folder.path} holds a run with another configuration ({differences(saved, wanted)}): "
                "choose another output_dir"
            )
        whole = self._shapes.params
        found, data = self._checkpoints.restore(replace(self._shapes, params=saved_params(whole)), latest)
        base = {} if saved_params(whole) is whole else self._create().params
        self._state = replace(found, params=with_saved(base, found.params))
        self.batches.set_state(data["iterator"])
        self._health.seen, self._health.without_positive = data["seen"], data["without_positive"]
        rows = read_metrics(self.folder.local / METRICS_FILE)
        validated = any(row[STEP] == latest and any(key.startswith("validation/") for key in row) for row in rows)
        self._validation_due = data["validation_due"] and self.validate is not None and not validated
        return latest

    def _loop(self, step: int) -> int:
        settings, every = self.settings, self._checkpoint_settings.every_steps
        if self._validation_due:
            self._validation(step)
        while step < self.total_steps and not self._stopped():
            position = self.batches.get_state()
            with self._telemetry.phase("data"):
                batch = next(self.batches, None)
            if batch is None:
                log.warning("the data ended at step %d of %d", step, self.total_steps)
                break
            self._health.count(batch)
            step = self._step(step, batch, position)
            done = step == self.total_steps
            if self.validate is not None and settings.validate_every and (done or step % settings.validate_every == 0):
                self._flush()
                self._save(step, self._validation(step))
            elif done or (every and step % every == 0):
                self._flush()
                self._save(step)
        self._flush()
        if step:
            self._save(step)
        return step

    def _stopped(self) -> bool:
        """Whether a signal asked this process, or any of several, to stop: all do after the same step."""
        stop = first_request(self._signals.requested)
        if stop is not None:
            self._signals.requested = stop
        return stop is not None

    def _step(self, step: int, batch: HostBatch, position: Any) -> int:
        """Gives the step after `step` to the devices, logs that step meanwhile, and returns the new one's number."""
        telemetry = self._telemetry
        with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            data = self._place(batch)
            program = self._programs.find(step, self._state, data, batch, telemetry, self._trackers.log)
            step += 1
            if self._profiler.begins(step):
                self._flush()
                self._profiler.start()
            given = time.perf_counter()
            with self._profiler.step(step):
                self._state, metrics = program.run(self._state, data)
        flight = telemetry.dispatched(given, metrics["loss"], batch, program.full, program.predicted)
        self._flush()
        self._pending = _Pending(step, metrics, batch, position, flight)
        if self._profiler.ends(step):
            self._flush()
            self._profiler.stop()
        return step

    def _place(self, batch: HostBatch) -> Any:
        if self.mesh is None:
            return jax.device_put(batch.data)
        return spread_lists(batch.data.split(self.mesh.shape["doc"]), self.mesh)

    def _report(self, step: int) -> None:
        """At the end of a run that made steps: where its time went, and predictions beside what was measured."""
        if self._telemetry.steps:
            values, text = self._telemetry.report()
            self._trackers.log(step, values)
            if jax.process_index() == 0:
                print(text)

    def _flush(self) -> None:
        """Logs the step before: fetching its numbers then costs no time, the next step already runs."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        metrics = {name: value.item() for name, value in jax.device_get(pending.metrics).items()}
        finite = metrics.pop("finite")
        values: dict[str, Any] = {f"train/{name}": value for name, value in metrics.items()}
        values |= self._telemetry.finished(pending.step, pending.batch, pending.flight)
        values["query_ids"] = list(pending.batch.query_ids)
        self._trackers.log(pending.step, values)
        if not finite:
            self._health.not_finite(self.folder.local, pending.step, pending.batch, pending.position, metrics)

    def _validation(self, step: int) -> dict[str, float] | None:
        """The metrics, or None when a signal ended the validation: then the next run begins with it."""
        assert self.validate is not None
        self._validation_due = True
        if self._signals.requested is not None:
            return None
        try:
            with self._signals.noted(False), self._telemetry.phase("validation"):
                found = self.validate(self._model(self._state), step)
        except Stopped:
            return None
        self._validation_due = False
        found = {f"validation/{k}": float(v) for k, v in found.items()}
        self._trackers.log(step, found)
        return found

    def _save(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        data = {
            "iterator": self.batches.get_state(),
            "seen": self._health.seen,
            "without_positive": self._health.without_positive,
            "validation_due": self._validation_due,
        }
        meta = {**self.record.meta, "identity": dict(self.record.identity), "step": step}
        with self._telemetry.phase("checkpoint"):
            files = self.record.write_files
            state = replace(self._state, params=saved_params(self._state.params))
            self._checkpoints.save(state, data=data, meta=meta, write_files=files, metrics=metrics)
            if jax.default_backend() == "cpu":
                self._checkpoints.wait()  # the copy being written would share the memory of the next step
            self.folder.push()

    def _model(self, state: TrainState) -> Any:
        return nnx.merge(self._graphdef, state.params)
