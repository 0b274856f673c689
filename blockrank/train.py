"""`python -m blockrank.train`: fine-tune a ranker, and measure it on held-out lists.

    python -m blockrank.train +exp=quickstart
    python -m blockrank.train +exp=msmarco dry_run=true

The output folder holds `checkpoints/`, `metrics.jsonl`, `curves.png` and, with `test`, `evaluation/` and `table.md`.
The same command continues an interrupted run. `output_dir` may be in an object store (`gs://bucket/run`).

Exit status: 0 when the run is finished; `trainer.exit_code_when_stopped` (0 too, unless set) after SIGTERM or Ctrl-C,
with "resumable" on the output; 2 for what the user can mend (bad input, a damaged checkpoint, a full disk).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from blockrank.config import entry, to_plain
from blockrank.costs.prediction import TrainingCosts
from blockrank.data.collection import Collection
from blockrank.data.loader import training_iterator
from blockrank.data.sampling import TrainingLists
from blockrank.errors import UserError
from blockrank.evaluation.evaluator import Evaluator
from blockrank.evaluation.files import git_commit, versions
from blockrank.evaluation.held_out import FIRST_STAGE, HeldOut
from blockrank.evaluation.metrics import parse_measure
from blockrank.hosts import agree, joined, leave_at_exit
from blockrank.layout import LayoutShape
from blockrank.losses import Objective
from blockrank.models.decoder import Decoder
from blockrank.models.loading import weights_fingerprint
from blockrank.parallel import host_memory, list_part, open_mesh
from blockrank.prompts.encode import PromptEncoder
from blockrank.prompts.template import PromptTemplate
from blockrank.rankers.attention import AttentionRanker
from blockrank.rankers.probe import check_language
from blockrank.retrieval.lists import ListsConfig, open_lists, select_queries
from blockrank.training.adapters import AdapterRecord, starting_model
from blockrank.training.batches import BatchEncoder
from blockrank.training.curves import plot_curves
from blockrank.training.dry_run import dry_run
from blockrank.training.host_batches import HostBatches
from blockrank.training.initial import check_vocabulary
from blockrank.training.optimizer import Trainable
from blockrank.training.recipe import HeldOutConfig, TrainConfig, TrainingListsConfig
from blockrank.training.run_folder import RunFolder
from blockrank.training.settings import RunRecord, TrainResult
from blockrank.training.state import count_parameters, split_model
from blockrank.training.step import ranking_loss_fn, ranking_share_fn
from blockrank.training.stopping import Stopped, StopSignals
from blockrank.training.tracking import metric_name
from blockrank.training.trainer import Trainer

log = logging.getLogger(__name__)

SHAPE_SAMPLE = 64
"""Training lists read to choose the layout that batches are padded to."""


@entry("train", TrainConfig)
def main(config: TrainConfig) -> int:
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs tracebacks of errors that are told in a line
    if config.dry_run:
        check_measures(config)
        Console(soft_wrap=True, highlight=False).print(dry_run(config), markup=False)
        return 0
    with joined(config.distributed), StopSignals() as signals:
        try:
            result = train(config, Console(soft_wrap=True, highlight=False, quiet=jax.process_index() != 0), signals)
        except Stopped:
            print("stopped outside of training steps; resumable: run the same command again")
            leave_at_exit(config.trainer.exit_code_when_stopped)
            return config.trainer.exit_code_when_stopped
    return 0 if result.status == "finished" else config.trainer.exit_code_when_stopped


def train(config: TrainConfig, console: Console, signals: StopSignals | None = None) -> TrainResult:
    """Trains, draws the curves, and with `config.test` measures first stage, initial and trained model."""
    check_measures(config)
    check_hosts(config)
    mesh = open_mesh(config.mesh)
    decoder = config.model.decoder_config()
    if mesh is not None:
        config.check_mesh(mesh)
    layer = config.ranker.layer_of(decoder)
    config = replace(config, ranker=replace(config.ranker, score_layer=layer))
    tokenizer = config.model.load_tokenizer()
    check_vocabulary(decoder, tokenizer)
    template = PromptTemplate.from_config(config.prompt, "prompt")
    encoder = PromptEncoder(template, tokenizer, config.limits)
    collection = config.data.open()
    lists = training_lists(collection, config.lists)
    batches = BatchEncoder(encoder, config.ranker, config.lists.sampling.min_grade)
    sample = np.linspace(0, len(lists) - 1, min(SHAPE_SAMPLE, len(lists))).astype(int)
    draw = partial(lists.sample, num_candidates=config.lists.num_candidates, seed=config.seed)
    batches = batches.fitted(draw(int(index), 0) for index in sample)
    settings = config.trainer
    part, parts = list_part(mesh)
    iterator = training_iterator(
        lists,
        shard_index=part,
        shard_count=parts,
        num_candidates=config.lists.num_candidates,
        batch_size=settings.batch_size,
        seed=config.seed,
        num_epochs=None if settings.total_steps else settings.num_epochs,
        transform=batches,
    )
    total_steps = settings.total_steps or iterator.num_steps
    assert total_steps is not None
    several = jax.process_count() > 1
    if several:
        agree("what training lists are drawn from", lists.fingerprint)
        agree("the configuration", json.dumps([_identity(config, encoder), total_steps, to_plain(batches.shape)]))
    with host_memory() if mesh is not None else nullcontext():
        model, adapters = starting_model(config.model, config.optimizer.lora, config.seed)
    if model.config != decoder:
        raise UserError("model.config differs from the config of the weights at model.path")
    if config.model.kind == "pretrained":
        check_language(model, tokenizer)
    params = jax.eval_shape(lambda: split_model(model)[1])
    trainable = jax.eval_shape(Trainable.of(params, config.optimizer).take, params)
    console.print(
        f"{count_parameters(params):,} parameters, {count_parameters(trainable):,} trainable, score layer {layer}; "
        f"{len(lists):,} training lists of {config.lists.num_candidates}; {total_steps} steps of {settings.batch_size}"
    )
    folder = RunFolder(config.output_dir)
    ranker = AttentionRanker(model, encoder, config.ranker, mesh=None if several else mesh)
    if batches.shape is not None:
        ranker.reader.note_positions(config.ranker.positions(batches.shape))
    held_out = (
        None if config.test is None else HeldOut(collection, config.test, folder.local / "evaluation", config.seed)
    )
    if held_out is not None:
        held_out.measure_first_stage({"data": to_plain(config.data), **held_out.config.identity()})
        held_out.measure("untrained", ranker, _scores_identity(config, held_out, ranker))
    objective = config.objective(layer)
    attention_only = replace(objective, ntp_weight=0.0) if config.loss.ntp_every > 1 else objective
    trainer = Trainer(
        folder,
        model,
        HostBatches(iterator, part) if several else iterator,
        ranking_loss_fn(objective),
        share_fn=ranking_share_fn(objective),
        full_every=config.loss.ntp_every,
        between=(ranking_loss_fn(attention_only), ranking_share_fn(attention_only)),
        total_steps=total_steps,
        optimizer=config.optimizer,
        settings=settings,
        checkpoints=config.checkpoints,
        tracker=config.tracker,
        validate=_validation(collection, config, ranker),
        record=_record(config, encoder, model, batches.shape, total_steps, adapters),
        mesh=mesh,
        signals=signals,
        costs=_costs(config, model, objective, attention_only),
        profile=config.profiled_steps(),
    )
    result = trainer.run()
    plot = plot_curves(result.metrics, folder.local / "curves.png") if jax.process_index() == 0 else None
    if held_out is not None and result.status == "finished":
        ranker.set_model(result.model)
        held_out.measure("trained", ranker, _scores_identity(config, held_out, ranker))
        console.print(held_out.write_table(folder.local / "table.md", FIRST_STAGE), markup=False)
    folder.push()
    shown = {"metrics": result.metrics, "curves": plot}
    if held_out is not None and result.status == "finished":
        shown |= {f"run ({name})": path for name, path in held_out.runs.items()}
    console.print(f"checkpoint: {result.checkpoint}", markup=False)
    for name, path in shown.items():
        if path is not None:
            console.print(f"{name}: {folder.place(path)}", markup=False)
    return result


def check_measures(config: TrainConfig) -> None:
    """Before anything is loaded: measures exist, and the best checkpoint goes by one that validation will produce.

    Raises `UserError` naming the key.
    """
    found: dict[str, list[str]] = {}
    for section in ("validation", "test"):
        settings: HeldOutConfig | None = getattr(config, section)
        try:
            found[section] = [str(parse_measure(name)) for name in settings.measures] if settings else []
        except UserError as error:
            raise UserError(f"config key {section}.measures: {error}") from error
    every, best = config.trainer.validate_every, config.checkpoints.best_metric
    if every and config.validation is None:
        raise UserError(f"config key trainer.validate_every: {every}, but there is no validation to run: set its lists")
    produced = [f"validation/{metric_name(name)}" for name in found["validation"]]
    if every and config.checkpoints.keep_best and best not in produced:
        raise UserError(
            f"config key checkpoints.best_metric: {best!r} is not what validation.measures give: {', '.join(produced)}"
        )


def check_hosts(config: TrainConfig) -> None:
    """Raises `UserError` for what one process alone can do, where there are several."""
    settings = {"validation": config.trainer.validate_every and config.validation, "test": config.test}
    if jax.process_count() > 1 and any(settings.values()):
        key = " and ".join(name for name, value in settings.items() if value)
        raise UserError(
            f"config key {key}: lists are ranked by one process, and here are {jax.process_count()}: set test=null "
            "trainer.validate_every=0, and measure the run afterwards: python -m blockrank.eval "
            f"checkpoint={config.output_dir}"
        )


def training_lists(collection: Collection, config: TrainingListsConfig) -> TrainingLists:
    """The training lists of a collection; `max_queries` keeps a fixed subset of the queries."""
    lists = open_lists(collection, ListsConfig(config.split, config.candidates, config.depth))
    return TrainingLists(select_queries(lists, config.max_queries), config.sampling)


def _validation(
    collection: Collection, config: TrainConfig, ranker: AttentionRanker
) -> Callable[[Any, int], dict[str, float]] | None:
    if config.validation is None:
        return None
    settings = config.validation
    lists = select_queries(open_lists(collection, settings), settings.max_queries)

    def validate(model: Decoder, step: int) -> dict[str, float]:
        del step
        ranker.set_model(model)
        evaluator = Evaluator(ranker, lists, None, settings.batch_size, measures=settings.measures, progress=False)
        return {metric_name(name): value for name, value in evaluator.run().means.items()}

    return validate


def _costs(config: TrainConfig, model: Decoder, objective: Objective, between: Objective) -> TrainingCosts:
    params = split_model(model)[1]
    return TrainingCosts.of(model.config, params, Trainable.of(params, config.optimizer), objective, between)


def _scores_identity(config: TrainConfig, held_out: HeldOut, ranker: AttentionRanker) -> dict[str, Any]:
    return {
        "data": to_plain(config.data),
        **held_out.config.identity(),
        "ranker": to_plain(config.ranker),
        "prompt": ranker.encoder.fingerprint,
        "weights": weights_fingerprint(ranker.model),
    }


def _identity(config: TrainConfig, encoder: PromptEncoder) -> dict[str, Any]:
    return {**config.identity(), "prompt": encoder.fingerprint}


def _record(
    config: TrainConfig,
    encoder: PromptEncoder,
    model: Decoder,
    shape: LayoutShape | None,
    total_steps: int,
    adapters: AdapterRecord | None = None,
) -> RunRecord:
    tokenizer, template = encoder.tokenizer, encoder.template

    def write_files(folder: Path) -> None:
        template.save(folder)
        tokenizer.save(folder)

    meta = {
        "model": to_plain(model.config),
        "config": to_plain(config),
        "git_commit": git_commit(),
        "versions": versions(),
        **({} if adapters is None else {"lora": to_plain(adapters)}),
    }
    identity = {**_identity(config, encoder), "total_steps": total_steps, "shape": to_plain(shape)}
    if adapters is not None:
        identity["base_weights"] = adapters.fingerprint
    return RunRecord(identity, meta, write_files)


if __name__ == "__main__":
    main()
