"""Checkpoints of a training run: parameters, optimiser, data position, config, template and tokenizer, by step.

Orbax writes asynchronously into a temporary folder and renames it when everything is on disk, so a step that exists is
whole. Restoring compares the saved tree with the wanted one, path by path, before it reads an array.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import preservation_policy

from blockrank.config import build
from blockrank.errors import UserError, at_least
from blockrank.models.config import DecoderConfig
from blockrank.models.decoder import Decoder
from blockrank.models.loading import abstract_decoder
from blockrank.prompts.template import TEMPLATE_FILE, PromptTemplate
from blockrank.prompts.tokenizer import Tokenizer, load_tokenizer
from blockrank.training.optimizer import path_name
from blockrank.training.state import TrainState, split_model

FOLDER = "checkpoints"
"""The folder of steps inside a run's output folder."""


@dataclass(frozen=True)
class CheckpointSettings:
    """Save every `every_steps` (0: never) and at the end; keep `keep_last`, and `keep_best` by `best_metric`."""

    every_steps: int = 100
    keep_last: int = 2
    keep_best: int = 1
    best_metric: str = "validation/ndcg_at_10"
    best_mode: Literal["max", "min"] = "max"

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
            args.write(Path(directory))

    def restore(self, directory: epath.Path, args: FilesRestore | None = None) -> Path:
        del args
        return Path(directory)


ocp.args.register_with_handler(FilesHandler, for_save=True)(FilesSave)
ocp.args.register_with_handler(FilesHandler, for_restore=True)(FilesRestore)


class Checkpoints:
    """The checkpoints under one folder. `read_only` never writes, deletes or creates anything."""

    def __init__(self, folder: str | Path, settings: CheckpointSettings | None = None, *, read_only: bool = False):
        self.folder = Path(folder).absolute()
        if read_only and not self.folder.is_dir():
            raise UserError(f"no checkpoints at {self.folder}")
        settings = settings or CheckpointSettings()
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
            best_fn=quality,
            best_mode=settings.best_mode,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
        )
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=options,
            item_handlers={
                "params": ocp.StandardCheckpointHandler(),
                "optimizer": ocp.StandardCheckpointHandler(),
                "data": ocp.JsonCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
                "files": FilesHandler(),
            },
        )

    @property
    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        return sorted(self._manager.all_steps())

    @property
    def latest(self) -> int | None:
        return self._manager.latest_step()

    def path(self, step: int) -> Path:
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
        """
        step = int(state.step)
        if step in self.steps:
            return step
        optimizer = {"skipped": state.skipped, "state": to_nested(state.optimizer_state)}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                optimizer=ocp.args.StandardSave(optimizer),
                data=ocp.args.JsonSave(dict(data)),
                meta=ocp.args.JsonSave(dict(meta)),
                files=FilesSave(write_files or _no_files),
            ),
            metrics=dict(metrics) if metrics else None,
            force=True,
        )
        return step

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """The state saved at `step` (default: the latest) and its `data`. `like` is concrete or abstract.

        Leaves take the sharding of `like`, or the first device, whatever devices wrote them. Raises `UserError` if
        trees, shapes or dtypes differ (with the paths), if the checkpoint is damaged, or if there is none.
        """
        step = self._chosen(step)
        optimizer = {"skipped": like.skipped, "state": to_nested(like.optimizer_state)}
        params = self.restore_params(like.params, step)
        saved = self._read(step, "optimizer", optimizer)
        state = from_nested(saved["state"], like.optimizer_state)
        count = jax.device_put(jnp.asarray(step, jnp.int32), _sharding(like.step))
        return TrainState(count, saved["skipped"], params, state), self.restore_json("data", step)

    def restore_params(self, like: Any, step: int | None = None, *, as_saved: bool = False) -> Any:
        """The parameters alone, as `restore` does it; `as_saved`: in the dtypes they were saved in."""
        step = self._chosen(step)
        if as_saved:
            saved = jax.tree_util.tree_leaves_with_path(self._saved(step, "params"))
            dtypes = {path_name(path): leaf.dtype for path, leaf in saved}
            like = jax.tree_util.tree_map_with_path(
                lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(path_name(path), leaf.dtype)), like
            )
        return self._read(step, "params", like)

    def restore_json(self, item: Literal["data", "meta"], step: int | None = None) -> dict[str, Any]:
        step = self._chosen(step)
        args = ocp.args.Composite(**{item: ocp.args.JsonRestore()})
        return self._guarded(step, lambda: self._manager.restore(step, args=args)[item])

    def files(self, step: int | None = None) -> Path:
        """The folder with the files written at `step`."""
        return self.path(self._chosen(step)) / "files"

    def wait(self) -> None:
        """Until every save that was started is committed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def _chosen(self, step: int | None) -> int:
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
        saved = self._guarded(step, lambda: self._manager.item_metadata(step)[item])
        if saved is None:
            raise self._damaged(step, f"its {item} are missing")
        return saved

    def _read(self, step: int, item: str, like: Any) -> Any:
        compare_trees(self._saved(step, item), like, f"{self.path(step)} ({item})")
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x)), like)
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)})
        return self._guarded(step, lambda: self._manager.restore(step, args=args)[item])

    def _guarded(self, step: int, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise self._damaged(step, str(error).splitlines()[0] if str(error) else type(error).__name__) from error

    def _damaged(self, step: int, reason: str) -> UserError:
        earlier = [s for s in self.steps if s < step]
        advice = f"use the one before, {self.path(earlier[-1])}" if earlier else "there is no earlier one"
        return UserError(f"checkpoint {self.path(step)} is damaged ({reason}): delete that folder; {advice}")


def _no_files(folder: Path) -> None:
    del folder


def _sharding(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return sharding if sharding is not None else SingleDeviceSharding(jax.devices()[0])


def to_nested(tree: Any) -> dict[str, Any]:
    """Any pytree (named tuples, masked nodes) as nested dicts of its leaves, the same for every optax version."""
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, last = [path_name((key,)) for key in path] or ["value"]
        inner = nested
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return nested


def from_nested(nested: Mapping[str, Any], like: Any) -> Any:
    """The inverse of `to_nested`, in the structure of `like`."""
    leaves = []
    for path, _ in jax.tree_util.tree_leaves_with_path(like):
        inner: Any = nested
        for name in [path_name((key,)) for key in path] or ["value"]:
            inner = inner[name]
        leaves.append(inner)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def compare_trees(saved: Any, wanted: Any, source: str) -> None:
    """Raises `UserError` unless both trees have the same paths, shapes and dtypes; lists what is missing or differs."""

    def describe(tree: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {path_name(path): f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}" for path, leaf in leaves}

    have, want = describe(saved), describe(wanted)
    problems = (
        [f"missing {name} {want[name]}" for name in want if name not in have],
        [f"extra {name} {have[name]}" for name in have if name not in want],
        [f"{n} is {have[n]}, wanted {want[n]}" for n in want if n in have and have[n] != want[n]],
    )
    if any(problems):
        shown = [kind[:4] + ([f"and {len(kind) - 4} more"] if len(kind) > 4 else []) for kind in problems]
        text = "; ".join(part for kind in shown for part in kind)
        raise UserError(f"checkpoint {source} does not fit the model or optimiser: {text}")


def locate(path: str | Path) -> tuple[Path, int | None]:
    """The folder of steps and the step that `path` means: a run folder, its `checkpoints`, or one step in it."""
    path = Path(path).expanduser().absolute()
    if path.name.isdigit() and (path / "params").exists():
        return path.parent, int(path.name)
    for folder in (path / FOLDER, path):
        if folder.is_dir() and any(child.name.isdigit() for child in folder.iterdir()):
            return folder, None
    if path.name.isdigit() and path.parent.is_dir():
        known = sorted(int(child.name) for child in path.parent.iterdir() if child.name.isdigit())
        raise UserError(f"no checkpoint at {path}; steps there: {', '.join(map(str, known)) or 'none'}")
    raise UserError(f"no checkpoint at {path}: give a run folder, its {FOLDER} folder, or one step folder")


@dataclass(frozen=True)
class CheckpointModel:
    """A model as a checkpoint holds it, with the prompt it was trained on."""

    model: Decoder
    template: PromptTemplate
    tokenizer: Tokenizer
    meta: dict[str, Any]
    path: Path


def load_checkpoint_model(
    path: str | Path, *, dtype: jax.typing.DTypeLike = "float32", param_dtype: jax.typing.DTypeLike | None = None
) -> CheckpointModel:
    """The model of a run folder (its newest step), or of one step folder. Optimiser state is not read.

    `dtype` is the type of activations, `param_dtype` that of parameters (as saved if None). `meta["config"]` holds the
    training configuration. Raises `UserError` as `Checkpoints.restore` does.
    """
    folder, step = locate(path)
    checkpoints = Checkpoints(folder, read_only=True)
    try:
        step = checkpoints.latest if step is None else step
        meta = checkpoints.restore_json("meta", step)
        config = build(DecoderConfig, meta["model"], "model")
        graphdef, params = split_model(abstract_decoder(config, jnp.dtype(dtype)))
        params = checkpoints.restore_params(params, step, as_saved=True)
        if param_dtype is not None:
            params = jax.tree.map(lambda p: p.astype(param_dtype), params)
        files = checkpoints.files(step)
        return CheckpointModel(
            nnx.merge(graphdef, params),
            PromptTemplate.from_yaml(files / TEMPLATE_FILE),
            load_tokenizer(files),
            meta,
            files.parent,
        )
    finally:
        checkpoints.close()
