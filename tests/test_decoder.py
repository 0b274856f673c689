"""The decoder over layouts: isolation by exactly-zero gradients, truncation, taps, remat, windows, padding rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.typing import ArrayLike
from strategies import HASTE, VOCABULARY, model_jit, on_device, prompt_of, random_prompt, tiny_config, tiny_decoder

from blockrank.attention.visibility import BLOCKRANK, DENSE, Visibility
from blockrank.errors import UserError
from blockrank.layout import PAD, PREFIX, SUFFIX, TokenLayout
from blockrank.models import hf
from blockrank.models.decoder import Decoder, TruncatedDecoder
from blockrank.models.loading import flat_parameters
from blockrank.models.lora import LoraSettings
from blockrank.training.adapters import starting_model
from blockrank.training.initial import PretrainedModel

LAYERS = 3
PROMPT = random_prompt(0, 6, [5, 3, 7], 5)


@cache
def decoder() -> Decoder:
    return tiny_decoder(tiny_config(LAYERS))


@cache
def layout(packing: str = "packed") -> TokenLayout:
    return on_device(TokenLayout.from_segments([PROMPT], row_length=16, packing=packing, suffix_offset=64))


def assert_close(actual: ArrayLike, expected: ArrayLike, tolerance: float = 1e-5) -> None:
    """Equal within float32 rounding of the largest value."""
    largest = float(np.abs(np.asarray(expected)).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * largest)


def _states(model, where, *, tap=None, visibility=BLOCKRANK):
    return model.states(where, visibility=visibility, tap=tap)


states = model_jit(_states, "tap", "visibility")
states_at = model_jit(lambda model, where, layer: model.states_at(where, layer, visibility=BLOCKRANK), "layer")


@cache
def entering() -> np.ndarray:
    """States entering each layer, [L, B, T, D]."""
    look = model_jit(lambda model, where: model.observe(where, lambda _, state, __: state, visibility=BLOCKRANK))
    return np.asarray(look(decoder(), layout()))


@cache
def sequential() -> TokenLayout:
    return on_device(TokenLayout.from_segments([PROMPT], row_length=16, suffix_offset=None))


@cache
def embedding_gradients(visibility: Visibility) -> dict[int, np.ndarray]:
    """Segment -> d(its states after all layers, randomly weighted) / d(embeddings of all tokens), [T, D]."""
    graph, params = nnx.split(decoder())
    where = sequential() if visibility.sequential else layout()
    shape = (1, where.shape.tokens, 32)
    weights = np.random.default_rng(1).standard_normal(shape).astype(np.float32)

    def weighed(shift: jax.Array, target: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        shifted = model.embed(where.tokens, jnp.float32) + shift
        model.embed = nnx.data(lambda *_: shifted)
        states = model.states(where, visibility=visibility)[0]
        return jnp.sum(jnp.where((where.segment_ids == target)[..., None], states * weights, 0.0))

    gradient = jax.jit(jax.grad(weighed), compiler_options=HASTE)
    return {target: np.asarray(gradient(jnp.zeros(shape), target))[0] for target in (PREFIX, 0, 1, 2, SUFFIX, PAD)}


def embedding_gradient(source: int, target: int, visibility: Visibility = BLOCKRANK) -> np.ndarray:
    """d(states of segment `target`) / d(embeddings of segment `source`), through all layers."""
    where = sequential() if visibility.sequential else layout()
    return embedding_gradients(visibility)[target][np.asarray(where.segment_ids[0]) == source]


def test_a_document_gets_exactly_no_gradient_from_another() -> None:
    assert len(set(np.asarray(layout().segment_ids[0, layout().rows])[:16].tolist()) & {0, 1, 2}) >= 2, "share a row"
    for target in range(3):
        for source in range(3):
            gradient = embedding_gradient(source, target)
            assert bool(np.any(gradient)) == (source == target)


def test_documents_and_prefix_get_exactly_no_gradient_from_the_suffix() -> None:
    for target in (0, 1, 2, PREFIX):
        assert not np.any(embedding_gradient(SUFFIX, target))
    for source in (0, 1, 2):
        assert not np.any(embedding_gradient(source, PREFIX))


def test_what_is_visible_has_a_gradient() -> None:
    for source in (PREFIX, 0, 1, 2, SUFFIX):
        assert np.any(embedding_gradient(source, SUFFIX))
    for target in (0, 1, 2):
        assert np.any(embedding_gradient(PREFIX, target))


def test_padding_gives_and_gets_exactly_no_gradient() -> None:
    assert np.any(np.asarray(layout().segment_ids) == PAD)
    for target in (PREFIX, 0, 1, 2, SUFFIX):
        assert not np.any(embedding_gradient(PAD, target))
    for source in (PREFIX, 0, 1, 2, SUFFIX):
        assert not np.any(embedding_gradient(source, PAD))


def test_under_dense_attention_later_documents_see_earlier_ones() -> None:
    assert np.any(embedding_gradient(0, 2, DENSE))
    assert not np.any(embedding_gradient(2, 0, DENSE))


def test_one_document_in_sequence_is_plain_causal_attention() -> None:
    """With one document and a suffix that begins where it ends, BlockRank's pattern is a language model's."""
    prompt = random_prompt(3, 6, [9], 5)
    where = TokenLayout.from_segments([prompt], row_length=9, suffix_offset=15, bucket=False)
    text = np.concatenate([prompt.prefix, *prompt.documents, prompt.suffix])[None]
    assert np.asarray(where.tokens).tolist() == text.tolist()
    plain, _ = states(decoder(), on_device(TokenLayout.causal(text)), visibility=DENSE)
    blocks, _ = states(decoder(), on_device(where))
    assert_close(blocks, plain)


def test_dense_attention_reads_documents_in_list_order_however_packed() -> None:
    text = np.concatenate([PROMPT.prefix, *PROMPT.documents, PROMPT.suffix])[None]
    plain = np.asarray(states(decoder(), on_device(TokenLayout.causal(text)), visibility=DENSE)[0])
    packed = np.asarray(states(decoder(), sequential(), visibility=DENSE)[0])
    real = np.flatnonzero(np.asarray(sequential().segment_ids[0]) != PAD)
    order = real[np.argsort(np.asarray(sequential().positions[0])[real])]
    assert_close(packed[0, order], plain[0])


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_truncated_model_equals_the_whole_one(layer: int) -> None:
    small = decoder().truncate(layer)
    cut, whole = (np.asarray(states_at(model, layout(), layer=layer)) for model in (small, decoder()))
    assert_close(cut, whole)
    assert_close(cut, entering()[layer])


def test_a_truncated_model_keeps_only_what_scores_need() -> None:
    small = decoder().truncate(2)
    assert isinstance(small, TruncatedDecoder)
    kept, whole = flat_parameters(small), flat_parameters(decoder())
    blocks = {path for path in whole if path.startswith("blocks.")}
    probe = {"attention_norm.scale", "attention.query.kernel", "attention.key.kernel"}
    assert set(kept) == {"embed.embedding"} | blocks | {f"score_block.{name}" for name in probe}
    for path in blocks:
        np.testing.assert_array_equal(kept[path], whole[path][:2])
    for name in probe:
        np.testing.assert_array_equal(kept[f"score_block.{name}"], whole[f"blocks.{name}"][2])


def test_a_truncated_model_keeps_biases_and_norms_of_queries_and_keys() -> None:
    config = replace(tiny_config(2), qkv_bias=True, qk_norm=True)
    kept = flat_parameters(tiny_decoder(config).truncate(1))
    names = {path.removeprefix("score_block.") for path in kept if path.startswith("score_block.")}
    linear = {f"attention.{part}.{leaf}" for part in ("query", "key") for leaf in ("kernel", "bias")}
    assert names == linear | {"attention_norm.scale", "attention.query_norm.scale", "attention.key_norm.scale"}


def test_a_model_is_cut_at_one_of_its_layers_and_scores_there_only() -> None:
    for layer in (-1, LAYERS):
        with pytest.raises(UserError, match=f"score_layer={layer} is not one of the model's 3 layers"):
            decoder().truncate(layer)
        with pytest.raises(UserError, match="not one of the model's 3 layers"):
            decoder().states_at(layout(), layer, visibility=BLOCKRANK)
    with pytest.raises(UserError, match="truncated at layer 1, not 2"):
        decoder().truncate(1).probe(2)
    with pytest.raises(UserError, match="truncated at layer 1, not 0"):
        decoder().truncate(1).states_at(layout(), 0, visibility=BLOCKRANK)


@pytest.mark.parametrize("tap", range(LAYERS))
def test_taps(tap: int) -> None:
    """The state that enters layer `tap`, beside the last one, which does not depend on the tap."""
    final, tapped = states(decoder(), layout(), tap=tap)
    untapped, _ = states(decoder(), layout())
    assert_close(tapped, entering()[tap])
    assert_close(final, untapped)


def test_a_tap_after_the_last_layer_is_the_last_state() -> None:
    for tap in (None, LAYERS):
        final, tapped = states(decoder(), layout(), tap=tap)
        np.testing.assert_array_equal(final, tapped)
    np.testing.assert_array_equal(entering()[0], decoder().embed(layout().tokens, jnp.float32))


@cache
def values_and_gradients(remat: str) -> list[np.ndarray]:
    graph, params = nnx.split(decoder())

    def loss(params: nnx.State) -> jax.Array:
        final, tapped = nnx.merge(graph, params).states(layout(), visibility=BLOCKRANK, tap=1, remat=remat)
        return jnp.sum(jnp.sin(final)) + jnp.sum(jnp.cos(tapped))

    return jax.tree.leaves(jax.jit(jax.value_and_grad(loss), compiler_options=HASTE)(params))


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_neither_values_nor_gradients(remat: str) -> None:
    for plain, again in zip(values_and_gradients("none"), values_and_gradients(remat), strict=True):
        assert_close(again, plain)


def test_a_models_own_window_applies_to_dense_attention_only() -> None:
    free = decoder()
    narrow = tiny_decoder(tiny_config(windows=(4, None, 4)))
    for path, value in flat_parameters(free).items():
        np.testing.assert_array_equal(flat_parameters(narrow)[path], value)
    same = [np.asarray(states(model, layout())[0]) for model in (free, narrow)]
    np.testing.assert_array_equal(*same)
    other = [np.asarray(states(model, sequential(), visibility=DENSE)[0]) for model in (free, narrow)]
    assert np.abs(other[0] - other[1]).max() > 0.1


def test_the_padding_embedding_is_used_but_not_trained() -> None:
    prompt = prompt_of([1, 2, 3], [[5, 2, 6], [7, 8]], [9, 2, 4])
    where = on_device(TokenLayout.from_segments([prompt], row_length=8, suffix_offset=32, bucket=False))

    def gradient(padding_id):
        model = tiny_decoder(tiny_config(2, padding_id=padding_id))
        graph, params = nnx.split(model)

        def run(params):
            return jnp.sum(jnp.sin(nnx.merge(graph, params).states(where, visibility=BLOCKRANK)[0][:, where.suffix]))

        value, grads = jax.jit(jax.value_and_grad(run), compiler_options=HASTE)(params)
        return float(value), np.asarray(flat_parameters(nnx.merge(graph, grads))["embed.embedding"])

    (value, trained), (same, padded) = gradient(None), gradient(2)
    assert value == pytest.approx(same, abs=1e-5)
    assert np.any(trained[2])
    assert not np.any(padded[2])
    keep = np.arange(VOCABULARY) != 2
    assert_close(padded[keep], trained[keep])
    used = {1, 3, 4, 5, 6, 7, 8, 9}
    assert {int(i) for i in np.flatnonzero(np.abs(padded).sum(axis=1))} <= used


def test_hidden_states_are_those_of_every_layer() -> None:
    tokens = jnp.asarray(PROMPT.prefix)[None]
    hidden = nnx.jit(Decoder.hidden_states)(decoder(), tokens)
    assert hidden.shape == (LAYERS + 1, 1, 6, 32)
    assert_close(hidden[0], decoder().embed(tokens, jnp.float32))
    last, _ = states(decoder(), TokenLayout.causal(tokens), visibility=DENSE)
    assert_close(hidden[-1], last)
    expected = decoder().head_logits(hidden[-1])
    assert_close(nnx.jit(Decoder.logits)(decoder(), tokens), expected)


def test_a_pretrained_model_may_keep_its_first_blocks_only(tmp_path: Path) -> None:
    whole = decoder()
    folder = hf.save(tmp_path / "model", whole.config, flat_parameters(whole))
    shorter = PretrainedModel(str(folder), num_layers=2)
    tokens = jnp.asarray(PROMPT.prefix)[None]
    hidden = nnx.jit(Decoder.hidden_states)(whole, tokens)
    loaded = shorter.load(0)
    assert (loaded.config, shorter.decoder_config()) == (whole.config.truncated(2), whole.config.truncated(2))
    assert_close(nnx.jit(Decoder.logits)(loaded, tokens), whole.head_logits(hidden[2]))
    with pytest.raises(UserError, match=rf"model\.num_layers: the model has {LAYERS} layers, not {LAYERS + 1}"):
        PretrainedModel(str(folder), num_layers=LAYERS + 1).load(0)
    with pytest.raises(UserError, match="num_layers"):
        PretrainedModel(str(folder), num_layers=0)
    _, record = starting_model(shorter, LoraSettings(), 0)
    assert record is not None
    moved = folder.rename(tmp_path / "moved")
    assert record.open(str(moved), "float32").config.num_layers == 2


@pytest.mark.parametrize("bad", [-1, 96, 10**6])
def test_ids_without_an_embedding_are_refused_or_poison_the_states(bad: int) -> None:
    """Traced ids cannot raise; NaN states make the ranker and the trainer refuse their scores and losses."""
    blocks = [[[1, 2], [3], [4, 5]], [[1, 2], [min(bad, 95) if bad > 0 else 1], [4, 5]]]
    where = TokenLayout.from_blocks(blocks, suffix_offset=64)
    tokens = where.tokens.copy()
    tokens[1, where.shape.prefix] = bad
    where = replace(where, tokens=tokens)
    with pytest.raises(UserError, match=rf"token id {bad} is none of the model's 96"):
        decoder().states_at(where, 1, visibility=BLOCKRANK)
    traced = np.asarray(states_at(decoder(), on_device(where), layer=1))
    assert np.isfinite(traced[0]).all()
    assert np.isnan(traced[1]).any()
