"""Hugging Face weights: every tensor used once, both ways bit for bit, faults named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from blockrank.errors import UserError
from blockrank.models import hf
from blockrank.models.config import DecoderConfig

TINY = DecoderConfig(
    "llama", 11, 8, 12, 2, 1, 4, (None,) * 3, rms_norm_eps=1e-5, max_positions=64, bos_id=1, eos_ids=(2,)
)


def random_params(config: DecoderConfig, dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {w.path: rng.normal(size=w.full_shape(config.num_layers)).astype(dtype) for w in hf.weights(config)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf.save(tmp_path / "model", TINY, random_params(TINY))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return hf.save(tmp_path / "sharded", TINY, random_params(TINY), max_shard_bytes=1000)


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))


def edit_tensors(path: Path, **changes: np.ndarray | None) -> None:
    tensors = load_file(path) | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, path)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("shard", [10**9, 1000])
def test_save_then_load_is_bit_equal(tmp_path: Path, dtype: Any, shard: int) -> None:
    params = random_params(TINY, dtype)
    folder = hf.save(tmp_path / "out", TINY, params, max_shard_bytes=shard)
    config, loaded = hf.load(folder, None)
    assert config == TINY
    assert loaded.keys() == params.keys()
    for path, value in params.items():
        assert loaded[path].dtype == value.dtype
        np.testing.assert_array_equal(loaded[path].view(np.uint8), value.view(np.uint8))
    assert (folder / "model.safetensors").exists() == (shard == 10**9)
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == np.dtype(dtype).name
    assert not list(tmp_path.glob(".out*"))


def test_kernels_are_transposed_and_stacked(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    _, params = hf.load(folder)
    up = params["blocks.mlp.up.kernel"]
    assert up.shape == (3, 8, 12)
    np.testing.assert_array_equal(up[2], tensors["model.layers.2.mlp.up_proj.weight"].T)
    np.testing.assert_array_equal(params["head.kernel"], tensors["lm_head.weight"].T)
    np.testing.assert_array_equal(params["embed.embedding"], tensors["model.embed_tokens.weight"])
    assert len(tensors) == 3 * 9 + 3


def test_dtype_conversion(tmp_path: Path) -> None:
    params = random_params(TINY)
    folder = hf.save(tmp_path / "bf16", TINY, params, dtype="bfloat16")
    _, loaded = hf.load(folder, "float32")
    value = params["embed.embedding"]
    np.testing.assert_array_equal(loaded["embed.embedding"], value.astype(ml_dtypes.bfloat16).astype(np.float32))
    with pytest.raises(UserError, match="int8"):
        hf.load(folder, "int8")


def test_shards_respect_the_limit(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shards = {name: load_file(sharded / name) for name in set(index["weight_map"].values())}
    assert len(shards) > 3
    assert all(sum(t.nbytes for t in s.values()) <= 1000 for s in shards.values())
    assert index["metadata"]["total_size"] == sum(t.nbytes for s in shards.values() for t in s.values())


def test_missing_and_extra_tensors(folder: Path) -> None:
    edit_tensors(folder / "model.safetensors", model__norm__weight=None, model__norm__bias=np.ones(8, np.float32))
    with pytest.raises(UserError, match=r"1 missing: model\.norm\.weight; 1 extra: model\.norm\.bias"):
        hf.load(folder)


def test_one_layer_more_than_the_config_says(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=2)
    with pytest.raises(UserError, match=r"9 extra: .*model\.layers\.2\..* and 6 more"):
        hf.load(folder)


def test_wrong_shape_tells_both(folder: Path) -> None:
    edit_tensors(folder / "model.safetensors", model__layers__1__mlp__up_proj__weight=np.ones((13, 8), np.float32))
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has shape \[13, 8\].*\[12, 8\]"):
        hf.load(folder)
    edit_json(folder / "config.json", vocab_size=12)
    with pytest.raises(UserError, match=r"embed_tokens\.weight has shape \[11, 8\].*\[12, 8\]"):
        hf.load(folder)


def test_quantised_weights_are_refused(folder: Path) -> None:
    edit_tensors(folder / "model.safetensors", model__norm__weight=np.ones(8, np.int8))
    with pytest.raises(UserError, match=r"model\.norm\.weight is I8"):
        hf.load(folder)


def test_nan_is_named(folder: Path) -> None:
    weight = load_file(folder / "model.safetensors")["model.layers.1.self_attn.k_proj.weight"]
    weight[0, 0], weight[1, 1] = np.nan, np.inf
    edit_tensors(folder / "model.safetensors", model__layers__1__self_attn__k_proj__weight=weight)
    with pytest.raises(
        UserError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight holds 2 NaN or infinite values of 32"
    ):
        hf.load(folder)
    _, params = hf.load(folder, finite=False)
    with pytest.raises(UserError, match=r"trained: blocks\.attention\.key\.kernel of layer 1 holds 2"):
        hf.check_finite(params, "trained")


def test_overflow_in_a_narrow_dtype_is_named(folder: Path) -> None:
    edit_tensors(folder / "model.safetensors", model__norm__weight=np.full(8, 1e6, np.float32))
    with pytest.raises(UserError, match=r"model\.norm\.weight does not fit into float16"):
        hf.load(folder, "float16")
    hf.load(folder, "bfloat16")


@pytest.mark.parametrize("keep", [0, 5, -1])
def test_broken_file_is_named(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors: not a whole safetensors file"):
        hf.load(folder)


def test_pickles_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights here"):
        hf.load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UserError, match=r"pickled weights \(pytorch_model\.bin\)"):
        hf.load(folder)


def test_index_faults(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    original = json.loads(index.read_text())["weight_map"]
    norm, other = original["model.norm.weight"], original["lm_head.weight"]
    assert norm != other

    def fails(weight_map: Any, told: str) -> None:
        edit_json(index, weight_map=weight_map)
        with pytest.raises(UserError, match=told):
            hf.load(sharded)

    fails(None, "weight_map is missing")
    fails(original | {"model.norm.weight": "../evil.safetensors"}, "not a .safetensors file of this folder")
    fails(original | {"model.norm.weight": "model-9.safetensors"}, r"1 shards .* missing: model-9\.safetensors")
    fails(original | {"model.norm.weight": other}, rf"holds tensor model\.norm\.weight, but .* says {other}")
    fails({k: v for k, v in original.items() if k != "model.norm.weight"}, "does not name it")
    fails(original | {"model.extra": norm}, r"lacks 1 tensors .* model\.extra")
    edit_json(index, weight_map=original)
    hf.load(sharded)
    edit_tensors(sharded / other, model__norm__weight=np.ones(8, np.float32))
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        hf.load(sharded)
    save_file({"a": np.ones(1)}, sharded / "model.safetensors")
    with pytest.raises(UserError, match="holds both"):
        hf.load(sharded)


def test_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    config = replace(TINY, tie_embeddings=True)
    params = random_params(config)
    assert "head.kernel" not in params
    folder = hf.save(tmp_path / "tied", config, params)
    edit_tensors(folder / "model.safetensors", lm_head__weight=params["embed.embedding"])
    assert "head.kernel" not in hf.load(folder)[1]
    edit_tensors(folder / "model.safetensors", lm_head__weight=params["embed.embedding"] + 1)
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        hf.load(folder)


def test_old_rotary_tables_are_passed_over(folder: Path) -> None:
    table = np.ones(2, np.float32)
    edit_tensors(folder / "model.safetensors", model__layers__0__self_attn__rotary_emb__inv_freq=table)
    hf.load(folder)


def test_save_checks_parameters(tmp_path: Path) -> None:
    params = random_params(TINY)
    with pytest.raises(UserError, match=r"missing \['head\.kernel'\], extra \['lora'\]"):
        hf.save(tmp_path / "a", TINY, {k: v for k, v in params.items() if k != "head.kernel"} | {"lora": np.ones(1)})
    with pytest.raises(UserError, match=r"final_norm\.scale has shape \[7\].*\[8\]"):
        hf.save(tmp_path / "a", TINY, params | {"final_norm.scale": np.ones(7)})
    assert list(tmp_path.iterdir()) == []


def test_save_is_all_or_nothing(folder: Path) -> None:
    class Failing:
        def save(self, directory: Path) -> None:
            (directory / "tokenizer.json").touch()
            raise OSError("disk full")

    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(UserError, match="exists already"):
        hf.save(folder, TINY, random_params(TINY, seed=1))
    with pytest.raises(OSError, match="disk full"):
        hf.save(folder, TINY, random_params(TINY, seed=1), Failing(), overwrite=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    hf.save(folder, TINY, random_params(TINY, seed=1), overwrite=True)
    np.testing.assert_array_equal(
        hf.load(folder)[1]["final_norm.scale"], random_params(TINY, seed=1)["final_norm.scale"]
    )
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]


def test_tokenizer_files_travel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(UserError, match="no tokenizer here"):
        hf.save(tmp_path / "out", TINY, random_params(TINY), source)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ x }}")
    (source / "pytorch_model.bin").write_text("no")
    folder = hf.save(tmp_path / "out", TINY, random_params(TINY), source)
    names = {file.name for file in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}


def test_inputs_are_not_changed(tmp_path: Path) -> None:
    params = random_params(TINY)
    before = {path: value.copy() for path, value in params.items()}
    hf.save(tmp_path / "out", TINY, params, dtype="float16")
    for path, value in before.items():
        np.testing.assert_array_equal(params[path], value)


def test_no_torch_is_needed() -> None:
    code = "import sys, blockrank.models.hf; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
