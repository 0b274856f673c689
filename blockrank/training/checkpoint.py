"""Checkpoints of a training run: parameters, optimiser, data position, config, template and tokenizer, by step.

Orbax writes asynchronously into a temporary folder and renames it when everything is on disk, so a step that exists is
whole. Restoring compares the saved tree with the wanted one, path by path, before it reads an array, and everything
read with its checksum.
"""

from __future__ import annotations

import json
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import preservation_policy

from blockrank.errors import UserError, at_least
from blockrank.paths import AnyPath, as_path, fetched, staged
from blockrank.training.integrity import check_files, check_sums, checksums, reason_of, seal, unseal, write_sums
from blockrank.training.optimizer import path_name
from blockrank.training.state import TrainState
from blockrank.training.trees import compare_trees, from_nested, to_nested

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
"""The folder of steps inside a run's output folder."""


@dataclass(frozen=True)
class CheckpointSettings:
    """Save every `every_steps` (0: never) and at the end; keep `keep_last`, and `keep_best` by `best_metric`.

    `on_error`: a save that fails (a full disk) ends the run, or is a warning and training goes on to the next save.
    """

    every_steps: int = 100
    keep_last: int = 2
    keep_best: int = 1
    best_metric: str = "validation/ndcg_at_10"
    best_mode: Literal["max", "min"] = "max"
    on_error: Literal["stop", "continue"] = "stop"

    def __post_init__(self) -> None:
        at_least(self, 1, "keep_last")
        at_least(self, 0, "every_steps", "keep_best")


@dataclass
class FilesSave(ocp.args.CheckpointArgs):
    """Files to keep with a step: `write(folder)` writes them."""

    write: Callable[[Path], None]


@dataclass
class FilesRestore(ocp.args.CheckpointArgs):
    """Asks for the folder the files are in."""


class FilesHandler(ocp.CheckpointHandler):
    """An Orbax item that is a folder of plain files (prompt template, tokenizer), committed with its step."""

    def save(self, directory: epath.Path, args: FilesSave) -> None:
        if jax.process_index() == 0:
            with staged(as_path(directory)) as folder:
                args.write(folder)
                write_sums(folder)

    def restore(self, directory: epath.Path, args: FilesRestore | None = None) -> AnyPath:
        del args
        return as_path(directory)


ocp.args.register_with_handler(FilesHandler, for_save=True)(FilesSave)
ocp.args.register_with_handler(FilesHandler, for_restore=True)(FilesRestore)


class Checkpoints:
    """The checkpoints under one folder. `read_only` never writes, deletes or creates anything."""

    def __init__(self, folder: str | AnyPath, settings: CheckpointSettings | None = None, *, read_only: bool = False):
        self.folder = as_path(folder)
        if read_only and not self.folder.is_dir():
            raise UserError(f"no checkpoints at {self.folder}")
        self._settings, self._read_only = settings or CheckpointSettings(), read_only
        self._saving: int | None = None
        self._failed: set[int] = set()
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        settings, read_only = self._settings, self._read_only
        policies: list[Any] = [preservation_policy.LatestN(max(settings.keep_last, 1))]
        worst = float("-inf") if settings.best_mode == "max" else float("inf")

        def quality(metrics: Mapping[str, float]) -> float:
            return metrics.get(settings.best_metric, worst)

        if settings.keep_best:
            policies.append(
                preservation_policy.BestN(
                    get_metric_fn=quality,
                    reverse=settings.best_mode == "min",
                    n=settings.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=None if read_only else preservation_policy.AnyPreservationPolicy(policies),
            best_fn=None if read_only else quality,
            best_mode=settings.best_mode,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
        )
        handlers = {
            "params": ocp.StandardCheckpointHandler(),
            "optimizer": ocp.StandardCheckpointHandler(),
            "data": ocp.JsonCheckpointHandler(),
            "meta": ocp.JsonCheckpointHandler(),
            "checksums": ocp.JsonCheckpointHandler(),
            "files": FilesHandler(),
        }
        try:
            return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"the checkpoints at {self.folder} cannot be opened ({reason_of(error)}){self._damaged_metrics()}"
            ) from error

    def _damaged_metrics(self) -> str:
        """Which step has metrics, read for all steps at once, that are not JSON; nothing if none."""
        for folder in self.folder.iterdir():
            file = folder / "metrics" / "metrics"
            try:
                if file.is_file():
                    json.loads(file.read_text())
            except (OSError, ValueError):
                return f": {file} is damaged, delete {folder}; then the same command continues from the step before"
        return ""

    @property
    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        return sorted(self._manager.all_steps())

    @property
    def latest(self) -> int | None:
        return self._manager.latest_step()

    def path(self, step: int) -> AnyPath:
        return self.folder / str(step)

    def save(
        self,
        state: TrainState,
        *,
        data: Mapping[str, Any],
        meta: Mapping[str, Any],
        write_files: Callable[[Path], None] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> int:
        """Start saving `state` under its step; returns once the arrays are copied and training may go on.

        `data` (position of the data iterator) and `meta` (config, versions) are JSON. Saving a step twice does nothing.
        If this save fails, or the one before it that was still being written, what is half written is removed, the
        steps that were there stay, and `on_error` says whether that is a `UserError` or a warning.
        """
        self.wait()
        self._remove_unfinished()
        step = int(state.step)
        if step in self.steps:
            return step
        optimizer = {"skipped": state.skipped, "state": to_nested(state.optimizer_state)}
        sums = {"params": checksums(state.params), "optimizer": checksums(optimizer)}
        with self._failures(step):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    optimizer=ocp.args.StandardSave(optimizer),
                    data=ocp.args.JsonSave(seal(data)),
                    meta=ocp.args.JsonSave(seal(meta)),
                    checksums=ocp.args.JsonSave(seal(sums)),
                    files=FilesSave(write_files or _no_files),
                ),
                metrics=dict(metrics) if metrics else None,
                force=True,
            )
            self._saving = step
        return step

    @contextmanager
    def _failures(self, step: int | None) -> Iterator[None]:
        """Sweeps up after a save of `step` that failed, and tells of it as the settings say."""
        try:
            yield
        except Exception as error:
            self._saving = None
            _release(error)
            with suppress(Exception):
                self._manager.close()  # raises the same error again
            if step is not None:
                self._failed.add(step)
            self._remove_unfinished()
            self._manager = self._open()
            last = self.latest
            kept = f"the last good checkpoint is {self.path(last)}" if last is not None else "there is none before it"
            text = f"step {step} was not saved in {self.folder} ({reason_of(error)}); {kept}"
            if self._settings.on_error == "continue":
                log.warning("%s; training goes on (checkpoints.on_error=continue)", text)
                return
            raise UserError(
                f"{text}: make room and run the same command again, or set checkpoints.on_error=continue"
            ) from error

    def _remove_unfinished(self) -> None:
        """The folders of saves that failed: under a temporary name, or on object stores under their own.

        Writers that had begun are not waited for by Orbax, and may make such a folder again."""
        if jax.process_index() != 0 or not self._failed:
            return
        for folder in map(epath.Path, self.folder.iterdir()):
            step = folder.name.partition(ocp.utils.TMP_DIR_SUFFIX)[0]
            if step.isdigit() and int(step) in self._failed and not ocp.utils.is_checkpoint_finalized(folder):
                with suppress(OSError):
                    folder.rmtree()

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """The state saved at `step` (default: the latest) and its `data`. `like` is concrete or abstract.

        Leaves take the sharding of `like`, or the first device, whatever devices wrote them. Raises `UserError` if
        trees, shapes or dtypes differ (with the paths), if the checkpoint is damaged, or if there is none.
        """
        step = self.chosen(step)
        optimizer = {"skipped": like.skipped, "state": to_nested(like.optimizer_state)}
        params = self.restore_params(like.params, step)
        saved = self._read(step, "optimizer", optimizer)
        state = from_nested(saved["state"], like.optimizer_state)
        count = jax.device_put(jnp.asarray(step, jnp.int32), _sharding(like.step))
        return TrainState(count, saved["skipped"], params, state), self.restore_json("data", step)

    def restore_params(self, like: Any, step: int | None = None, *, as_saved: bool = False) -> Any:
        """The parameters alone, as `restore` does it; `as_saved`: in the dtypes they were saved in."""
        step = self.chosen(step)
        if as_saved:
            saved = jax.tree_util.tree_leaves_with_path(self._saved(step, "params"))
            dtypes = {path_name(path): leaf.dtype for path, leaf in saved}
            like = jax.tree_util.tree_map_with_path(
                lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(path_name(path), leaf.dtype)), like
            )
        return self._read(step, "params", like)

    def restore_json(self, item: Literal["data", "meta"], step: int | None = None) -> dict[str, Any]:
        step = self.chosen(step)
        return self._read_json(step, item)

    @contextmanager
    def files(self, step: int | None = None) -> Iterator[Path]:
        """A local folder with the files written at `step`."""
        step = self.chosen(step)
        with fetched(self.path(step) / "files") as folder:
            self._guarded(step, "files", lambda: check_files(folder))
            yield folder

    def wait(self) -> None:
        """Until the save that was started is committed. A save that failed is told as `save` does."""
        with self._failures(self._saving):
            self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()
        self._remove_unfinished()

    def chosen(self, step: int | None) -> int:
        """`step`, or the latest if None. Raises `UserError` if it is not there."""
        steps = self.steps
        if step is None and steps:
            return steps[-1]
        if step is None or step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise UserError(
                f"no checkpoint {'' if step is None else f'of step {step} '}at {self.folder} (has: {known})"
            )
        return step

    def _saved(self, step: int, item: str) -> Any:
        """Shapes and dtypes of what is saved."""
        saved = self._guarded(step, item, lambda: self._manager.item_metadata(step)[item])
        if saved is None:
            raise self._damaged(step, item, "missing")
        return saved

    def _read(self, step: int, item: str, like: Any) -> Any:
        sums = self._read_json(step, "checksums")[item]
        compare_trees(self._saved(step, item), like, f"{self.path(step)} ({item})")
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x)), like)
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)})
        found = self._guarded(step, item, lambda: self._manager.restore(step, args=args)[item])
        self._guarded(step, item, lambda: check_sums(found, sums))
        return found

    def _read_json(self, step: int, item: str) -> dict[str, Any]:
        args = ocp.args.Composite(**{item: ocp.args.JsonRestore()})
        return self._guarded(step, item, lambda: unseal(self._manager.restore(step, args=args)[item]))

    def _guarded(self, step: int, item: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:  # what Orbax and TensorStore raise for damaged files has no type of its own
            raise self._damaged(step, item, reason_of(error)) from error

    def _damaged(self, step: int, item: str, reason: str) -> UserError:
        earlier = [s for s in self.steps if s < step]
        advice = f"use the one before, {self.path(earlier[-1])}" if earlier else "there is no earlier one"
        return UserError(
            f"checkpoint {self.path(step)} is damaged ({item}: {reason}): delete that folder; {advice}"
            + (", from which the same command then continues" if earlier else "")
        )


def _release(error: BaseException) -> None:
    """Drops what the frames of `error` hold: among it coroutines that Orbax made and will not run, with no warning."""
    chain: BaseException | None = error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        while chain is not None:
            traceback.clear_frames(chain.__traceback__)
            chain = chain.__cause__ or chain.__context__


def _no_files(folder: Path) -> None:
    del folder


def _sharding(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return sharding if sharding is not None else SingleDeviceSharding(jax.devices()[0])
