"""Beam search over a given set of answers: what can be decoded is one of them, by construction.

The answers of a list are paths of tokens, none the beginning of another, and form a trie whose nodes are named by the
first path that runs through them. A beam is a node with the log-probability of its tokens under the whole vocabulary.
B batch, W beams, N paths, S path length, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from blockrank.attention.visibility import Visibility
from blockrank.layout import TokenLayout
from blockrank.models.decoder import Decoder
from blockrank.models.generate import Cache, decode_step, next_positions, prefill

ABSENT = -1
"""In a trie's nodes a path that does not exist, in its tokens the end of a path that does."""


@partial(jax.tree_util.register_dataclass, data_fields=["tokens", "nodes"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Trie:
    """The paths of a batch of lists.

    `tokens` int32 [B, N, S], -1 after the end of a path. `nodes` int32 [B, N, S + 1]: the first path with the same
    first t tokens, for t = 0..S; -1 where there is no path.
    """

    tokens: Int[Array | np.ndarray, "B N S"]
    nodes: Int[Array | np.ndarray, "B N S1"]

    @staticmethod
    def of(lists: Sequence[Sequence[Sequence[int]]], paths: int, length: int) -> Trie:
        """The paths of each list, padded to so many paths of such a length. Host arrays.

        Raises `ValueError` for a path that is empty or the beginning of another.
        """
        tokens = np.full((len(lists), paths, length), ABSENT, np.int32)
        nodes = np.full((len(lists), paths, length + 1), ABSENT, np.int32)
        for b, answers in enumerate(lists):
            first: dict[tuple[int, ...], int] = {}
            ends = {tuple(path) for path in answers}
            if len(ends) < len(answers) or () in ends:
                raise ValueError("a path is empty or given twice")
            for i, path in enumerate(answers):
                tokens[b, i, : len(path)] = path
                for t in range(length + 1):
                    if t < len(path) and tuple(path[:t]) in ends:
                        raise ValueError(f"path {list(path[:t])} is the beginning of {list(path)}")
                    nodes[b, i, t] = first.setdefault((*path[:t], *(ABSENT,) * (t - len(path))), i)
        return Trie(tokens, nodes)


class _Beams(NamedTuple):
    node: Int[Array, "B W"]
    score: Float[Array, "B W"]
    token: Int[Array, "B W"]
    own: Bool[Array, "B W new"]


def beam_search(
    model: Decoder, layout: TokenLayout, trie: Trie, beams: int, *, visibility: Visibility, backend: str = "auto"
) -> tuple[Int[Array, "B W"], Float[Array, "B W"]]:
    """The best of the given paths after each prompt, best first, and their log-probabilities (float32).

    Where there are fewer than `beams` paths the rest is -1 and -inf. With as many beams as paths the search is
    exhaustive. The prompt must end in a suffix.
    """
    lists, paths, steps = trie.tokens.shape
    beams = min(beams, paths)
    spare = (steps - 1) * beams
    state, cache = prefill(model, layout, spare, visibility=visibility, backend=backend)
    start = _Beams(
        jnp.asarray(trie.nodes[:, :1, 0]),
        jnp.zeros((lists, 1)),
        jnp.zeros((lists, 1), jnp.int32),
        jnp.zeros((lists, 1, spare), bool),
    )
    tokens, nodes = jnp.moveaxis(trie.tokens, 2, 0), jnp.moveaxis(trie.nodes, 2, 0)
    found = _extend(start, model.head_logits(state)[:, None], tokens[0], nodes[0], nodes[1], beams)
    length, after = layout.shape.tokens, next_positions(layout)

    def step(carry: tuple[_Beams, Cache], x: tuple[Array, ...]) -> tuple[tuple[_Beams, Cache], None]:
        (found, cache), (t, tokens, now, then) = carry, x
        written = t * beams + jnp.arange(beams)
        own = found.own | (jnp.arange(spare) == written[:, None])
        states, cache = decode_step(
            model, cache, length + t * beams, jnp.maximum(found.token, 0), after + t, own, visibility=visibility
        )
        found = _extend(found._replace(own=own), model.head_logits(states), tokens, now, then, beams)
        return (found, cache), None

    if steps > 1:
        xs = jnp.arange(steps - 1), tokens[1:], nodes[1:-1], nodes[2:]
        (found, _), _ = jax.lax.scan(step, (found, cache), xs)
    return found.node, found.score


def _extend(
    beams: _Beams,
    logits: Float[Array, "B W V"],
    tokens: Int[Array, "B N"],
    now: Int[Array, "B N"],
    then: Int[Array, "B N"],
    width: int,
) -> _Beams:
    """The `width` best nodes one token further, each given by the first path through it."""
    continues = (now[:, None] == beams.node[:, :, None]) & (beams.node >= 0)[:, :, None]
    parent = jnp.argmax(continues, axis=1)
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    beam = jnp.arange(len(tokens))[:, None], parent
    step = jnp.where(tokens >= 0, logp[*beam, jnp.maximum(tokens, 0)], 0.0)
    alive = continues.any(axis=1) & (then == jnp.arange(then.shape[1]))
    score, best = jax.lax.top_k(jnp.where(alive, beams.score[beam] + step, -jnp.inf), width)
    rows = jnp.arange(len(tokens))[:, None]
    kept = parent[rows, best]
    return _Beams(jnp.where(score > -jnp.inf, best, ABSENT), score, tokens[rows, best], beams.own[rows, kept])
