"""Model FLOPs of a training step: the numerator of `train/mfu`.

Counted is what the loss needs, whatever a program computes: two per weight and real token that passes it, four per
visible pair of query and key and feature of the heads, and backward as much again for each gradient that is needed, of
a matrix's input where something before it is trained, of the matrix where it is. Padding, recomputation (`loss.remat`),
norms, softmax and the optimiser are not counted; blocks from the score layer on only in steps with the next-token loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from flax.traverse_util import flatten_dict

from blockrank.attention.visibility import PATTERNS
from blockrank.costs.flops import blockrank_pairs, causal_pairs
from blockrank.layout import PREFIX, SUFFIX, TokenLayout
from blockrank.losses import Objective
from blockrank.models.config import DecoderConfig
from blockrank.training.optimizer import Params, Trainable

ORDER = ("attention_norm", "attention", "attention.out", "mlp_norm", "mlp", "mlp.down")
"""Parts of a block, in the order a token passes them; a parameter is of the last that its path begins with."""
ATTENTION = ORDER.index("attention")


@dataclass(frozen=True)
class Counts:
    """What of a batch is real: tokens, visible pairs, documents' tokens, signals, their pairs with those, labels."""

    tokens: int
    pairs: int
    documents: int
    signals: int
    scored: int
    labels: int

    @staticmethod
    def of(layout: TokenLayout, visibility: str) -> Counts:
        """Counts of a whole batch (host only); prefix and suffix count once however many shards hold them."""
        shape = layout.shape
        ids = np.asarray(layout.segment_ids)
        lists = len(ids) // shape.shards
        dense = PATTERNS[visibility].sequential
        signals = (np.asarray(layout.signals)[:lists] >= 0).sum(axis=1)
        pairs = documents = scored = 0
        for row in range(lists):
            streams = ids[row::lists]
            prefix, suffix = int((streams[0] == PREFIX).sum()), int((streams[0] == SUFFIX).sum())
            lengths = np.bincount(streams[streams >= 0], minlength=1)
            total = int(lengths.sum())
            pairs += causal_pairs(prefix + total + suffix) if dense else blockrank_pairs(prefix, lengths, suffix)
            documents += total
            scored += int(signals[row]) * total
        labels = int((np.asarray(layout.labels)[:lists] >= 0).sum())
        return Counts(int(layout.token_count().sum()), pairs, documents, int(signals.sum()), scored, labels)


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step per thing counted in its batch."""

    token: float
    pair: float
    document: float
    signal: float
    score: float
    label: float

    @staticmethod
    def of(config: DecoderConfig, params: Params, trainable: Trainable, objective: Objective) -> StepFlops:
        """`params` (a nested dict, may be abstract) of a decoder of which `trainable` is trained on `objective`."""
        layer, ntp = objective.score_layer, objective.ntp_weight > 0
        leaves = cast("dict[tuple[str, ...], Any]", flatten_dict(params))
        shape = config.num_layers, len(ORDER)
        weights, trained, touched = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)
        for keys, leaf in leaves.items():
            if keys[0] != "blocks":
                continue
            part, learns = _part(keys[1:]), _trained_layers(keys, config.num_layers, trainable)
            touched[:, part] |= learns
            if len(leaf.shape) > 2:
                size = int(np.prod(leaf.shape[1:]))
                weights[:, part] += size
                trained[:, part] += size * learns
        embeds = any(keys[0] == "embed" for keys in trainable.layers)
        before = np.concatenate([[embeds], touched.ravel()])
        upstream = np.logical_or.accumulate(before)[:-1].reshape(shape)
        attended = upstream | touched

        depth = config.num_layers if ntp else layer
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        token = (2 * weights * (1 + upstream) + 2 * trained)[:depth].sum()
        pair = (4 * heads * (1 + 2 * attended[:depth, ATTENTION])).sum()
        document = signal = score = label = 0.0
        if objective.aux_weight > 0:
            backward = 1 + upstream[layer, ATTENTION]
            learns = {
                name: bool(
                    _trained_layers(("blocks", "attention", name, "kernel"), config.num_layers, trainable)[layer]
                )
                for name in ("query", "key")
            }
            document = 2 * config.hidden_size * kv_heads * (backward + learns["key"])
            signal = 2 * config.hidden_size * heads * (backward + learns["query"])
            score = 2 * heads * (1 + 2 * attended[layer, ATTENTION])
        if ntp:
            head = ("embed", "embedding") if config.tie_embeddings else ("head", "kernel")
            below = before.any() or any(keys[0] == "final_norm" for keys in trainable.layers)
            label = 2 * config.hidden_size * config.vocab_size * (1 + below + (head in trainable.layers))
        return StepFlops(*map(float, (token, pair, document, signal, score, label)))

    def total(self, counts: Counts) -> float:
        """FLOPs of a step on a batch with these counts."""
        return (
            self.token * counts.tokens
            + self.pair * counts.pairs
            + self.document * counts.documents
            + self.signal * counts.signals
            + self.score * counts.scored
            + self.label * counts.labels
        )


def _part(keys: tuple[str, ...]) -> int:
    path = ".".join(keys)
    return max(i for i, part in enumerate(ORDER) if path == part or path.startswith(f"{part}."))


def _trained_layers(keys: tuple[str, ...], layers: int, trainable: Trainable) -> np.ndarray:
    """Which layers of a stacked parameter are trained, bool [L]."""
    chosen: Mapping[tuple[str, ...], slice | None] = trainable.layers
    learns = np.zeros(layers, bool)
    if keys in chosen:
        learns[chosen[keys] or slice(None)] = True
    return learns
