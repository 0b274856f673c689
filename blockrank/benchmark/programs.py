"""A system as one compiled program over one prompt, and the matrix product it is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from blockrank.attention.precision import matmul_precision
from blockrank.attention.visibility import PATTERNS
from blockrank.benchmark.settings import BenchConfig, System
from blockrank.costs.flops import Work, needed_flops
from blockrank.layout import TokenLayout
from blockrank.models.decoder import Decoder, TruncatedDecoder
from blockrank.models.generate import greedy
from blockrank.packing import round_up
from blockrank.prompts.encode import PromptSegments
from blockrank.rankers.readout import attention_scores, read_scores

MATMUL_PAIRS = 4
"""Products [T, D] x [D, F] x [F, D] in one program, so that starting it costs nothing."""


@dataclass(frozen=True)
class Program:
    """`run()` does the whole work once and waits for the result; `facts` goes into the report."""

    run: Callable[[], np.ndarray]
    facts: dict[str, Any]


def system_program(config: BenchConfig, system: System, prompt: PromptSegments) -> Program:
    """Loads the weights, lays the prompt out and compiles."""
    decoder = config.model.load(config.seed)
    sizes, layer = decoder.config, config.layer_of(decoder.config)
    started = time.perf_counter()
    layout = lay_out(config, system, prompt)
    laid_out = time.perf_counter() - started
    cut = system.depth == "score_layer"
    model = decoder.truncate(layer) if cut else decoder
    del decoder
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda weights: weights.astype(model.dtype), state)
    del model
    function = _function(config, system, layer)
    run, compiled = _compile(lambda state, layout: function(nnx.merge(graph, state), layout), state, layout)
    decoded = config.decode_tokens if system.reading == "decode" else 0
    work = Work(layer if cut else sizes.num_layers, system.visibility == "blockrank", decoded)
    facts = {
        "blocks": work.blocks,
        "tokens": int(layout.token_count()[0]),
        "padded_tokens": layout.shape.tokens,
        "needed_flops": needed_flops(sizes, prompt, work),
        "layout_seconds": laid_out,
        "compile_seconds": compiled,
    }
    return Program(run, facts)


def lay_out(config: BenchConfig, system: System, prompt: PromptSegments) -> TokenLayout:
    """As the ranker does it; dense attention gets one row with hardly any padding, since rows are nothing to it."""
    settings = config.settings(system)
    if system.visibility == "dense":
        total = sum(map(len, prompt.documents))
        return replace(settings, row_length=round_up(total, 128)).lay_out([prompt], bucket=False)
    return settings.lay_out([prompt])


def _function(config: BenchConfig, system: System, layer: int) -> Callable[[Any, TokenLayout], Array]:
    visibility, backend = PATTERNS[system.visibility], system.backend
    if system.reading == "decode":
        return lambda model, layout: greedy(model, layout, config.decode_tokens, visibility=visibility, backend=backend)
    settings = config.settings(system)
    aggregation, exponent = settings.signal_aggregation, settings.length_normalization

    def whole(model: Decoder, layout: TokenLayout) -> Float[Array, "B N"]:
        _, entering = model.states(layout, visibility=visibility, tap=layer, backend=backend)
        return read_scores(model.probe(layer), entering, layout, aggregation, exponent)

    def cut(model: TruncatedDecoder, layout: TokenLayout) -> Float[Array, "B N"]:
        return attention_scores(
            *(model, layout, layer),
            visibility=visibility,
            aggregation=aggregation,
            length_normalization=exponent,
            backend=backend,
        )

    return cut if system.depth == "score_layer" else whole


def matmul_program(config: BenchConfig, tokens: int) -> Program:
    """Products of the model's own shape: `tokens` states up to the feed-forward width and down again."""
    sizes = config.model.decoder_config()
    dtype = jnp.dtype(config.model.dtype)
    d, f = sizes.hidden_size, sizes.intermediate_size
    rng = np.random.default_rng(0)
    x, up, down = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((tokens, d), (d, f), (f, d)))

    def chain(x: Array, up: Array, down: Array) -> Array:
        def pair(x: Array, _: None) -> tuple[Array, None]:
            wide = jnp.matmul(x, up, precision=matmul_precision(x.dtype))
            return jnp.matmul(wide, down, precision=matmul_precision(x.dtype)), None

        return jax.lax.scan(pair, x, None, length=MATMUL_PAIRS)[0][0, 0]

    run, compiled = _compile(chain, x, up / f**0.5, down / d**0.5)
    flops = MATMUL_PAIRS * 4 * tokens * d * f
    return Program(run, {"tokens": tokens, "needed_flops": flops, "compile_seconds": compiled})


def _compile(function: Callable[..., Array], *arguments: Any) -> tuple[Callable[[], np.ndarray], float]:
    lowered = jax.jit(function).lower(*arguments)
    started = time.perf_counter()
    program = lowered.compile()
    return lambda: np.asarray(program(*arguments)), time.perf_counter() - started
