"""What is minimised (arXiv 2510.05396, section 4.2): next-token loss on the answer, InfoNCE on the attention scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from blockrank.attention.visibility import PATTERNS
from blockrank.errors import UserError
from blockrank.layout import HostArray, TokenLayout
from blockrank.models.decoder import Decoder, check_score_layer
from blockrank.models.stack import Remat
from blockrank.rankers.readout import Aggregation, check_length_normalization, gather_suffix, read_scores


def next_token_loss(
    logits: Float[Array, "B A V"], targets: Int[Array, "B A"], mask: Bool[Array, "B A"]
) -> Float[Array, ""]:
    """Mean cross-entropy over the answer tokens of the whole batch; 0 if there are none."""
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    picked = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(mask, picked, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def info_nce(
    scores: Float[Array, "B N"],
    positive: Bool[Array, "B N"],
    document_mask: Bool[Array, "B N"],
    temperature: float,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """`-log(sum_pos e^(s/t) / sum_all e^(s/t))`, mean over lists that have a positive, and how many do.

    A list without a positive contributes nothing and is not in the mean; with none in the batch the loss is 0.
    """
    scaled = scores.astype(jnp.float32) / temperature
    positive = positive & document_mask
    usable = positive.any(axis=-1)

    def log_sum_exp(mask: Bool[Array, "B N"]) -> Float[Array, " B"]:
        safe = jnp.where(usable[:, None], mask, True)
        return jax.nn.logsumexp(jnp.where(safe, scaled, -jnp.inf), axis=-1)

    losses = jnp.where(usable, log_sum_exp(document_mask) - log_sum_exp(positive), 0.0)
    count = jnp.sum(usable)
    return jnp.sum(losses) / jnp.maximum(count, 1), count


def first_is_positive(
    scores: Float[Array, "B N"], positive: Bool[Array, "B N"], document_mask: Bool[Array, "B N"]
) -> Float[Array, ""]:
    """P@1 over the lists that have a positive (0 if none has)."""
    best = jnp.argmax(jnp.where(document_mask, scores, -jnp.inf), axis=-1)
    hit = jnp.take_along_axis(positive, best[:, None], axis=-1)[:, 0]
    usable = (positive & document_mask).any(axis=-1)
    return jnp.sum(hit & usable) / jnp.maximum(jnp.sum(usable), 1)


@dataclass(frozen=True)
class Objective:
    """Which loss, read where. Full-FT is `visibility="dense", aux_weight=0`; `ntp_weight=0` skips all later layers."""

    score_layer: int
    visibility: str = "blockrank"
    ntp_weight: float = 1.0
    aux_weight: float = 0.1
    temperature: float = 0.05
    signal_aggregation: Aggregation = "sum"
    length_normalization: float = 0.0
    attention_backend: str = "auto"
    remat: Remat = "none"

    def __post_init__(self) -> None:
        if self.visibility not in PATTERNS:
            raise UserError(f"visibility={self.visibility!r} is unknown: choose one of {', '.join(PATTERNS)}")
        known = get_args(Aggregation)
        if self.signal_aggregation not in known:
            raise UserError(f"signal_aggregation={self.signal_aggregation!r} is unknown: choose {' or '.join(known)}")
        if self.ntp_weight <= 0 and self.aux_weight <= 0:
            raise UserError("ntp_weight and aux_weight are both 0: nothing to train")
        check_length_normalization(self.length_normalization)
        if self.temperature <= 0:
            raise UserError(f"temperature={self.temperature} must be positive")


@partial(jax.tree_util.register_dataclass, data_fields=["layout", "positive"], meta_fields=[])
@dataclass(frozen=True)
class TrainingBatch:
    """Laid-out prompts with their answers, and which documents are positive (bool [B, N])."""

    layout: TokenLayout
    positive: Bool[HostArray, "B N"]

    def split(self, shards: int) -> TrainingBatch:
        """The same lists in shards (host only): the loss and its gradients are the same."""
        if shards == 1:
            return self
        return TrainingBatch(self.layout.split(shards), np.tile(self.positive, (shards, 1)))


def ranking_loss(
    model: Decoder, batch: TrainingBatch, objective: Objective
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """`ntp_weight * L_NTP + aux_weight * L_aux` and its parts.

    Metrics: `ntp_loss` and `aux_loss` (each only when it is trained on), `attention_p_at_1` and `lists_with_positive`.
    """
    layout, layer = batch.layout, objective.score_layer
    check_score_layer(layer, model.config)
    options: dict[str, Any] = {
        "visibility": PATTERNS[objective.visibility],
        "backend": objective.attention_backend,
        "remat": objective.remat,
    }
    loss, metrics = jnp.zeros(()), {}
    if objective.ntp_weight > 0:
        final, entering = model.states(layout, tap=layer, **options)
        mask = layout.labels >= 0
        targets = gather_suffix(layout.tokens, layout, layout.labels)
        before = gather_suffix(final, layout, layout.labels - 1)
        metrics["ntp_loss"] = next_token_loss(model.head_logits(before), targets, mask)
        loss += objective.ntp_weight * metrics["ntp_loss"]
    else:
        entering = model.states_at(layout, layer, **options)
    readout = objective.signal_aggregation, objective.length_normalization
    scores = read_scores(model.probe(layer), entering, layout, *readout)
    documents = layout.document_mask
    aux, count = info_nce(scores, batch.positive, documents, objective.temperature)
    if objective.aux_weight > 0:
        metrics["aux_loss"] = aux
        loss += objective.aux_weight * aux
    metrics["attention_p_at_1"] = first_is_positive(scores, batch.positive, documents)
    metrics["lists_with_positive"] = count // layout.shape.shards
    return loss, metrics
