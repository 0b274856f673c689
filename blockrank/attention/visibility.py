"""Who sees whom: the attention pattern as data, apart from how any backend computes it.

A token belongs to a part of the prompt and, if it is a document's, to a segment. A `Visibility` names, for each pair
of parts, the relation under which a query of one sees a key of the other. The dense mask it materialises is the oracle;
fast backends read the rules to know which keys they need not touch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from blockrank.errors import UserError
from blockrank.layout import PREFIX, SUFFIX, TokenLayout


class Part(enum.Enum):
    PREFIX = "prefix"
    DOCUMENT = "document"
    SUFFIX = "suffix"


class Tokens(NamedTuple):
    """What a pattern may ask of a token: its segment and its position, int32 [..., T] each.

    Positions order the tokens of one segment in every scheme, and all tokens under sequential positions; so causality
    by position does not depend on how documents are packed.
    """

    segment_ids: Int[Array, "*b T"]
    positions: Int[Array, "*b T"]

    def are(self, part: Part) -> Bool[Array, "*b T"]:
        if part is Part.DOCUMENT:
            return self.segment_ids >= 0
        return self.segment_ids == (PREFIX if part is Part.PREFIX else SUFFIX)

    @staticmethod
    def of(layout: TokenLayout) -> Tokens:
        return Tokens(jnp.asarray(layout.segment_ids), jnp.asarray(layout.positions))

    @staticmethod
    def concatenate(parts: list[Tokens]) -> Tokens:
        return Tokens(*(jnp.concatenate(field, axis=-1) for field in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Relation:
    """A conjunction of conditions on a (query, key) pair. `a & b` holds where both hold; `ALL` always holds."""

    causal: bool = False
    same_segment: bool = False
    window: int | None = None

    def __and__(self, other: Relation) -> Relation:
        windows = [w for w in (self.window, other.window) if w is not None]
        return Relation(
            self.causal or other.causal, self.same_segment or other.same_segment, min(windows) if windows else None
        )


ALL = Relation()
CAUSAL = Relation(causal=True)
SAME_SEGMENT = Relation(same_segment=True)


def window(size: int) -> Relation:
    """Keys fewer than `size` positions away, on either side."""
    return Relation(window=size)


@dataclass(frozen=True)
class Visibility:
    """Rules (query part, key part) -> relation; a pair without a rule is invisible, and padding always is.

    `sequential` says which positions the pattern is meant for: one running count over the whole prompt, or BlockRank's
    permutation-invariant scheme.
    """

    name: str
    rules: tuple[tuple[Part, Part, Relation], ...]
    sequential: bool = False

    def __post_init__(self) -> None:
        pairs = [rule[:2] for rule in self.rules]
        if len(set(pairs)) < len(pairs):
            raise ValueError(f"visibility {self.name!r} has two rules for one pair of parts; compose them with &")

    def check_positions(self, layout: TokenLayout) -> None:
        """Raises `UserError` for a layout whose positions are of the scheme this pattern is not meant for."""
        if layout.shape.prefix == layout.shape.tokens or layout.sequential == self.sequential:
            return
        has, needs, remedy = "permutation-invariant", "sequential", "None"
        if not self.sequential:
            has, needs, remedy = needs, has, "the suffix's position, 8192 in the paper"
        raise UserError(
            f"visibility={self.name!r} needs {needs} positions, but the layout has {has} ones: "
            f"lay it out with suffix_offset={remedy}, or choose another visibility"
        )

    def relation(self, query: Part, key: Part) -> Relation | None:
        return next((r for q, k, r in self.rules if q is query and k is key), None)

    @property
    def documents_apart(self) -> bool:
        """Whether prefix and documents read nothing but the prefix and their own segment.

        Then only the suffix knows of several documents, and rows may lie on several devices.
        """
        own = self.relation(Part.DOCUMENT, Part.DOCUMENT)
        others = ((Part.PREFIX, Part.DOCUMENT), (Part.PREFIX, Part.SUFFIX), (Part.DOCUMENT, Part.SUFFIX))
        return (own is None or own.same_segment) and all(self.relation(*pair) is None for pair in others)

    def allowed(
        self, queries: Tokens, keys: Tokens, sliding_window: Int[Array, ""] | int | None = None
    ) -> Bool[Array, "*b T S"]:
        """The mask between any two sets of tokens; `sliding_window` is a layer's own, on top of the rules."""
        distance = queries.positions[..., :, None] - keys.positions[..., None, :]
        same_segment = queries.segment_ids[..., :, None] == keys.segment_ids[..., None, :]
        mask = jnp.zeros(distance.shape, bool)
        for query_part, key_part, relation in self.rules:
            pair = queries.are(query_part)[..., :, None] & keys.are(key_part)[..., None, :]
            if relation.causal:
                pair &= distance >= 0
            if relation.same_segment:
                pair &= same_segment
            if relation.window is not None:
                pair &= jnp.abs(distance) < relation.window
            mask |= pair
        return mask if sliding_window is None else mask & (jnp.abs(distance) < sliding_window)

    def materialize(self, tokens: Tokens, sliding_window: Int[Array, ""] | int | None = None) -> Bool[Array, "*b T T"]:
        """The dense mask over all tokens: the oracle's input."""
        return self.allowed(tokens, tokens, sliding_window)


BLOCKRANK = Visibility(
    "blockrank",
    (
        (Part.PREFIX, Part.PREFIX, CAUSAL),
        (Part.DOCUMENT, Part.PREFIX, ALL),
        (Part.DOCUMENT, Part.DOCUMENT, SAME_SEGMENT & CAUSAL),
        (Part.SUFFIX, Part.PREFIX, ALL),
        (Part.SUFFIX, Part.DOCUMENT, ALL),
        (Part.SUFFIX, Part.SUFFIX, CAUSAL),
    ),
)
"""BlockRank (arXiv 2510.05396, section 4.1): documents see the instruction and themselves, the query sees all."""

DENSE = Visibility(
    "dense", tuple((q, k, CAUSAL) for i, q in enumerate(Part) for k in list(Part)[: i + 1]), sequential=True
)
"""Plain causal attention over the whole prompt: the Full-FT baseline, and any language model."""

BIDIRECTIONAL = Visibility("bidirectional", ((Part.PREFIX, Part.PREFIX, ALL),), sequential=True)
"""An encoder's: every token of a text sees all others."""

PATTERNS = {pattern.name: pattern for pattern in (BLOCKRANK, DENSE)}
