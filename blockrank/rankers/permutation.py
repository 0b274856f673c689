"""Sliding windows over a list, and permutations as a model writes them: `[2] > [3] > [1]`, read and repaired."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

T = TypeVar("T")


def sliding_windows(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """The places [start, end) of each window over a list, from its tail to its head (RankGPT, arXiv 2304.09542).

    Windows begin `stride` apart; the last begins at 0 and may be shorter. In a window of one document there is nothing
    to order, so there is none. `stride` is at most `window`, or documents between would not be read.
    """
    starts = [*range(length - window, 0, -stride), 0]
    ends = range(length, 0, -stride)
    return [(start, end) for start, end in zip(starts, ends, strict=False) if end - start > 1]


@dataclass(frozen=True)
class Repairs:
    """What had to be mended in the written permutations of some windows.

    `malformed`: windows with anything to mend. `repeated` and `unknown`: identifiers dropped, because they were given
    before, or are no document's. `missing`: documents that were not given, and follow in their present order.
    """

    windows: int = 0
    malformed: int = 0
    repeated: int = 0
    unknown: int = 0
    missing: int = 0

    def __add__(self, other: Repairs) -> Repairs:
        return Repairs(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def counts(self) -> dict[str, float]:
        """As a ranker's `extra` holds them."""
        names = ("windows", "malformed_windows", "repeated_ids", "unknown_ids", "missing_ids")
        return {name: float(getattr(self, f.name)) for name, f in zip(names, fields(self), strict=True)}


def repaired(given: Sequence[T | None], present: Sequence[T]) -> tuple[list[T], Repairs]:
    """A permutation of `present` (distinct items) that begins as `given`, where None is no item.

    What is given after the last item is not read.
    """
    known, order = set(present), []
    repeated = unknown = 0
    for item in given:
        if len(order) == len(present):
            break
        if item is None or item not in known:
            unknown += 1
        elif item in order:
            repeated += 1
        else:
            order.append(item)
    missing = [item for item in present if item not in order]
    wrong = int(bool(repeated or unknown or missing))
    return order + missing, Repairs(1, wrong, repeated, unknown, len(missing))


@dataclass(frozen=True)
class PermutationParser:
    """Reads identifiers out of a written answer.

    `before` and `after` are the characters that enclose an identifier in the template's answer. Where any identifier is
    so enclosed, only such are read; else every number (or single capital letter) is.
    """

    before: str = "["
    after: str = "]"
    letters: bool = False

    def identifiers(self, text: str, *, ended: bool = True) -> list[str]:
        """The identifiers in the order they are written. Digits in any form (`①`, `２`) are digits.

        `ended`: whether the text is whole; of one that was cut, a number at the very end is left out.
        """
        text = unicodedata.normalize("NFKC", text)
        bare = "[A-Z]" if self.letters else "[0-9]+"
        enclosed = re.findall(rf"{re.escape(self.before)}\s*({bare})\s*{re.escape(self.after)}", text)
        if enclosed and (self.before or self.after):
            return [self._plain(found) for found in enclosed]
        if not ended and not self.letters:
            text = text.rstrip("0123456789")
        alone = re.findall(rf"(?<![A-Za-z])({bare})(?![A-Za-z])" if self.letters else bare, text)
        return [self._plain(found) for found in alone]

    def _plain(self, found: str) -> str:
        return found if self.letters else found.lstrip("0") or "0"

    def parse(self, text: str, items: Mapping[str, T], *, ended: bool = True) -> tuple[list[T], Repairs]:
        """The order of `items` (identifier -> item, in present order) that a text gives, repaired."""
        given = [items.get(found) for found in self.identifiers(text, ended=ended)]
        return repaired(given, list(items.values()))
