"""Cheap questions to a model before hours are spent on it: does it read its tokenizer's words, does it rank at all?

A wrong tokenizer, shuffled weights or another prompt than the one a model was trained with raise no error: scores are
merely near random. Both probes answer with a warning, since neither can be sure.
"""

from __future__ import annotations

import logging
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from blockrank.models.decoder import Decoder
from blockrank.prompts.tokenizer import Tokenizer
from blockrank.types import CandidateList, Document, Query, Ranker

log = logging.getLogger(__name__)

PASSAGE = (
    "The capital of France is Paris. The sun rises in the east and sets in the west. Water is made of hydrogen and "
    "oxygen. There are seven days in a week, and twelve months in a year."
)
TOLERATED_SHARE = 0.6
"""A passage as plain as this costs a language model about a third of the log of its vocabulary; a guess costs all."""

_TOPICS = (
    ("what is the capital of France", "Paris is the capital of France."),
    ("how is bread made", "Bread is made of flour, water, salt and yeast, and is baked in an oven."),
    ("what do cows eat", "Cows eat grass, hay and grain."),
    ("who wrote Hamlet", "William Shakespeare wrote the play Hamlet."),
    ("how many moons does Mars have", "Mars has two moons, Phobos and Deimos."),
)


@nnx.jit
def _next_token_loss(model: Decoder, tokens: Int[Array, "1 T"]) -> Float[Array, ""]:
    log_probabilities = jax.nn.log_softmax(model.logits(tokens).astype(jnp.float32)[:, :-1])
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1).mean()


def passage_loss(model: Decoder, tokenizer: Tokenizer) -> float:
    """Mean next-token loss of `PASSAGE`, in nats."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return float(_next_token_loss(model, jnp.asarray([start + tokenizer.encode(PASSAGE)], jnp.int32)))


def check_language(model: Decoder, tokenizer: Tokenizer) -> bool:
    """Whether the model reads plain English by this tokenizer; warns when not. For models that are language models."""
    loss, guess = passage_loss(model, tokenizer), math.log(model.config.vocab_size)
    if loss <= TOLERATED_SHARE * guess:
        return True
    log.warning(
        "the model does not seem to read its tokenizer's words: a plain English passage costs %.1f nats a token, and "
        "guessing costs %.1f; do weights, config and tokenizer belong together?",
        *(loss, guess),
    )
    return False


def check_ranking(ranker: Ranker) -> bool:
    """Whether the one relevant document wins in most of a few trivial lists; warns when not. For trained rankers."""
    documents = tuple(Document(str(i), text) for i, (_, text) in enumerate(_TOPICS))
    lists = [CandidateList(Query(f"probe {i}", query), documents) for i, (query, _) in enumerate(_TOPICS)]
    wins = sum(int(result.scores.argmax()) == i for i, result in enumerate(ranker.score(lists)))
    if 2 * wins > len(lists):
        return True
    log.warning(
        "%s puts the relevant document first in %d of %d trivial lists: has it been trained, and by this prompt?",
        *(ranker.name, wins, len(lists)),
    )
    return False
