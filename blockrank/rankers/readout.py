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
from blockrank.layout import TokenLayout
from blockrank.models.decoder import Decoder, Probe, TruncatedDecoder
from blockrank.models.stack import Block
from blockrank.parallel import BATCH, active_mesh

Aggregation = Literal["sum", "mean"]


def gather_suffix(values: Array, layout: TokenLayout, indices: Int[Array, "B S"]) -> Array:
    """`values` [B, T, ...] at suffix indices [B, S]; an absent index (-1) reads the first suffix token."""
    suffix = values[:, layout.suffix]
    picked = jnp.maximum(indices, 0).reshape(*indices.shape, *(1,) * (suffix.ndim - 2))
    return jnp.take_along_axis(suffix, picked, axis=1)


def document_mass(
    q: Float[Array, "B S K G H"],
    k: Float[Array, "B R K H"],
    segment_ids: Int[Array, "B R"],
    signal_mask: Bool[Array, "B S"],
    num_documents: int,
    aggregation: Aggregation,
    shards: int = 1,
) -> Float[Array, "B N"]:
    """Softmax of q.k over document tokens only, mean over heads, summed per document, then over signal tokens.

    float32. Sums to the number of signal tokens over a list (`sum`) or to 1 (`mean`); 0 for a list without documents.
    Of a list in `shards`, each entry holds some documents' keys and gets the scores of all documents.
    """
    options = {"num_documents": num_documents, "aggregation": aggregation}
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
    mass = jax.vmap(lambda m, s: jax.ops.segment_sum(m, s, num_documents + 1))(mass, segments)[:, :num_documents]
    mass = mass if head_axis is None else jax.lax.pmean(mass, head_axis)
    return mass if shards.count == 1 else shards.sum(mass)


def read_scores(
    probe: Probe | Block, states: Float[Array, "B T D"], layout: TokenLayout, aggregation: Aggregation
) -> Float[Array, "B N"]:
    """Document scores from the states that enter a layer: k of documents and q of signals, nothing else."""
    normed = probe.attention_norm(states)
    q = probe.attention.queries(
        gather_suffix(normed, layout, layout.signals), gather_suffix(layout.positions, layout, layout.signals)
    )
    rows = layout.rows
    k = probe.attention.keys(normed[:, rows], layout.positions[:, rows])
    sizes = layout.shape
    return document_mass(
        q, k, layout.segment_ids[:, rows], layout.signals >= 0, sizes.documents, aggregation, sizes.shards
    )


def attention_scores(
    model: Decoder | TruncatedDecoder,
    layout: TokenLayout,
    score_layer: int,
    *,
    visibility: Visibility,
    aggregation: Aggregation,
    backend: str = "auto",
) -> Float[Array, "B N"]:
    """A batch's scores at one layer, running only the layers before it."""
    states = model.states_at(layout, score_layer, visibility=visibility, backend=backend)
    return read_scores(model.probe(score_layer), states, layout, aggregation)


def layer_scores(
    model: Decoder, layout: TokenLayout, *, visibility: Visibility, aggregation: Aggregation, backend: str = "auto"
) -> Float[Array, "L B N"]:
    """The scores every layer would give, in one pass."""
    return model.observe(
        layout,
        lambda block, states: read_scores(block, states, layout, aggregation),
        visibility=visibility,
        backend=backend,
    )
