"""Runs in an object store: the same files, steps and scores as in a local folder."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from remote_helpers import install
from survival_helpers import small_batch
from survival_helpers import small_trainer as trainer
from test_checkpoint import save, tiny_state
from training_helpers import CountedBatches, tiny_model

from blockrank.config import build, compose, to_plain
from blockrank.errors import UserError
from blockrank.models.gguf import embedded_model_path
from blockrank.paths import as_path, copy_tree, local_path
from blockrank.prompts.template import PromptTemplate
from blockrank.prompts.tokenizer import load_tokenizer
from blockrank.sources import open_source
from blockrank.training.checkpoint import Checkpoints
from blockrank.training.export import export_hf
from blockrank.training.recipe import TrainConfig
from blockrank.training.saved_model import load_checkpoint_model, locate
from blockrank.training.tracking import read_metrics


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKRANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield install(monkeypatch, tmp_path / "store").root
    assert not (tmp_path / "gs:").exists()


def test_a_remote_path_is_kept_as_it_is_and_other_schemes_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(as_path("gs://bucket/a/b")) == "gs://bucket/a/b"
    assert str(as_path(Path("gs://bucket/a"))) == "gs://bucket/a"  # what pathlib makes of it is mended
    assert str(as_path(epath.Path("gs://bucket/a") / "b")) == "gs://bucket/a/b"
    assert as_path("a") == tmp_path / "a"
    with pytest.raises(UserError, match="gcs://bucket/a: no such scheme; a remote path begins with gs://"):
        as_path("gcs://bucket/a")
    with pytest.raises(UserError, match="name a bucket"):
        as_path("gs://")
    with pytest.raises(UserError, match="a local path is needed"):
        local_path("gs://bucket/a")


def test_a_config_keeps_a_remote_output_dir_and_refuses_one_where_files_are_read_locally():
    config = build(TrainConfig, compose("train", ["output_dir=gs://bucket/run"]))
    assert str(config.output_dir) == to_plain(config)["output_dir"] == "gs://bucket/run"
    with pytest.raises(UserError, match=r"config key data\.path: gs://.* a local path is needed"):
        build(TrainConfig, compose("train", ["data=beir_folder", "data.path=gs://bucket/beir"]))


def test_a_remote_run_stops_resumes_and_equals_a_local_one(tmp_path, store):
    class StopAt(CountedBatches):
        def __next__(self):
            batch = super().__next__()
            if self.next == 3:
                signal.raise_signal(signal.SIGTERM)
            return batch

    trainer(tmp_path / "whole").run()
    stopped = trainer("gs://bucket/run", batches=StopAt(small_batch)).run()
    assert str(stopped.checkpoint) == "gs://bucket/run/checkpoints/3"
    logged = read_metrics(store / "bucket" / "run" / "metrics.jsonl")
    assert [row["step"] for row in logged if "train/loss" in row] == [1, 2, 3]
    trainer("gs://bucket/run").run()
    remote, local = (
        [(row["step"], row["train/loss"]) for row in read_metrics(run / "metrics.jsonl") if "train/loss" in row]
        for run in (store / "bucket" / "run", tmp_path / "whole")
    )
    assert remote == local
    assert Checkpoints("gs://bucket/run/checkpoints", read_only=True).steps == [4, 6]


def test_a_remote_checkpoint_loads_and_is_exported(store):
    template, tokenizer = PromptTemplate.from_yaml("paper"), load_tokenizer(embedded_model_path())

    def write_files(folder: Path) -> None:
        template.save(folder)
        tokenizer.save(folder)

    save(as_path("gs://bucket/run/checkpoints"), tiny_state(step=5, seed=3), write_files=write_files)
    folder, step = locate("gs://bucket/run")
    assert (str(folder), step) == ("gs://bucket/run/checkpoints", None)
    assert locate("gs://bucket/run/checkpoints/5")[1] == 5
    tokens = np.arange(12).reshape(2, 6)
    wanted = tiny_model(seed=3).logits(tokens)
    loaded = load_checkpoint_model("gs://bucket/run")
    assert loaded.template.fingerprint == template.fingerprint
    np.testing.assert_array_equal(loaded.model.logits(tokens), wanted)
    assert str(export_hf("gs://bucket/run", "gs://bucket/exported")) == "gs://bucket/exported"
    with pytest.raises(UserError, match="gs://bucket/exported: exists already"):
        export_hf("gs://bucket/run", "gs://bucket/exported")
    source = open_source("gs://bucket/exported")
    np.testing.assert_array_equal(source.model.logits(tokens), wanted)
    assert source.template is not None
    assert source.template.fingerprint == template.fingerprint
    (store / "bucket/run/checkpoints/5/files/prompt.yaml").write_text("x: 1")
    with pytest.raises(UserError, match=r"gs://bucket/run/checkpoints/5 is damaged \(files: prompt\.yaml"):
        load_checkpoint_model("gs://bucket/run")


def test_folders_are_copied_whole_but_for_what_is_skipped(tmp_path, store):
    source = tmp_path / "a"
    (source / "b").mkdir(parents=True)
    (source / "b" / "c").write_text("1")
    (source / "d").write_text("2")
    copy_tree(source, as_path("gs://bucket/x"), skip=("d",))
    assert [file.relative_to(store).as_posix() for file in store.rglob("*") if file.is_file()] == ["bucket/x/b/c"]
