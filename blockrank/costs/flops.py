"""Floating-point operations that a ranking needs, counted from lengths: no padding, no pair that nobody sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blockrank.models.config import DecoderConfig
from blockrank.prompts.encode import PromptSegments


@dataclass(frozen=True)
class Work:
    """What a system computes of a model: `blocks` run on every token; `decoded` tokens, each with the whole head."""

    blocks: int
    sparse: bool
    decoded: int = 0


def needed_flops(config: DecoderConfig, prompt: PromptSegments, work: Work) -> int:
    """Multiplications and additions, two per weight and token, four per visible pair, head and head dimension.

    Norms, RoPE and softmax are not counted, as is usual; nor is the readout at the score layer but for its keys.
    """
    heads = config.num_heads * config.head_dim
    pairs = visible_pairs(prompt) if work.sparse else causal_pairs(prompt.num_tokens)
    per_block = 2 * block_weights(config) * prompt.num_tokens + 4 * heads * pairs
    total = work.blocks * per_block
    if work.decoded:
        seen = sum(prompt.num_tokens + i + 1 for i in range(work.decoded - 1))
        total += work.blocks * (2 * block_weights(config) * (work.decoded - 1) + 4 * heads * seen)
        return total + 2 * config.hidden_size * config.vocab_size * work.decoded
    documents = sum(map(len, prompt.documents))
    return total + 2 * config.hidden_size * config.num_kv_heads * config.head_dim * documents


def block_weights(config: DecoderConfig) -> int:
    """Weights of one block's matrices."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)


def causal_pairs(tokens: int) -> int:
    """(query, key) pairs of plain causal attention."""
    return tokens * (tokens + 1) // 2


def visible_pairs(prompt: PromptSegments) -> int:
    """(query, key) pairs of BlockRank's pattern."""
    return blockrank_pairs(len(prompt.prefix), [len(document) for document in prompt.documents], len(prompt.suffix))


def blockrank_pairs(prefix: int, documents: Iterable[int], suffix: int) -> int:
    """(query, key) pairs of BlockRank's pattern, from the lengths of the segments."""
    lengths = [int(length) for length in documents]
    within = sum(map(causal_pairs, (prefix, suffix, *lengths)))
    return within + prefix * sum(lengths) + suffix * (prefix + sum(lengths))
