"""Adapters: the base to the bit when new, gradients by the dense chain rule, merging, truncation, targets."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from training_helpers import OBJECTIVE, make_batch, tiny_model

from blockrank.attention.visibility import BLOCKRANK
from blockrank.errors import UserError
from blockrank.losses import ranking_loss
from blockrank.models.loading import flat_parameters
from blockrank.models.lora import LoraSettings, add_adapters, is_adapter, merge_adapters
from blockrank.rankers.readout import attention_scores

EVERY = r".*\.kernel"
LORA = LoraSettings(rank=2, alpha=3.0, targets=EVERY)


def adapted(settings: LoraSettings = LORA, *, trained: bool = True, base: nnx.Module | None = None) -> nnx.Module:
    """A tiny model with adapters, as new or with a `b` that is not 0."""
    model = add_adapters(base or tiny_model(), settings, seed=1)
    if trained:
        for path, leaf in nnx.to_flat_state(nnx.state(model)):
            if path[-2:] == ("lora", "b"):
                key = jax.random.fold_in(jax.random.key(5), len(str(path)))
                leaf.set_value(0.3 * jax.random.normal(key, leaf.get_value().shape))
    return model


def loss_of(model: nnx.Module, **changes) -> jax.Array:
    return ranking_loss(model, make_batch(1).data, dataclasses.replace(OBJECTIVE, **changes))[0]


def gradients(model: nnx.Module, **changes) -> dict[str, jax.Array]:
    graph, state = nnx.split(model)
    found = jax.jit(jax.grad(lambda s: loss_of(nnx.merge(graph, s), **changes)))(state)
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(found)}


def test_new_adapters_change_nothing_to_the_bit():
    base, model = tiny_model(), adapted(trained=False)
    assert float(loss_of(model)) == float(loss_of(base))
    tokens = np.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(model.logits(tokens), base.logits(tokens))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_are_those_of_the_merged_kernel_by_the_chain_rule(remat):
    """W' = W + s a b: dL/da = s dL/dW' b^T and dL/db = s a^T dL/dW', layer by layer."""
    model = adapted()
    dense, found, values = gradients(merge_adapters(model)), gradients(model, remat=remat), flat_parameters(model)
    kernels = [path.removesuffix(".lora.a") for path in values if path.endswith(".lora.a")]
    assert len(kernels) == 7
    scale = LORA.alpha / LORA.rank
    for path in kernels:
        a, b, full = values[f"{path}.lora.a"], values[f"{path}.lora.b"], dense[f"{path}.kernel"]
        wanted = {"a": scale * full @ b.swapaxes(1, 2), "b": scale * a.swapaxes(1, 2) @ full}
        for name, gradient in wanted.items():
            largest = float(np.abs(gradient).max())
            assert largest > 0
            np.testing.assert_allclose(found[f"{path}.lora.{name}"], gradient, atol=2e-5 * largest, err_msg=path)


def test_merged_scores_and_logits_equal_unmerged_also_when_truncated():
    model = adapted()
    merged, layout = merge_adapters(model), make_batch(2).data.layout
    assert nnx.graphdef(merged) == nnx.graphdef(tiny_model())
    tokens = np.arange(12).reshape(2, 6)
    np.testing.assert_allclose(model.logits(tokens), merged.logits(tokens), atol=1e-5)
    read = partial(attention_scores, layout=layout, score_layer=1, visibility=BLOCKRANK, aggregation="sum")
    scores = [read(m) for m in (model, merged, model.truncate(1))]
    for other in scores[1:]:
        np.testing.assert_allclose(scores[0], other, atol=1e-5)
    plain = read(tiny_model())
    assert np.abs(np.asarray(scores[0] - plain)).max() > 1e-3


def test_targets_are_chosen_by_the_kernels_path():
    model = adapted(LoraSettings(targets=r"blocks\.mlp\.(gate|up)\.kernel"))
    assert [path for path in flat_parameters(model) if is_adapter(path)] == [
        f"blocks.mlp.{name}.lora.{part}" for name in ("gate", "up") for part in "ab"
    ]
    assert not any(is_adapter(path) for path in flat_parameters(tiny_model()))


def test_targets_that_match_nothing_and_bad_settings_are_told():
    with pytest.raises(UserError, match=r"optimizer\.lora\.targets='head.*blocks\.mlp\.down\.kernel"):
        add_adapters(tiny_model(), LoraSettings(targets=r"head\.kernel"), 0)
    for change, field in (({"rank": 0}, "rank"), ({"alpha": 0.0}, "alpha"), ({"targets": "*"}, "targets")):
        with pytest.raises(UserError, match=f"^{field}="):
            LoraSettings(**change)
