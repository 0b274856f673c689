"""The mesh, where parameters lie, lists in shards; and on eight CPU devices, in a process of its own, equal results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from jax.sharding import AxisType, Mesh, PartitionSpec
from strategies import HASTE, VOCABULARY, batches, random_prompt, tiny_config

from blockrank.attention import pallas_codes, pallas_tpu
from blockrank.attention.dispatch import attend
from blockrank.attention.merge import Shards, merge_partial
from blockrank.attention.visibility import BLOCKRANK, DENSE
from blockrank.errors import UserError
from blockrank.layout import PAD, TokenLayout
from blockrank.models.hf_config import parse_config
from blockrank.models.loading import abstract_decoder, flat_abstract
from blockrank.models.lora import LoraSettings, abstract_start, is_adapter
from blockrank.parallel import AXES, MeshConfig, named_mesh, open_mesh, parameter_spec, place_state
from blockrank.rankers.readout import document_mass

TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("mesh", "devices", "sizes"),
    [
        (MeshConfig(), 1, (1, 1, 1, 1)),
        (MeshConfig(data=-1, doc=8), 16, (2, 1, 8, 1)),
        (MeshConfig(fsdp=-1, tensor=2), 8, (1, 4, 1, 2)),
        (MeshConfig(doc=4), 8, (1, 1, 4, 1)),
    ],
)
def test_sizes_come_from_the_devices_present(mesh: MeshConfig, devices: int, sizes: tuple[int, ...]) -> None:
    assert mesh.sizes(devices) == sizes


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        (MeshConfig(doc=8), 1, "mesh data=1, fsdp=1, doc=8, tensor=1 needs 8 devices, but 1 are present"),
        (MeshConfig(data=-1, doc=8), 12, "needs a multiple of 8 devices, but 12 are present"),
        (MeshConfig(data=-1, doc=8), 4, "needs a multiple of 8 devices, but 4 are present"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(mesh: MeshConfig, devices: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mesh.sizes(devices)


def test_axes_are_positive_and_one_may_take_the_rest() -> None:
    for sizes in ({"doc": 0}, {"data": -1, "fsdp": -1}, {"tensor": -2}):
        with pytest.raises(UserError, match="axes are 1 or more"):
            MeshConfig(**sizes)


def test_meshes_by_name() -> None:
    assert named_mesh("doc8") == MeshConfig(data=-1, doc=8)
    assert named_mesh("v6e-8").sizes(8) == (1, 8, 1, 1)
    assert named_mesh("v6e-64").sizes(64) == (1, 32, 2, 1)
    with pytest.raises(UserError, match="needs a multiple of 64 devices, but 96 are present"):
        named_mesh("v6e-64").sizes(96)
    assert named_mesh("single").single
    assert open_mesh(None) is open_mesh("single") is open_mesh(MeshConfig()) is None
    with pytest.raises(UserError, match="mesh='doc7' is unknown: choose one of doc8"):
        open_mesh("doc7")
    with pytest.raises(UserError, match=r"the mesh has axes \('x',\)"):
        open_mesh(Mesh(np.asarray(jax.devices()[:1]), ("x",)))


def abstract_mesh(**sizes: int) -> jax.sharding.AbstractMesh:
    whole = tuple(sizes.get(axis, 1) for axis in AXES)
    return jax.sharding.AbstractMesh(whole, AXES, axis_types=(AxisType.Auto,) * len(AXES))


MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


def test_every_matrix_is_spread_over_both_weight_axes() -> None:
    mesh = abstract_mesh(fsdp=4, tensor=2)
    for path, leaf in flat_abstract(abstract_decoder(parse_config(MISTRAL, "config"))).items():
        spec = parameter_spec(path, leaf.shape, mesh)
        assert len(spec) <= len(leaf.shape)
        spread = {axis for axis in spec if axis is not None}
        assert spread == (set() if path.endswith("scale") else {"fsdp", "tensor"}), path
    lora = abstract_start(parse_config(MISTRAL, "config"), jnp.dtype("float32"), LoraSettings(targets=r".*\.kernel"))
    adapters = {path: leaf.shape for path, leaf in flat_abstract(lora).items() if is_adapter(path)}
    assert len(adapters) == 14
    for path, shape in adapters.items():
        spec = parameter_spec(path, shape, mesh)
        wide = 1 if path.endswith(".a") else 2
        assert spec[wide] in ("fsdp", "tensor"), path
        assert spec[3 - wide] is None, path
    assert parameter_spec("blocks.attention.out.kernel", (2, 4096, 4096), mesh) == PartitionSpec(None, "tensor", "fsdp")
    with pytest.raises(UserError, match=r"head.kernel \(30, 64\) does not divide over fsdp=4 devices"):
        parameter_spec("head.kernel", (30, 64), mesh)


def test_moments_lie_as_their_parameters_do() -> None:
    params = {"head": {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32)}}
    rows = {"head": {"kernel": jax.ShapeDtypeStruct((8,), jnp.float32)}}
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1, 1), AXES)
    placed = place_state({"momentum": (params,), "rows": rows}, params, mesh)
    assert placed["momentum"][0]["head"]["kernel"].sharding.spec == PartitionSpec("fsdp", "tensor")
    assert placed["rows"]["head"]["kernel"].sharding.spec == PartitionSpec()


def test_factored_moments_lie_over_the_axes_they_keep() -> None:
    """The names and shapes are optax's own: `v_row` is the mean over the longest dimension, `v_col` over the second."""
    shapes = {
        "embed": {"embedding": (512, 128)},
        "head": {"kernel": (128, 8)},
        "mlp": {"down": {"kernel": (3, 256, 128)}, "up": {"kernel": (3, 128, 256)}},
    }
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: type(s) is tuple)
    cut = jax.tree.map(lambda p: jax.ShapeDtypeStruct((2, *p.shape[1:]), p.dtype), params["mlp"])
    rule = optax.adafactor(1.0, momentum=0.9)
    state = jax.eval_shape(rule.init, {**params, "mlp": cut})
    placed = place_state(state, params, abstract_mesh(fsdp=2, tensor=4))
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): (leaf.shape, leaf.sharding.spec)
        for path, leaf in jax.tree_util.tree_leaves_with_path(placed)
    }
    moments = {name.split("v_")[1]: spread for name, spread in found.items() if "v_" in name}
    assert moments["row.mlp.up.kernel"] == ((2, 128), PartitionSpec(None, "fsdp"))
    assert moments["col.mlp.up.kernel"] == ((2, 256), PartitionSpec(None, "tensor"))
    assert moments["row.mlp.down.kernel"] == ((2, 128), PartitionSpec(None, "fsdp"))
    assert moments["col.mlp.down.kernel"] == ((2, 256), PartitionSpec(None, "tensor"))
    assert moments["row.embed.embedding"] == ((128,), PartitionSpec("fsdp"))
    assert moments["col.embed.embedding"] == ((512,), PartitionSpec("tensor"))
    assert moments["row.head.kernel"] == ((1,), PartitionSpec())
    momenta = [
        spec
        for name, (shape, spec) in found.items()
        if "v_" not in name and name.endswith("up.kernel") and len(shape) > 1
    ]
    assert momenta == [PartitionSpec(None, "fsdp", "tensor")]


def lay_out(batch, **options) -> TokenLayout:
    return TokenLayout.from_segments(batch, row_length=16, suffix_offset=256, **options)


BATCH = [
    random_prompt(0, 7, [9, 3, 12, 5, 16, 1], 6, answer=2),
    random_prompt(1, 3, [4], 3, answer=1),
    random_prompt(2, 12, [], 9),
]


@given(batches())
def test_shards_hold_the_same_lists(batch) -> None:
    whole, shards = lay_out(batch), lay_out(batch, shards=3)
    for one, many in zip(whole.unpack(), shards.unpack(), strict=True):
        assert [block.tolist() for block in many] == [block.tolist() for block in one]
    assert shards.token_count().tolist() == whole.token_count().tolist()
    assert shards.tokens.shape == (3 * len(batch), shards.shape.tokens)
    assert lay_out(batch, shape=shards.shape).shape == shards.shape
    blank = TokenLayout.blank(len(batch), shards.shape)
    assert [x.shape for x in jax.tree.leaves(blank)] == [x.shape for x in jax.tree.leaves(shards)]


def test_row_length_is_chosen_so_that_rows_divide() -> None:
    """A hundred passages on eight shards: at most a tenth of the rows is padding, at every list."""
    for seed in range(5):
        lengths = np.random.default_rng(seed).gamma(6.25, 12, 100).clip(20, 160).astype(int)
        prompt = random_prompt(0, 96, lengths, 80)
        layout = TokenLayout.from_segments([prompt], row_length=512, shards=8)
        assert layout.fill >= 0.9
        assert (np.asarray(layout.segment_ids) >= 0).sum() == lengths.sum()
    with pytest.raises(UserError, match="document 0 has 600 tokens, more than a row of 512"):
        TokenLayout.from_segments([random_prompt(0, 4, [600], 4)], row_length=512, shards=8)


def test_merging_shards_is_merging_partial_results() -> None:
    rng = np.random.default_rng(0)
    outputs = jnp.asarray(rng.standard_normal((3, 2, 5, 2, 2, 4)), jnp.float32)
    lses = jnp.asarray(rng.standard_normal((3, 2, 5, 2, 2)), jnp.float32)
    lses = lses.at[1].set(-jnp.inf).at[:, 0, 0].set(-jnp.inf)
    expected = merge_partial(outputs, lses)
    flat = Shards(3).merge(outputs.reshape(6, *outputs.shape[2:]), lses.reshape(6, *lses.shape[2:]))
    np.testing.assert_allclose(flat.reshape(3, 2, 5, 2, 2, 4), np.stack([expected] * 3), rtol=0, atol=1e-6)


def _attention(q, k, v, cotangent, layout, backend):
    """Output and gradients, parts of every list put in the order of an unsharded layout."""

    def run(q, k, v):
        return attend(q, k, v, layout=layout, visibility=BLOCKRANK, backend=backend)

    out, pull = jax.vjp(run, q, k, v)
    return out, *pull(cotangent)


@pytest.mark.parametrize("backend", ["reference", "xla", "pallas_tpu"])
def test_attention_over_shards_equals_attention_over_the_list(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of every token, and gradients: those of prefix and suffix are summed over the shards that hold them."""
    monkeypatch.setattr(pallas_tpu, "log_fallback", pytest.fail)
    shards = 2
    whole = lay_out(BATCH, shape=replace(lay_out(BATCH, bucket=False).shape, rows=4))
    split = whole.split(shards)
    rng = np.random.default_rng(0)
    kv, queries = (*whole.tokens.shape, 2, 16), (*whole.tokens.shape, 2, 2, 16)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in (queries, kv, kv, queries)]

    def stream(values: np.ndarray) -> np.ndarray:
        rows = np.stack(np.split(values[:, whole.rows], shards, axis=1))
        ends = [np.stack([values[:, part]] * shards) for part in (whole.prefix, whole.suffix)]
        return np.concatenate([ends[0], rows, ends[1]], axis=2).reshape(-1, split.shape.tokens, *values.shape[2:])

    def summed(values: np.ndarray) -> np.ndarray:
        streams = np.asarray(values).reshape(shards, -1, *values.shape[1:])
        rows = np.concatenate(list(streams[:, :, split.rows]), axis=1)
        return np.concatenate(
            [streams[:, :, split.prefix].sum(axis=0), rows, streams[:, :, split.suffix].sum(axis=0)], axis=1
        )

    q, k, v, cotangent = arrays
    # The output of prefix and suffix is read once: on the first shard.
    read = stream(cotangent)
    for part in (split.prefix, split.suffix):
        read[len(BATCH) :, part] = 0
    compiled = jax.jit(_attention, static_argnames="backend", compiler_options=HASTE)
    expected = compiled(q, k, v, cotangent, whole, backend=backend)
    actual = compiled(stream(q), stream(k), stream(v), read, split, backend=backend)
    np.testing.assert_allclose(actual[0], stream(np.asarray(expected[0])), rtol=0, atol=TOLERANCE)
    for name, many, one in zip(("dq", "dk", "dv"), actual[1:], expected[1:], strict=True):
        assert np.isfinite(many).all()
        np.testing.assert_allclose(summed(many), one, rtol=0, atol=TOLERANCE, err_msg=name)


def test_scores_over_shards_equal_scores_over_the_list() -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, 2, 2, 8)).astype(np.float32)
    k = 2 * rng.standard_normal((2, 12, 2, 8)).astype(np.float32)
    segments = np.array([[0, 0, 1, PAD, 2, 2, 2, PAD, 3, 3, PAD, PAD], [0] * 4 + [PAD] * 8])
    signals = np.array([[True, True], [True, False]])
    expected, per_token = (document_mass(q, k, segments, signals, 4, "sum", 1, exponent) for exponent in (0.0, 1.0))

    def dealt(values: np.ndarray) -> np.ndarray:
        return np.concatenate(np.split(values, 3, axis=1))

    actual = document_mass(
        np.tile(q, (3, 1, 1, 1, 1)), dealt(k), dealt(segments), np.tile(signals, (3, 1)), 4, "sum", 3
    )
    np.testing.assert_allclose(actual, np.tile(expected, (3, 1)), rtol=0, atol=1e-6)
    np.testing.assert_allclose(expected.sum(axis=1), [2, 1], atol=1e-6)
    shards = np.tile(q, (3, 1, 1, 1, 1)), dealt(k), dealt(segments), np.tile(signals, (3, 1))
    np.testing.assert_allclose(document_mass(*shards, 4, "sum", 3, 1.0), np.tile(per_token, (3, 1)), rtol=0, atol=1e-6)


def test_only_patterns_whose_documents_stay_apart_come_in_shards() -> None:
    assert BLOCKRANK.documents_apart
    assert not DENSE.documents_apart
    layout = TokenLayout.from_segments(BATCH, row_length=16, suffix_offset=None, shards=2)
    q = jnp.zeros((*layout.tokens.shape, 1, 1, 2))
    with pytest.raises(UserError, match=r"visibility='dense' lets documents see each other.*doc=1"):
        attend(q, q[:, :, :, 0], q[:, :, :, 0], layout=layout, visibility=DENSE)
    with pytest.raises(UserError, match="visibility='blockrank' needs permutation-invariant positions"):
        attend(q, q[:, :, :, 0], q[:, :, :, 0], layout=layout, visibility=BLOCKRANK)


def test_what_the_kernel_cannot_take_of_a_shard_is_computed_by_xla(caplog: pytest.LogCaptureFixture) -> None:
    layout = lay_out(BATCH, shards=2)
    q = np.random.default_rng(0).standard_normal((*layout.tokens.shape, 2, 2, 8)).astype(np.float32)
    pallas_codes.log_fallback.cache_clear()
    with caplog.at_level(logging.INFO, logger=pallas_codes.__name__):
        ours, xla = (
            attend(q, q[..., 0, :], q[..., 1, :], layout=layout, visibility=BLOCKRANK, backend=name)
            for name in ("pallas_tpu", "xla")
        )
    np.testing.assert_array_equal(ours, xla)
    assert [r.getMessage() for r in caplog.records] == ["pallas_tpu cannot take head_dim 8: computed by xla"]


def test_several_devices_compute_what_one_does(run_on_eight_devices: Callable[..., None]) -> None:
    assert tiny_config().vocab_size == VOCABULARY
    run_on_eight_devices("eight_devices.py")
