"""What documents leave behind in a decoder, kept: their keys and values, so that only the suffix has to be run.

Under BlockRank a document sees the prefix and itself, and every document starts at position |prefix|. So its keys
(after RoPE) and values depend on prefix and document alone, in whatever list it stands and at whatever place, and are
the same numbers that a pass over the whole prompt would compute (arXiv 2510.05396, section 4.1). The suffix then
attends, layer by layer, to the prefix, the kept documents and its own past.

B batch, P prefix, R rows' tokens, Q suffix, L layers before the score layer, A = 2L + 1 kept arrays (key and value of
each layer, then the keys at the score layer), K kv heads, H head dim, D model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from blockrank.attention.dispatch import attend_to
from blockrank.attention.visibility import Tokens, Visibility
from blockrank.layout import HostArray, TokenLayout
from blockrank.models.config import DecoderConfig
from blockrank.models.decoder import TruncatedDecoder
from blockrank.models.quantize import dequantize_kernel, quantize_kernel
from blockrank.models.stack import Block, scan_blocks

KeptDtype = Literal["float32", "bfloat16", "int8"]


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=[])
@dataclass(frozen=True)
class Kept:
    """Kept arrays: `values` [A, B, R, K, H]; for int8 codes, with float32 `scales` [A, B, R, K]."""

    values: HostArray
    scales: HostArray | None = None

    def layers(self) -> tuple[Kept, Kept]:
        """Those of the layers before the score layer, [L, 2, B, R, K, H], and the keys at the score layer."""

        def paired(x: Array) -> Array:
            return x[:-1].reshape(x.shape[0] // 2, 2, *x.shape[1:])

        return jax.tree.map(paired, self), jax.tree.map(lambda x: x[-1], self)

    def restored(self, dtype: jax.typing.DTypeLike) -> Array:
        """The numbers that are kept, in `dtype`."""
        if self.scales is None:
            return jnp.asarray(self.values).astype(dtype)
        return dequantize_kernel(self.values[..., None], self.scales[..., None])[..., 0].astype(dtype)


def keep(values: Float[Array, "A B R K H"], dtype: KeptDtype) -> Kept:
    """The arrays in the dtype they are kept in. int8: the largest of a token's head is 127, so that no number moves by
    more than half its scale."""
    if dtype != "int8":
        return Kept(values.astype(dtype))
    codes, scales = quantize_kernel(values[..., None])
    return Kept(codes[..., 0], scales[..., 0])


@dataclass(frozen=True)
class KeptFormat:
    """A document of n tokens as bytes: scales [A, n, K], if any, then values [A, n, K, H], little-endian."""

    arrays: int
    kv_heads: int
    head_dim: int
    dtype: KeptDtype

    @staticmethod
    def of(config: DecoderConfig, dtype: KeptDtype) -> KeptFormat:
        """For a model truncated at its score layer."""
        return KeptFormat(2 * config.num_layers + 1, config.num_kv_heads, config.head_dim, dtype)

    @property
    def item(self) -> np.dtype:
        return np.dtype(jnp.dtype(self.dtype))

    @property
    def token_bytes(self) -> int:
        """What a token takes."""
        heads = self.arrays * self.kv_heads
        return heads * self.head_dim * self.item.itemsize + (4 * heads if self.dtype == "int8" else 0)

    def pack(self, kept: Kept) -> np.ndarray:
        """uint8 [n * token_bytes] of one document's host arrays [A, n, K, H]."""
        parts = [array for array in (kept.scales, kept.values) if array is not None]
        return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])

    def unpack(self, blob: np.ndarray) -> Kept:
        """The document of `pack`, as views. Raises `ValueError` for bytes of another format."""
        tokens, rest = divmod(len(blob), self.token_bytes)
        if rest:
            raise ValueError(f"{len(blob)} bytes are no whole tokens of {self.token_bytes}")
        shape = self.arrays, tokens, self.kv_heads, self.head_dim
        codes = len(blob) - prod(shape) * self.item.itemsize
        scales = blob[:codes].view(np.float32).reshape(shape[:-1]) if self.dtype == "int8" else None
        return Kept(blob[codes:].view(self.item).reshape(shape), scales)

    def empty(self, lists: int, tokens: int) -> Kept:
        """Host arrays [A, B, R, K, H] to be filled."""
        shape = self.arrays, lists, tokens, self.kv_heads, self.head_dim
        return Kept(np.empty(shape, self.item), np.empty(shape[:-1], np.float32) if self.dtype == "int8" else None)


def read_documents(
    model: TruncatedDecoder, layout: TokenLayout, *, visibility: Visibility, backend: str = "auto"
) -> Float[Array, "A B T K H"]:
    """The arrays to be kept of a layout without suffix, prefix included, in the model's dtype."""
    states, (k, v) = model.keys_values(layout, visibility=visibility, backend=backend)
    probe = model.score_block
    last = probe.attention.keys(probe.attention_norm(states), layout.positions)
    pairs = jnp.stack([k, v], axis=1).reshape(-1, *last.shape)
    return jnp.concatenate([pairs, last[None].astype(pairs.dtype)])


def suffix_states(
    model: TruncatedDecoder,
    layout: TokenLayout,
    prefix: Float[Array, "A #B P K H"],
    documents: Kept,
    *,
    visibility: Visibility,
    backend: str = "auto",
) -> Float[Array, "B Q D"]:
    """The suffix's states that enter the score layer, given what prefix and documents left at their places."""
    where, tokens = layout.suffix, Tokens.of(layout)
    queries = Tokens(*(field[:, where] for field in tokens))
    lists = len(layout.tokens)

    def step(block: Block, state: Array, layer: tuple[Array, Kept]) -> tuple[Array, None]:
        before, kept = layer

        def look(q: Array, k: Array, v: Array, *, sliding_window: None) -> Array:
            del sliding_window
            of_documents = kept.restored(q.dtype)

            def joined(index: int, own: Array) -> Array:
                first = jnp.broadcast_to(before[index], (lists, *before.shape[2:])).astype(own.dtype)
                return jnp.concatenate([first, of_documents[index], own], axis=1)

            options = {"visibility": visibility, "backend": backend}
            return attend_to(q, joined(0, k), joined(1, v), queries=queries, keys=tokens, **options)

        return block(state, layout.positions[:, where], look), None

    state = model.embed(layout.tokens[:, where], model.dtype)
    layers, _ = documents.layers()
    before, _ = Kept(prefix).layers()
    return scan_blocks(model.blocks, step, state, (before.values, layers))[0]
