"""What several devices compute equals what one does. `test_parallel.py` runs this file with eight CPU devices."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from strategies import HASTE, random_prompt, tiny_config, tiny_decoder
from test_attention_ranker import SETTINGS, decoder, encoder, listed, passages, scored
from test_eval import collection as animals  # noqa: F401
from test_eval import evaluate

from blockrank.api import Reranker
from blockrank.attention import pallas_tpu
from blockrank.attention.dispatch import attend
from blockrank.attention.visibility import BLOCKRANK
from blockrank.errors import UserError
from blockrank.layout import TokenLayout
from blockrank.losses import Objective, TrainingBatch, ranking_loss
from blockrank.models.decoder import Decoder
from blockrank.models.loading import place_parameters
from blockrank.parallel import MeshConfig, open_mesh, spread_lists
from blockrank.rankers.attention import AttentionRanker
from blockrank.rankers.readout import attention_scores
from blockrank.sources import Source, make_ranker
from blockrank.types import CandidateList, ListScores

TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 4e-5
"""Of the largest gradient in an array: what another order of summation makes of float32, backwards through layers of
large weights; 1.3e-5 to 2e-5 are seen, and differ between processors."""
MESHES = [
    MeshConfig(doc=8),
    MeshConfig(doc=4, tensor=2),
    MeshConfig(doc=4, fsdp=2),
    MeshConfig(doc=2, data=2, fsdp=2),
    MeshConfig(data=2, fsdp=2, tensor=2),
]


def test_there_are_eight_devices() -> None:
    assert jax.device_count() == 8


ROOMY = replace(SETTINGS, batch_tokens=1 << 20)


def lists() -> list[CandidateList]:
    return [listed(*passages(n, seed=n), query=f"query {n}") for n in (23, 1, 5)]


@cache
def scores_of_one_device() -> list[ListScores]:
    return scored(AttentionRanker(decoder(), encoder(), ROOMY), *lists())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_scores_and_order_equal_those_of_one_device(mesh: MeshConfig) -> None:
    """Rows that do not divide, shards without a document, a batch of three on two groups of devices."""
    several = AttentionRanker(decoder(), encoder(), ROOMY, mesh=open_mesh(mesh))
    for one, many in zip(scores_of_one_device(), scored(several, *lists()), strict=True):
        np.testing.assert_allclose(many.scores, one.scores, rtol=0, atol=TOLERANCE)
        assert np.argsort(many.scores).tolist() == np.argsort(one.scores).tolist()
        assert many.tokens == one.tokens
    kernel = several.model.blocks.mlp.up.kernel.get_value()
    shards = kernel.addressable_shards
    assert len(shards) == 8
    assert shards[0].data.size == kernel.size // (mesh.fsdp * mesh.tensor)


def test_a_mesh_is_warmed_up_for_the_shapes_it_meets() -> None:
    """Batches of three lists on two groups of devices; shapes in other shards than the mesh's are refused."""
    several = AttentionRanker(decoder(), encoder(), ROOMY, mesh=open_mesh(MeshConfig(doc=2, data=2, fsdp=2)))
    segments = [several.encoder.encode(candidates) for candidates in lists()]
    several.warm_up([several.reader.lay_out(segments).shape], batch_size=3)
    assert several.compilations == 1
    several.score(lists())
    assert several.compilations == 1
    with pytest.raises(UserError, match="a shape in 1 shards cannot warm up a ranker that spreads lists over doc=2"):
        several.warm_up([several.settings.lay_out(segments).shape])


@pytest.mark.parametrize("backend", ["xla", "pallas_tpu"])
def test_attention_and_gradients_under_a_mesh_equal_those_of_one_device(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels, interpreted here, run on each device's own shard and heads."""
    monkeypatch.setattr(pallas_tpu, "log_fallback", pytest.fail)
    devices = MeshConfig(doc=4, tensor=2).make()
    layout = TokenLayout.from_segments(BATCH, row_length=16, suffix_offset=256, shards=4)
    rng = np.random.default_rng(0)
    sizes = [(*layout.tokens.shape, *heads) for heads in ((2, 2, 16), (2, 16), (2, 16), (2, 2, 16))]
    arrays = [rng.standard_normal(size).astype(np.float32) for size in sizes]

    def run(layout: TokenLayout, q, k, v, cotangent, name: str) -> tuple:
        out, pull = jax.vjp(lambda *x: attend(*x, layout=layout, visibility=BLOCKRANK, backend=name), q, k, v)
        return out, *pull(cotangent)

    run = jax.jit(run, static_argnames="name", compiler_options=HASTE)
    expected = run(layout, *arrays, name="reference")
    with jax.set_mesh(devices):
        actual = run(*spread_lists((layout, *arrays), devices), name=backend)
    for ours, oracle in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, oracle, rtol=0, atol=TOLERANCE)


BATCH = [
    random_prompt(0, 7, [9, 3, 12, 5, 16, 1, 8], 9, answer=3),
    random_prompt(1, 3, [4], 6, answer=2),
    random_prompt(2, 12, [16] * 9, 9, answer=3),
    random_prompt(3, 5, [2, 2], 8, answer=1),
]


def training_batch(shards: int) -> TrainingBatch:
    layout = TokenLayout.from_segments(BATCH, row_length=16, suffix_offset=256, bucket=False, shards=shards)
    positive = np.zeros((len(BATCH), 9), bool)
    positive[[0, 1, 2], [4, 0, 8]] = True
    return TrainingBatch(layout, np.tile(positive, (shards, 1)))


@cache
def model() -> Decoder:
    return tiny_decoder(tiny_config(3, tie_embeddings=False))


def loss_and_gradients(params: nnx.State, batch: TrainingBatch, backend: str = "xla") -> tuple:
    graph = nnx.graphdef(model())
    objective = Objective(score_layer=2, aux_weight=1.0, temperature=0.5, remat="full", attention_backend=backend)

    def loss(params: nnx.State) -> tuple:
        return ranking_loss(nnx.merge(graph, params), batch, objective)

    return jax.value_and_grad(loss, has_aux=True)(params)


@cache
def of_one_device() -> tuple:
    """By the oracle: float32 rounding of two structured computations may add up to more than the tolerance."""
    oracle = partial(loss_and_gradients, backend="reference")
    return jax.jit(oracle, compiler_options=HASTE)(nnx.state(model()), training_batch(1))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_losses_and_gradients_equal_those_of_one_device(mesh: MeshConfig) -> None:
    devices = mesh.make()
    batch = spread_lists(training_batch(mesh.doc), devices)
    params = place_parameters(nnx.state(model()), devices)
    with jax.set_mesh(devices):
        (loss, metrics), gradients = jax.jit(loss_and_gradients, compiler_options=HASTE)(params, batch)
    (expected, expected_metrics), expected_gradients = of_one_device()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    for (path, leaf), (_, wanted) in zip(
        nnx.to_flat_state(gradients), nnx.to_flat_state(expected_gradients), strict=True
    ):
        actual = np.asarray(leaf.get_value())
        largest = max(1.0, np.abs(wanted.get_value()).max())
        np.testing.assert_allclose(
            actual, wanted.get_value(), rtol=0, atol=GRADIENT_TOLERANCE * largest, err_msg=str(path)
        )


def compiled_text(mesh: MeshConfig, dtype: jnp.dtype = jnp.float32) -> str:
    devices = mesh.make()
    cut = tiny_decoder().truncate(2)
    cut.dtype = dtype
    layout = TokenLayout.from_segments(BATCH[:1], row_length=16, suffix_offset=256, shards=mesh.doc)

    def score(params: nnx.State, layout: TokenLayout) -> jax.Array:
        return attention_scores(
            nnx.merge(nnx.graphdef(cut), params), layout, 2, visibility=BLOCKRANK, aggregation="sum"
        )

    with jax.set_mesh(devices):
        arguments = place_parameters(nnx.state(cut), devices), spread_lists(layout, devices)
        return str(jax.jit(score).lower(*arguments).compile().as_text())


def test_nothing_is_sent_but_the_suffix_merge() -> None:
    """In the scanned block: the gathered log-sum-exps and one sum of [Q, heads, H]. No states, no keys, no weights."""
    text = compiled_text(MeshConfig(doc=8))
    sent = re.findall(r"= (\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(", text)
    kinds = sorted((kind, re.sub(r"\{.*", "", shape)) for shape, kind in sent)
    heads, head_dim, suffix = 4, 8, 16
    sizes = [int(np.prod([int(n) for n in shape.split("[")[1].strip("]").split(",")])) for _, shape in kinds]
    assert kinds, text
    assert {kind for kind, _ in kinds} == {"all-gather", "all-reduce"}
    assert len(kinds) == 4, kinds  # block: lse, output; readout: lse, masses
    assert max(sizes) == suffix * heads * head_dim, kinds


@pytest.mark.parametrize("weights", [None, "int8"])
def test_the_public_class_takes_a_mesh_by_name(weights: str | None) -> None:
    source = Source(decoder(), encoder().tokenizer)
    options = {"settings": {"score_layer": 1, "row_length": 128, "suffix_offset": 2048}, "weights": weights}
    docs, query = list(passages(9)), "where does the river end"
    one = Reranker(make_ranker(source, **options)).rank(query, docs)
    many = Reranker(make_ranker(source, **options, mesh=open_mesh("doc8"))).rank(query, docs)
    assert [r.index for r in many] == [r.index for r in one]
    np.testing.assert_allclose([r.score for r in many], [r.score for r in one], rtol=0, atol=TOLERANCE)


def test_the_eval_command_writes_the_run_of_one_device(tmp_path: Path, animals: Path) -> None:  # noqa: F811
    """`mesh=doc8`: the same documents in the same order, and scores within the tolerance."""
    runs = {}
    for mesh in ("single", "doc8"):
        held_out, _ = evaluate(animals, tmp_path / mesh, f"mesh={mesh}", "baseline=false")
        runs[mesh] = [line.split() for line in held_out.runs["attention"].read_text().splitlines()]
    one, many = runs["single"], runs["doc8"]
    assert len(one) == 6
    assert [line[:4] for line in many] == [line[:4] for line in one]
    np.testing.assert_allclose([float(line[4]) for line in many], [float(line[4]) for line in one], rtol=0, atol=1e-5)


def test_what_cannot_be_spread_is_told() -> None:
    with pytest.raises(UserError, match="2 kv heads do not divide over tensor=4 devices"):
        AttentionRanker(decoder(), encoder(), SETTINGS, mesh=MeshConfig(tensor=4).make())
    dense = AttentionRanker(decoder(), encoder(), replace(SETTINGS, visibility="dense"), mesh=MeshConfig(doc=8).make())
    with pytest.raises(UserError, match=r"visibility='dense' lets documents see each other.*doc=1"):
        dense.score([listed(*passages(3))])


def test_dense_attention_spreads_over_lists_and_heads() -> None:
    settings = replace(SETTINGS, visibility="dense")
    lists = [listed(*passages(n, seed=n)) for n in (3, 2)]
    spread = AttentionRanker(decoder(), encoder(), settings, mesh=MeshConfig(data=2, tensor=2).make())
    for one, many in zip(
        scored(AttentionRanker(decoder(), encoder(), settings), *lists), scored(spread, *lists), strict=True
    ):
        np.testing.assert_allclose(many.scores, one.scores, rtol=0, atol=TOLERANCE)
