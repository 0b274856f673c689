"""How a score is read from attention (arXiv 2510.05396, section 4.3): the mass signal tokens put on each document.

B batch, N documents, S signals, T stream, K kv heads, G query heads per kv head, H head dim, L layers.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from blockrank.attention.merge import Shards
from blockrank.attention.precision import matmul_precision
from blockrank.attention.reference import masked_softmax_lse
from blockrank.attention.visibility import Visibility
from blockrank.errors import FieldError
from blockrank.layout import TokenLayout
from blockrank.models.decoder import Decoder, Probe, TruncatedDecoder
from blockrank.models.stack import Block
from blockrank.parallel import BATCH, active_mesh

Aggregation = Literal["sum", "mean"]


def check_length_normalization(exponent: float) -> None:
    """Raises `FieldError` for an exponent outside [0, 1]."""
    if isinstance(exponent, bool) or not isinstance(exponent, int | float) or not 0 <= exponent <= 1:
        raise FieldError(
            "length_normalization", f"{exponent!r} must be a number from 0 (a document's whole mass) to 1 (per token)"
        )


def gather_suffix(values: Array, layout: TokenLayout, indices: Int[Array, "B S"]) -> Array:
    """`values` [B, T, ...] at suffix indices [B, S]; an absent index (-1) reads the first suffix token."""
    return _picked(values[:, layout.suffix], indices)


def _picked(suffix: Array, indices: Int[Array, "B S"]) -> Array:
    places = jnp.maximum(indices, 0).reshape(*indices.shape, *(1,) * (suffix.ndim - 2))
    return jnp.take_along_axis(suffix, places, axis=1)


def document_mass(
    q: Float[Array, "B S K G H"],
    k: Float[Array, "B R K H"],
    segment_ids: Int[Array, "B R"],
    signal_mask: Bool[Array, "B S"],
    num_documents: int,
    aggregation: Aggregation,
    shards: int = 1,
    length_normalization: float = 0.0,
) -> Float[Array, "B N"]:
    """Softmax of q.k over document tokens only, mean over heads, summed per document, then over signal tokens.

    float32. Sums to the number of signal tokens over a list (`sum`) or to 1 (`mean`); 0 for a list without documents.
    Of a list in `shards`, each entry holds some documents' keys and gets the scores of all documents.
    `length_normalization` is the exponent of `per_length`; 0 leaves the mass as it is.
    """
    options = {"num_documents": num_documents, "aggregation": aggregation, "exponent": length_normalization}
    mesh = active_mesh()
    if mesh is None:
        return _document_mass(q, k, segment_ids, signal_mask, shards=Shards(shards), head_axis=None, **options)
    heads = PartitionSpec(*BATCH, None, "tensor")
    return jax.shard_map(
        partial(
            _document_mass,
            shards=Shards(shards, "doc"),
            head_axis="tensor" if mesh.shape["tensor"] > 1 else None,
            **options,
        ),
        in_specs=(heads, heads, BATCH, BATCH),
        out_specs=BATCH,
        check_vma=False,
    )(q, k, segment_ids, signal_mask)


def _document_mass(
    q: Float[Array, "B S K G H"],
    k: Float[Array, "B R K H"],
    segment_ids: Int[Array, "B R"],
    signal_mask: Bool[Array, "B S"],
    *,
    num_documents: int,
    aggregation: Aggregation,
    exponent: float,
    shards: Shards,
    head_axis: str | None,
) -> Float[Array, "B N"]:
    """`document_mass` on one device: its heads, among the shards of its lists."""
    logits = jnp.einsum(
        "bskgh,brkh->bkgsr", q, k, precision=matmul_precision(q.dtype), preferred_element_type=jnp.float32
    )
    of_documents = segment_ids >= 0
    weights, lse = masked_softmax_lse(logits * q.shape[-1] ** -0.5, of_documents[:, None, None, None])
    if shards.count > 1:
        weights *= shards.shares(lse)[..., None]
    mass = jnp.sum(jnp.where(signal_mask[..., None], weights.mean(axis=(1, 2)), 0.0), axis=1)
    if aggregation == "mean":
        mass /= jnp.maximum(signal_mask.sum(axis=-1), 1)[:, None]
    segments = jnp.where(of_documents, segment_ids, num_documents)
    per_document = jax.vmap(lambda m, s: jax.ops.segment_sum(m, s, num_documents + 1)[:num_documents])
    mass = per_document(mass, segments)
    mass = mass if head_axis is None else jax.lax.pmean(mass, head_axis)
    mass = mass if shards.count == 1 else shards.sum(mass)
    if exponent == 0:
        return mass
    lengths = per_document(of_documents.astype(jnp.float32), segments)
    return per_length(mass, lengths if shards.count == 1 else shards.sum(lengths), exponent)


def per_length(mass: Float[Array, "*B N"], lengths: Float[Array, "*B N"], exponent: float) -> Float[Array, "*B N"]:
    """Masses over documents' token counts to the power `exponent`, scaled so that those of a list add up as before.

    1 is the mass per token; a document of no tokens has none.
    """
    weighted = mass / jnp.maximum(lengths, 1.0) ** exponent
    total = weighted.sum(axis=-1, keepdims=True)
    return weighted * (mass.sum(axis=-1, keepdims=True) / jnp.where(total > 0, total, 1.0))


def read_scores(
    probe: Probe | Block,
    states: Float[Array, "B T D"],
    layout: TokenLayout,
    aggregation: Aggregation,
    length_normalization: float = 0.0,
) -> Float[Array, "B N"]:
    """Document scores from the states that enter a layer: k of documents and q of signals, nothing else."""
    q, k = _queries_and_keys(probe, states, layout)
    return _masses(q, k, layout, aggregation, length_normalization)


def read_kept_scores(
    probe: Probe | Block,
    suffix: Float[Array, "B Q D"],
    k: Float[Array, "B R K H"],
    layout: TokenLayout,
    aggregation: Aggregation,
    length_normalization: float = 0.0,
) -> Float[Array, "B N"]:
    """`read_scores` from the suffix's states alone, where the documents' keys at that layer are known."""
    q = _queries(probe, probe.attention_norm(suffix), layout)
    return _masses(q, k, layout, aggregation, length_normalization)


def _masses(
    q: Float[Array, "B S K G H"],
    k: Float[Array, "B R K H"],
    layout: TokenLayout,
    aggregation: Aggregation,
    length_normalization: float,
) -> Float[Array, "B N"]:
    sizes = layout.shape
    return document_mass(
        *(q, k, layout.segment_ids[:, layout.rows], layout.signals >= 0),
        *(sizes.documents, aggregation, sizes.shards, length_normalization),
    )


def signal_masses(probe: Probe | Block, states: Float[Array, "B T D"], layout: TokenLayout) -> Float[Array, "B S N"]:
    """The mass each signal token puts on each document; `read_scores` with `sum` is their sum. For analysis."""
    q, k = _queries_and_keys(probe, states, layout)
    segments, sizes = layout.segment_ids[:, layout.rows], layout.shape

    def alone(signal: tuple[Array, Array]) -> Float[Array, "B N"]:
        q, present = signal
        return document_mass(q[:, None], k, segments, present[:, None], sizes.documents, "sum", sizes.shards)

    masses = jax.lax.map(alone, (jnp.moveaxis(q, 1, 0), jnp.moveaxis(jnp.asarray(layout.signals) >= 0, 1, 0)))
    return jnp.moveaxis(masses, 0, 1)


def _queries_and_keys(
    probe: Probe | Block, states: Float[Array, "B T D"], layout: TokenLayout
) -> tuple[Float[Array, "B S K G H"], Float[Array, "B R K H"]]:
    """q of the signal tokens and k of the rows, from the states that enter a layer."""
    normed, rows = probe.attention_norm(states), layout.rows
    q = _queries(probe, normed[:, layout.suffix], layout)
    return q, probe.attention.keys(normed[:, rows], layout.positions[:, rows])


def _queries(probe: Probe | Block, normed: Float[Array, "B Q D"], layout: TokenLayout) -> Float[Array, "B S K G H"]:
    """q of the signal tokens, from the suffix's normed states."""
    positions = gather_suffix(layout.positions, layout, layout.signals)
    return probe.attention.queries(_picked(normed, layout.signals), positions)


def attention_scores(
    model: Decoder | TruncatedDecoder,
    layout: TokenLayout,
    score_layer: int,
    *,
    visibility: Visibility,
    aggregation: Aggregation,
    length_normalization: float = 0.0,
    backend: str = "auto",
) -> Float[Array, "B N"]:
    """A batch's scores at one layer, running only the layers before it."""
    states = model.states_at(layout, score_layer, visibility=visibility, backend=backend)
    return read_scores(model.probe(score_layer), states, layout, aggregation, length_normalization)


def layer_scores(
    model: Decoder,
    layout: TokenLayout,
    *,
    visibility: Visibility,
    aggregation: Aggregation,
    length_normalization: float = 0.0,
    backend: str = "auto",
) -> Float[Array, "L B N"]:
    """The scores every layer would give, in one pass."""
    return model.observe(
        layout,
        lambda block, states, _: read_scores(block, states, layout, aggregation, length_normalization),
        visibility=visibility,
        backend=backend,
    )
