"""Decoding with a cache against reading everything anew for each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from strategies import HASTE, prompt_of, random_prompt, tiny_config, tiny_decoder

from blockrank.attention.visibility import BLOCKRANK, DENSE, Visibility
from blockrank.layout import TokenLayout
from blockrank.models.generate import greedy
from blockrank.prompts.encode import PromptSegments

COUNT = 4
BATCH = [random_prompt(0, 5, [6, 3, 9], 4), random_prompt(1, 3, [4], 7)]


def lay_out(batch: list[PromptSegments], pattern: Visibility) -> TokenLayout:
    return TokenLayout.from_segments(
        batch, row_length=16, suffix_offset=None if pattern.sequential else 64, bucket=False
    )


def anew(model, batch: list[PromptSegments], pattern: Visibility) -> np.ndarray:
    """The same tokens by whole forward passes over ever longer suffixes, without a cache."""
    graph, state = nnx.split(model)

    @jax.jit
    def last(state: nnx.State, layout: TokenLayout, places: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        states = model.states(layout, visibility=pattern, backend="reference")[0]
        return model.head_logits(jnp.take_along_axis(states, places[:, None, None], axis=1)[:, 0])

    found: list[list[int]] = [[] for _ in batch]
    shape = lay_out([_longer(s, [1] * COUNT) for s in batch], pattern).shape
    for _ in range(COUNT):
        longer = [_longer(s, ids) for s, ids in zip(batch, found, strict=True)]
        offset = None if pattern.sequential else 64
        layout = TokenLayout.from_segments(longer, row_length=16, suffix_offset=offset, shape=shape)
        places = np.asarray([layout.suffix.start + len(s.suffix) - 1 for s in longer])
        logits = np.asarray(last(state, layout, places))
        for ids, row in zip(found, logits, strict=True):
            ids.append(int(row.argmax()))
    return np.asarray(found)


def _longer(segments: PromptSegments, ids: list[int]) -> PromptSegments:
    return prompt_of(segments.prefix, segments.documents, [*segments.suffix, *ids], answer=len(ids))


@pytest.mark.parametrize(
    ("pattern", "windows"), [(DENSE, None), (DENSE, (4, None)), (BLOCKRANK, None)], ids=["dense", "window", "blockrank"]
)
def test_cached_tokens_are_those_of_whole_passes(pattern: Visibility, windows: tuple | None) -> None:
    model = tiny_decoder(tiny_config(2, windows=windows))
    graph, state = nnx.split(model)
    decode = jax.jit(
        lambda state, layout: greedy(nnx.merge(graph, state), layout, COUNT, visibility=pattern, backend="xla"),
        compiler_options=HASTE,
    )
    found = np.asarray(decode(state, lay_out(BATCH, pattern)))
    assert found.tolist() == anew(model, BATCH, pattern).tolist()
    assert len(set(found.ravel().tolist())) > 2, "the model says something"
