"""Prompts, layouts and tiny decoders for the tests of layout, attention, model and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from hypothesis import strategies as st

from blockrank.layout import LayoutShape, TokenLayout
from blockrank.models.config import DecoderConfig
from blockrank.models.decoder import Decoder
from blockrank.models.loading import random_decoder
from blockrank.prompts.encode import PromptSegments

VOCABULARY = 96
SHAPE = LayoutShape(documents=6, prefix=8, rows=4, row_length=16, suffix=8, signals=2, labels=3)
"""Holds every prompt of `small_prompts`, so that examples share compiled programs."""


def prompt_of(
    prefix: Sequence[int],
    documents: Sequence[Sequence[int]],
    suffix: Sequence[int],
    signals: Sequence[int] = (-2, -1),
    answer: int = 0,
) -> PromptSegments:
    """A prompt of given token ids; `signals` count from the end of the suffix before its `answer` label tokens."""
    start = len(suffix) - answer
    return PromptSegments(
        prefix=np.asarray(prefix, np.int32),
        documents=tuple(np.asarray(ids, np.int32) for ids in documents),
        document_index=tuple(range(len(documents))),
        suffix=np.asarray(suffix, np.int32),
        signals=tuple(start + signal for signal in signals),
        answer_start=start,
        truncated=(False,) * len(documents),
        query_truncated=False,
    )


def numbered_prompt(
    prefix: int, documents: Sequence[int], suffix: int, signals: Sequence[int] = (-2, -1), answer: int = 0
) -> PromptSegments:
    """A prompt of given lengths whose tokens are 1, 2, 3, ... in reading order, so that a token names its place."""
    ends = np.cumsum([prefix, *documents, suffix])
    blocks = np.split(np.arange(1, ends[-1] + 1), ends[:-1])
    return prompt_of(blocks[0], blocks[1:-1], blocks[-1], signals, answer)


def random_prompt(
    seed: int,
    prefix: int,
    documents: Sequence[int],
    suffix: int,
    signals: Sequence[int] = (-2, -1),
    answer: int = 0,
) -> PromptSegments:
    """A prompt of given lengths with random token ids from 1 on."""
    rng = np.random.default_rng(seed)
    lengths = [prefix, *documents, suffix]
    blocks = [rng.integers(1, VOCABULARY, length) for length in lengths]
    return prompt_of(blocks[0], blocks[1:-1], blocks[-1], signals, answer)


@st.composite
def small_prompts(draw: st.DrawFn, min_documents: int = 0) -> PromptSegments:
    """Numbered prompts that fit `SHAPE`, with up to three label tokens."""
    lengths = draw(st.lists(st.integers(1, 10), min_size=min_documents, max_size=6))
    answer = draw(st.integers(0, 3))
    return numbered_prompt(draw(st.integers(1, 8)), lengths, draw(st.integers(2 + answer, 8)), (-2, -1), answer)


@st.composite
def batches(draw: st.DrawFn) -> list[PromptSegments]:
    return draw(st.lists(small_prompts(), min_size=1, max_size=3))


def tiny_config(
    layers: int = 3,
    *,
    vocabulary: int = VOCABULARY,
    windows: Sequence[int | None] | None = None,
    padding_id: int | None = None,
    tie_embeddings: bool = True,
) -> DecoderConfig:
    """Hidden size 32, 2 kv heads of 2 query heads each; weights large enough that attention is far from uniform."""
    return DecoderConfig(
        family="llama",
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        windows=(None,) * layers if windows is None else tuple(windows),
        tie_embeddings=tie_embeddings,
        initializer_range=0.25,
        padding_id=padding_id,
    )


def tiny_decoder(config: DecoderConfig | None = None, seed: int = 0) -> Decoder:
    return random_decoder(config or tiny_config(), seed)


HASTE = {"xla_backend_optimization_level": 0}
"""Compiler options that halve the time of programs that run once or twice on tiny arrays."""


def model_jit(function: Callable[..., Any], *static: str) -> Callable[..., Any]:
    """`function(model, layout, **static)` compiled in haste; the model's parameters are arguments."""

    def run(params: nnx.State, layout: TokenLayout, *, graph: nnx.GraphDef, **options: Any) -> Any:
        return function(nnx.merge(graph, params), layout, **options)

    compiled = jax.jit(run, static_argnames=("graph", *static), compiler_options=HASTE)

    def call(model: nnx.Module, layout: TokenLayout, **options: Any) -> Any:
        graph, params = nnx.split(model)
        return compiled(params, layout, graph=graph, **options)

    return call


def on_device(layout: TokenLayout) -> TokenLayout:
    return jax.tree.map(jax.numpy.asarray, layout)
