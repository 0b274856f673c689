"""Texts to embeddings: a Flax encoder over all devices of this host, in batches of few static shapes.

B texts, T tokens, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from blockrank.errors import UserError
from blockrank.models.encoder import Encoder
from blockrank.models.hf_encoder import encoder_path
from blockrank.models.loading import load_encoder, weights_fingerprint
from blockrank.models.sentence import SentenceSettings, pool, read_sentence_settings
from blockrank.packing import round_up, round_up_geometric
from blockrank.prompts.tokenizer import Tokenizer, load_tokenizer
from blockrank.retrieval.devices import everywhere, local_mesh, spread_rows
from blockrank.retrieval.settings import EncoderSettings

SHORTEST = 16
"""Tokens of the narrowest batch; below, a batch's cost is not its tokens."""
IN_FLIGHT = 2
"""Batches dispatched before the first of them is fetched."""


def embed_program(
    encoder: Encoder, settings: SentenceSettings
) -> Callable[[nnx.State, Int[Array, "B T"], Int[Array, " B"]], Float[Array, "B D"]]:
    """The jitted function (parameters, tokens, lengths) -> embeddings of such an encoder, which may be abstract.

    Parameters lie `everywhere`, tokens int32 [B, T] (padding from a text's length on) and lengths as `spread_rows`
    says, B a multiple of the devices. Embeddings lie as the texts do: devices exchange nothing.
    """
    graph = nnx.graphdef(encoder)

    def embed(state: nnx.State, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Float[Array, "B D"]:
        mask = jnp.arange(tokens.shape[1]) < lengths[:, None]
        return pool(nnx.merge(graph, state)(tokens, mask), mask, settings.pooling, settings.normalize)

    return jax.jit(embed)


def plan_batches(
    lengths: Sequence[int], *, limit: int, batch_tokens: int, devices: int
) -> Iterator[tuple[np.ndarray, int, int]]:
    """(indices of the texts, rows, width) of each batch: longest texts first, rows a multiple of the devices.

    `lengths`: tokens of each text, at most `limit`. All devices take about `batch_tokens` tokens at once.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    start = 0
    while start < len(order):
        width = min(limit, max(SHORTEST, round_up_geometric(lengths[order[start]])))
        full = max(devices, batch_tokens // width // devices * devices)
        chosen = order[start : start + full]
        rows = min(full, round_up(1 << (len(chosen) - 1).bit_length(), devices))
        yield chosen, rows, width
        start += len(chosen)


class BiEncoder:
    """A text's embedding is the pooled states of `[CLS] text [SEP]`, cut at `max_length` tokens.

    Weights are on every device of `mesh`, batches spread over all of them. Texts are taken longest first, so a
    batch is as wide as its longest text, to the next of few sizes; an embedding does not depend on its batch mates.
    """

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        settings: SentenceSettings,
        *,
        batch_tokens: int = 16_384,
        mesh: Mesh | None = None,
    ):
        positions = encoder.config.max_positions
        limit = positions if settings.max_length is None else settings.max_length
        if not 3 <= limit <= positions:
            raise UserError(f"max_length={limit} must be 3 to {positions}, the encoder's number of positions")
        if tokenizer.vocab_size > encoder.config.vocab_size:
            raise UserError(f"the tokenizer has {tokenizer.vocab_size} ids, the encoder {encoder.config.vocab_size}")
        self.settings = replace(settings, max_length=limit)
        self.size = encoder.config.hidden_size
        self.mesh = local_mesh() if mesh is None else mesh
        self._tokenizer, self._limit, self._batch_tokens = tokenizer, limit, batch_tokens
        self._first, self._last = tokenizer.special_id("[CLS]"), tokenizer.special_id("[SEP]")
        self._identity = {
            "weights": weights_fingerprint(encoder),
            "dtype": str(jnp.dtype(encoder.dtype)),
            "tokenizer": tokenizer.fingerprint,
        }
        self._weights = jax.device_put(nnx.state(encoder), everywhere(self.mesh))
        self._embed = embed_program(encoder, settings)

    @classmethod
    def load(cls, config: EncoderSettings, mesh: Mesh | None = None) -> BiEncoder:
        """The bi-encoder that a configuration names. Raises `UserError` for a folder that is none."""
        folder, settings = read_sentence_settings(encoder_path(config.path))
        given = {name: getattr(config, name) for name in asdict(settings) if getattr(config, name, None) is not None}
        dtype = jnp.dtype(config.dtype)
        encoder = load_encoder(folder, dtype=dtype, param_dtype=dtype)
        tokenizer = load_tokenizer(folder)
        return cls(encoder, tokenizer, replace(settings, **given), batch_tokens=config.batch_tokens, mesh=mesh)

    def identity(self) -> dict[str, Any]:
        """What embeddings depend on."""
        return {**self._identity, "settings": asdict(self.settings)}

    def embed_queries(self, texts: Sequence[str]) -> Float[np.ndarray, "n D"]:
        return self._embed_texts([self.settings.query_prefix + text for text in texts])

    def embed_documents(self, texts: Sequence[str]) -> Float[np.ndarray, "n D"]:
        return self._embed_texts([self.settings.document_prefix + text for text in texts])

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text with [CLS] and [SEP], at most `max_length`."""
        if self.settings.lower_case:
            texts = [text.lower() for text in texts]
        kept = self._limit - 2
        return [[self._first, *ids[:kept], self._last] for ids in self._tokenizer.encode_batch(texts)]

    def _embed_texts(self, texts: Sequence[str]) -> Float[np.ndarray, "n D"]:
        ids = self.tokenize(texts)
        out = np.empty((len(ids), self.size), np.float32)
        pending: list[tuple[np.ndarray, Array]] = []
        for chosen, rows, width in self.batches([len(tokens) for tokens in ids]):
            tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
            for row, index in enumerate(chosen):
                lengths[row] = len(ids[index])
                tokens[row, : lengths[row]] = ids[index]
            placed = jax.device_put((tokens, lengths), spread_rows(self.mesh))
            pending.append((chosen, self._embed(self._weights, *placed)))
            if len(pending) > IN_FLIGHT:
                _fetch(out, *pending.pop(0))
        for chosen, embeddings in pending:
            _fetch(out, chosen, embeddings)
        if not np.isfinite(out).all():
            raise UserError("the encoder gave embeddings with NaN or infinity; check its weights, or use dtype=float32")
        return out

    def batches(self, lengths: Sequence[int]) -> Iterator[tuple[np.ndarray, int, int]]:
        """`plan_batches` within this encoder's limits, over its devices."""
        return plan_batches(lengths, limit=self._limit, batch_tokens=self._batch_tokens, devices=self.mesh.size)


def _fetch(out: np.ndarray, chosen: np.ndarray, embeddings: Array) -> None:
    out[chosen] = np.asarray(embeddings)[: len(chosen)]
