"""Candidate lists to prompt segments: every piece is tokenised apart, and only the user's words are ever cut."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from blockrank.errors import UserError
from blockrank.prompts.chat import chat_frame
from blockrank.prompts.compiled import Compiled, Cue, Scaffold, compile_section, cues
from blockrank.prompts.fit import split, truncate
from blockrank.prompts.template import HASHED_NUMBERS, SECTIONS, Piece, PromptTemplate
from blockrank.prompts.tokenizer import Tokenizer
from blockrank.types import CandidateList, Document, has_text

LongDocuments = Literal["truncate", "split"]
_MOST_DOCUMENTS = 10**4 - 1
"""What `{count}` is given room for where a limit shares its tokens with the query."""


@dataclass(frozen=True)
class PromptLimits:
    """The most tokens of each segment, scaffold included; None: no limit.

    `suffix_tokens` counts up to the last signal token: an answer comes on top. `query_tokens` limits the query itself,
    wherever it stands. A query loses its middle. A document loses its end, and its title the end beyond half of the
    budget where the text needs the rest; or, with `long_documents="split"`, a document becomes several segments of the
    same candidate that each begin with its title.
    """

    document_tokens: int | None = 160
    query_tokens: int | None = 512
    prefix_tokens: int | None = None
    suffix_tokens: int | None = None
    long_documents: LongDocuments = "truncate"

    def __post_init__(self) -> None:
        for name in ("document_tokens", "query_tokens", "prefix_tokens", "suffix_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(f"limits.{name}={value!r} is not a number of tokens from 1 on")
        if self.long_documents not in get_args(LongDocuments):
            raise UserError(
                f"limits.long_documents={self.long_documents!r} is not one of {list(get_args(LongDocuments))}"
            )


@dataclass(frozen=True, eq=False)
class PromptSegments:
    """The token ids of one candidate list, all int32.

    `prefix` [P]; `documents`: one array per segment of a non-empty candidate, in candidate order; `document_index`: the
    candidate of each, which repeats where a long document was split; `suffix` [Q] ends with the last signal's piece
    when there is no answer, else with the whole answer; `signals`: indices into `suffix`; `answer_start`: index into
    `suffix` of the first answer (label) token, `len(suffix)` without an answer; `truncated`: one per candidate.
    """

    prefix: np.ndarray
    documents: tuple[np.ndarray, ...]
    document_index: tuple[int, ...]
    suffix: np.ndarray
    signals: tuple[int, ...]
    answer_start: int
    truncated: tuple[bool, ...]
    query_truncated: bool

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + sum(map(len, self.documents)) + len(self.suffix)


class PromptEncoder:
    """Encodes candidate lists by a template, a tokenizer and limits. Inputs are not changed."""

    def __init__(self, template: PromptTemplate, tokenizer: Tokenizer, limits: PromptLimits | None = None) -> None:
        """Raises UserError when the tokenizer lacks what the template asks for or a limit cannot hold the scaffold."""
        self.template = template
        self.tokenizer = tokenizer
        self.limits = limits or PromptLimits()
        self._frame = chat_frame(tokenizer, template.system) if template.chat else None
        parts = (compile_section(section, template, tokenizer, self._frame) for section in SECTIONS)
        self._prefix, self._document, self._suffix, self._answer = parts
        self._cues = cues(self._suffix, self._answer)
        self._content = [p for p in self._document if isinstance(p, Piece) and p.text in ("title", "text")]
        self._numbers: dict[tuple[str, int], tuple[int, ...]] = {}
        self._query_budget()
        self._document_budget(template.first_number)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of template, tokenizer, limits and rendered chat text: equal fingerprints give equal ids.

        The tokenizer's chat template is rendered once, when the encoder is made; one that writes the date thus gives an
        encoder one date, and another day another fingerprint.
        """
        parts = [self.template.fingerprint, self.tokenizer.fingerprint, repr(self.limits)]
        if self._frame is not None:
            parts.append(repr(self._frame))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def encode(
        self, candidates: CandidateList, answer: Sequence[int] | None = None, *, cue: Cue = "signals"
    ) -> PromptSegments:
        """Ids of one list. `answer`: candidate indices of the relevant documents; their numbers are written ascending.

        `cue`: where the suffix ends when there is no answer. Documents without text and title get no segment and no
        number, and are left out of the answer; when no answer is left, the segments are those of `answer=None`. Raises
        UserError for a query without text, and for more documents than the template's letters can name.
        """
        words = candidates.query.text.strip()
        if not has_text(words):
            raise UserError(f"query {candidates.query.id!r} is empty: it has no visible text")
        numbers = self._number(candidates.documents)
        documents: list[np.ndarray] = []
        document_index: list[int] = []
        truncated = [False] * len(candidates)
        for index, number in numbers.items():
            segments, truncated[index] = self._encode_document(candidates.documents[index], number)
            documents.extend(segments)
            document_index.extend([index] * len(segments))

        count = len(numbers)
        prefix, prefix_cut, _ = self._fill_query(self._prefix, words, count)
        answers = sorted({numbers[index] for index in answer or () if self._known(index, candidates) in numbers})
        lead, suffix_cut, signals = self._fill_query(self._suffix if answers else self._cues[cue], words, count)
        suffix, answer_start = lead, len(lead)
        if answers:
            for piece in self._answer:
                if isinstance(piece, Piece):
                    suffix = suffix + self._answer_numbers(piece, answers)
                else:
                    signals += [len(suffix) + token for token in piece.signals]
                    suffix = suffix + list(piece.ids)
        return PromptSegments(
            prefix=np.asarray(prefix, np.int32),
            documents=tuple(documents),
            document_index=tuple(document_index),
            suffix=np.asarray(suffix, np.int32),
            signals=tuple(signals),
            answer_start=answer_start,
            truncated=tuple(truncated),
            query_truncated=prefix_cut or suffix_cut,
        )

    def answer_paths(self, candidates: CandidateList) -> dict[int, tuple[int, ...]]:
        """Candidate index -> the tokens that name it as the one answer, after a prompt without an answer.

        From what follows the last signal up to the first token after the number, so that no path is the beginning of
        another. Documents without text have none.
        """
        rest = (self._suffix + self._answer)[len(self._cues["signals"]) :]
        at = next(i for i, piece in enumerate(rest) if isinstance(piece, Piece))
        number = rest[at]
        assert isinstance(number, Piece)
        before = [token for piece in rest[:at] if isinstance(piece, Scaffold) for token in piece.ids]
        after = [token for piece in rest[at + 1 :] if isinstance(piece, Scaffold) for token in piece.ids][:1]
        return {
            index: (*before, *self._answer_numbers(number, [bears]), *after)
            for index, bears in self._number(candidates.documents).items()
        }

    def prefix(self, words: str) -> np.ndarray:
        """The ids of the prefix, int32 [P], with `words` where the query stands (anywhere or nowhere).

        Raises UserError for a template whose prefix counts the documents: it has no prefix without a list.
        """
        if any(isinstance(piece, Piece) and piece.text == "count" for piece in self._prefix):
            raise UserError(f"template {self.template.name!r} has {{count}} in its prefix, which depends on the list")
        return np.asarray(self._fill_query(self._prefix, words.strip(), 0)[0], np.int32)

    def permutation(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The tokens of an answer after the suffix that gives all these numbers in this order."""
        ids: list[int] = []
        for piece in self._answer:
            ids.extend(self._answer_numbers(piece, numbers) if isinstance(piece, Piece) else piece.ids)
        return tuple(ids)

    def answer_number(self, number: int) -> tuple[int, ...]:
        """The tokens of a number that comes first in an answer."""
        piece = next(piece for piece in self._answer if isinstance(piece, Piece))
        return tuple(self._answer_numbers(piece, [number]))

    @cached_property
    def stops(self) -> frozenset[int]:
        """The tokens that end an answer: the tokenizer's eos, and the one that ends the assistant's turn."""
        tail = "" if self._frame is None else self._frame.tail
        plain = self.tokenizer.encode(tail)
        special = [token for token in self.tokenizer.encode_scaffold(tail) if token not in plain][:1]
        return frozenset(special if self.tokenizer.eos_id is None else [self.tokenizer.eos_id, *special])

    def numbers(self, candidates: CandidateList) -> dict[int, int]:
        """Candidate index -> the number its document bears, for the documents that are not empty."""
        return self._number(candidates.documents)

    def _number(self, documents: Sequence[Document]) -> dict[int, int]:
        present = [index for index, document in enumerate(documents) if any(_words(document))]
        if self.template.numbering == "hash":
            first = self.template.first_number
            return {index: first + _content_number(documents[index]) for index in present}
        order = present
        if self.template.numbering == "content":
            order = sorted(present, key=lambda index: (_content_hash(documents[index]), documents[index].id))
        number = {index: rank for rank, index in enumerate(order, self.template.first_number)}
        return {index: number[index] for index in present}

    @staticmethod
    def _known(index: int, candidates: CandidateList) -> int:
        if not 0 <= index < len(candidates):
            raise UserError(f"query {candidates.query.id!r}: answer {index} is not one of {len(candidates)} candidates")
        return index

    def _encode_document(self, document: Document, number: int) -> tuple[list[np.ndarray], bool]:
        title, text = _words(document)
        content: dict[str, str] = {"title": title, "text": text}
        slots = self._content
        runs = {
            index: self.tokenizer.encode(piece.lead + content[piece.text]) if content[piece.text] else []
            for index, piece in enumerate(slots)
        }
        budget = self._document_budget(number, self._present(runs))
        if budget is None or sum(map(len, runs.values())) <= budget:
            return [self._fill_document(number, runs)], False
        if self.limits.long_documents == "split":
            return [self._fill_document(number, part) for part in split(runs, slots, budget)], False
        return [self._fill_document(number, truncate(runs, slots, budget))], True

    def _fill_document(self, number: int, runs: dict[int, list[int]]) -> np.ndarray:
        ids: list[int] = []
        content, present = iter(runs.values()), self._present(runs)
        for piece in self._document:
            if isinstance(piece, Scaffold):
                ids.extend(piece.ids if piece.slot_with in ("", *present) else ())
            elif piece.text == "number":
                ids.extend(self._number_ids(piece.lead, number))
            else:
                ids.extend(next(content))
        return np.asarray(ids, np.int32)

    def _present(self, runs: dict[int, list[int]]) -> set[str]:
        """Which of title and text are not empty."""
        return {self._content[index].text for index, run in runs.items() if run}

    def _document_budget(self, number: int, present: Collection[str] = ("title", "text")) -> int | None:
        """Tokens left for title and text beside the scaffold, where `present` are not empty."""
        scaffold = 0
        for piece in self._document:
            if isinstance(piece, Scaffold):
                scaffold += len(piece.ids) if piece.slot_with in ("", *present) else 0
            elif piece.text == "number":
                scaffold += len(self._number_ids(piece.lead, number))
        return self._room("document_tokens", scaffold, 1)

    @cached_property
    def _query_tokens(self) -> int | None:
        return self._query_budget()

    def _query_budget(self) -> int | None:
        """Tokens the query may have, so that prefix and suffix both keep their limits with the same query."""
        budgets = [self.limits.query_tokens]
        for key, segment in (("prefix_tokens", self._prefix), ("suffix_tokens", self._cues["signals"])):
            scaffold = sum(len(piece.ids) for piece in segment if isinstance(piece, Scaffold))
            slots = [piece for piece in segment if isinstance(piece, Piece)]
            scaffold += sum(len(self._count_ids(piece, _MOST_DOCUMENTS)) for piece in slots if piece.text == "count")
            budgets.append(self._room(key, scaffold, sum(piece.text == "query" for piece in slots)))
        return min((budget for budget in budgets if budget is not None), default=None)

    def _room(self, key: str, scaffold: int, slots: int) -> int | None:
        limit = getattr(self.limits, key)
        if limit is None or (slots == 0 and scaffold <= limit):
            return None
        if limit < scaffold + slots:
            raise UserError(
                f"limits.{key}={limit} is too small: template {self.template.name!r} takes {scaffold} tokens before "
                f"any content; set it to {scaffold + slots} or more"
            )
        return (limit - scaffold) // slots

    def _fill_query(self, segment: Compiled, words: str, count: int) -> tuple[list[int], bool, list[int]]:
        ids: list[int] = []
        signals: list[int] = []
        cut = False
        budget = self._query_tokens
        for piece in segment:
            if isinstance(piece, Scaffold):
                signals += [len(ids) + token for token in piece.signals]
                ids.extend(piece.ids)
                continue
            run = self._count_ids(piece, count) if piece.text == "count" else self.tokenizer.encode(piece.lead + words)
            if piece.text == "query" and budget is not None and len(run) > budget:
                run, cut = run[: budget - budget // 2] + run[len(run) - budget // 2 :], True
            ids.extend(run)
            signals += [len(ids) - 1] if piece.signal else []
        return ids, cut, signals

    def _answer_numbers(self, piece: Piece, answers: Sequence[int]) -> list[int]:
        ids = list(self._number_ids(piece.lead, answers[0]))
        for number in answers[1:]:
            ids.extend(self.tokenizer.encode_scaffold(piece.separator))
            ids.extend(self._number_ids("", number))
        return ids

    def _number_ids(self, lead: str, number: int) -> tuple[int, ...]:
        key = (lead, number)
        if key not in self._numbers:
            self._numbers[key] = tuple(self.tokenizer.encode(lead + self.template.identifier(number)))
        return self._numbers[key]

    def _count_ids(self, piece: Piece, count: int) -> list[int]:
        return self.tokenizer.encode(f"{piece.lead}{count}")


def _words(document: Document) -> tuple[str, str]:
    """(title, text) without space around them, "" where nothing is visible."""
    title, text = (part.strip() if has_text(part) else "" for part in (document.title, document.text))
    return title, text


def _content_number(document: Document) -> int:
    return int.from_bytes(_content_hash(document)[:8], "big") % HASHED_NUMBERS


def _content_hash(document: Document) -> bytes:
    title, text = _words(document)
    return hashlib.sha256(f"{title}\0{text}".encode("utf-8", "replace")).digest()
