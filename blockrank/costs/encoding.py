"""Embedding a corpus with a bi-encoder: the programs of its batches, and how long all its passages take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from blockrank.chips import Chip
from blockrank.costs.programs import Planned, draw_lengths
from blockrank.costs.report import ProgramCosts
from blockrank.errors import UserError, at_least
from blockrank.layout import LayoutShape
from blockrank.models.config import EncoderConfig
from blockrank.models.encoder import Encoder
from blockrank.models.hf_encoder import parse_config
from blockrank.models.loading import cast_parameters
from blockrank.models.sentence import Pooling, SentenceSettings
from blockrank.retrieval.bi_encoder import embed_program, plan_batches
from blockrank.retrieval.devices import everywhere, local_mesh, spread_rows


@dataclass(frozen=True)
class CorpusConfig:
    """`corpus` in `configs/aot.yaml`: passages to embed, and the encoder, by the fields of its `config.json`.

    Passages have `tokens` tokens on average and at most `longest`, [CLS] and [SEP] included, drawn as in
    `PromptLengths`. `batch_tokens` and `shard_size` are those of `encoder` in `configs/prepare.yaml`.
    """

    config: dict[str, Any]
    dtype: Literal["float32", "bfloat16"]
    pooling: Pooling
    passages: int
    tokens: int
    longest: int
    batch_tokens: int
    shard_size: int

    def __post_init__(self) -> None:
        at_least(self, 1, "passages", "tokens", "batch_tokens", "shard_size")
        at_least(self, self.tokens, "longest")

    def lengths(self) -> np.ndarray:
        """Tokens of the passages of one shard of embeddings, int [n]."""
        count = min(self.shard_size, self.passages)
        return draw_lengths(count, self.tokens, self.longest)


@dataclass(frozen=True)
class Batches:
    """`count` batches of a shard of embeddings run this program."""

    planned: Planned
    count: int


def encoding_programs(corpus: CorpusConfig, devices: Sequence[Any]) -> list[Batches]:
    """The programs for one shard of the corpus, batches spread over all devices, weights on each."""
    encoder = parse_config(corpus.config, "corpus.config")
    if corpus.longest > encoder.max_positions:
        raise UserError(f"corpus.longest={corpus.longest}: the encoder has {encoder.max_positions} positions")
    dtype = jnp.dtype(corpus.dtype)
    model = nnx.eval_shape(lambda: cast_parameters(Encoder(encoder, rngs=nnx.Rngs(0), dtype=dtype), dtype))
    function = embed_program(model, SentenceSettings(pooling=corpus.pooling))
    mesh = local_mesh(devices)
    whole, spread = everywhere(mesh), spread_rows(mesh)

    def placed(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    state = jax.tree.map(lambda leaf: placed(leaf.shape, leaf.dtype, whole), nnx.state(model))
    lengths = corpus.lengths()
    counts: Counter[tuple[int, int]] = Counter()
    needed: Counter[tuple[int, int]] = Counter()
    for chosen, rows, width in plan_batches(
        lengths.tolist(), limit=corpus.longest, batch_tokens=corpus.batch_tokens, devices=mesh.size
    ):
        counts[rows, width] += 1
        needed[rows, width] += encoder_flops(encoder, lengths[chosen])
    programs = []
    for (rows, width), count in counts.items():
        own = rows // mesh.size
        planned = Planned(
            name=f"encode {rows} x {width}",
            function=function,
            arguments=(state, placed((rows, width), jnp.int32, spread), placed((rows,), jnp.int32, spread)),
            mesh=mesh,
            shape=LayoutShape(own, 0, own, width, 0, 0, 0),
            blocks=encoder.num_layers,
            ideal_flops=needed[rows, width] / count / mesh.size,
            layout_flops=encoder_flops(encoder, np.full(own, width)),
        )
        programs.append(Batches(planned, count))
    return programs


def encoder_flops(config: EncoderConfig, lengths: np.ndarray) -> int:
    """Multiplications and additions of texts of these lengths: two per weight and token, four per pair and feature."""
    size = config.hidden_size
    weights = size * (4 * size + 2 * config.intermediate_size)
    tokens, pairs = (int((lengths.astype(np.int64) ** power).sum()) for power in (1, 2))
    return config.num_layers * (2 * weights * tokens + 4 * size * pairs)


def summary(corpus: CorpusConfig, costs: Sequence[ProgramCosts], batches: Sequence[Batches], chip: Chip) -> str:
    """Passages per second by the roofline, and the time of the whole corpus, in words."""
    seconds = sum(row.seconds(chip) * each.count for row, each in zip(costs, batches, strict=True))
    rate = len(corpus.lengths()) / seconds
    whole = corpus.passages / rate
    devices = batches[0].planned.mesh.size
    return (
        f"encoding, by the roofline: {rate:,.0f} passages/s of {corpus.tokens} tokens on average on {devices} chips; "
        f"{corpus.passages:,} passages in {whole:,.0f} s ({whole / 3600:.2g} hours)"
    )
