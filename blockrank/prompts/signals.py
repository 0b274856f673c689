"""Which tokens of a template could be signals, and the template that makes signals of some of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from blockrank.errors import UserError
from blockrank.prompts.encode import PromptEncoder
from blockrank.prompts.template import Piece, PromptTemplate
from blockrank.types import CandidateList, Document, Query

_PROBE = CandidateList(Query("probe", "what is this"), (Document("a", "a thing"), Document("b", "another")))


@dataclass(frozen=True)
class SignalToken:
    """A token before the answer's number: the last of `{query}` in a suffix, or one of a literal piece.

    `piece` is the place of its piece in `section`, `token` counts from the end of the piece (-1 is the last), `text` is
    the token itself.
    """

    section: Literal["suffix", "answer"]
    piece: int
    token: int
    text: str

    def __str__(self) -> str:
        if self.text.startswith("{"):
            return f"{self.section}[{self.piece}] {self.text}"
        return f"{self.section}[{self.piece}][{self.token}] {self.text!r}"


def signal_tokens(encoder: PromptEncoder) -> tuple[PromptTemplate, tuple[SignalToken, ...]]:
    """The template in which all that can be signals are, and these tokens in the order of the prompt.

    Its prompts hold the same ids as the encoder's. A piece that would be cut into other tokens if it stood apart (next
    to a chat template's own text, say) cannot hold a signal and is left out.
    """
    template = encoder.template
    expected = _suffix_ids(encoder)
    tokens: list[SignalToken] = []
    for section, index, piece in _before_number(template):
        marked, found = _all_signals(encoder, section, index, piece)
        if marked is None:
            continue
        trial = _with_piece(template, section, index, marked)
        try:
            same = _suffix_ids(PromptEncoder(trial, encoder.tokenizer, encoder.limits)) == expected
        except UserError:  # limits.suffix_tokens has no room for a suffix up to here
            same = False
        if same:
            template, tokens = trial, tokens + found
    return template, tuple(tokens)


def with_signals(template: PromptTemplate, tokens: Collection[SignalToken]) -> PromptTemplate:
    """The template whose signals are `tokens` (of `signal_tokens`), and no other; its prompts hold the same ids.

    A piece that held a signal and no longer does stays apart (`signal: []`), so that it is not tokenised together with
    its neighbours. Raises `UserError` for no token.
    """
    if not tokens:
        raise UserError("no signal token was chosen: name at least one")
    for section, index, piece in _before_number(template):
        chosen = sorted(token.token for token in tokens if (token.section, token.piece) == (section, index))
        if piece.kind == "slot":
            signal: bool | tuple[int, ...] = bool(chosen)
        elif chosen == [-1]:
            signal = True
        else:
            signal = tuple(chosen) if chosen or piece.signal is not False else False
        template = _with_piece(template, section, index, replace(piece, signal=signal))
    return template


def present_signals(encoder: PromptEncoder, tokens: Collection[SignalToken]) -> tuple[SignalToken, ...]:
    """Those of `tokens` that are signals of the encoder's own template."""
    present = []
    for section, index, piece in _before_number(encoder.template):
        length = 1 if piece.kind == "slot" else len(encoder.tokenizer.encode_scaffold(piece.text))
        wanted = {-1} if piece.signal is True else {token % length - length for token in piece.signal or ()}
        present += [t for t in tokens if (t.section, t.piece) == (section, index) and t.token in wanted]
    return tuple(present)


def same_text(one: PromptTemplate, other: PromptTemplate) -> bool:
    """Whether two templates differ in nothing but their names, their signals, and where plain text is cut."""
    return _bare(one).fingerprint == _bare(other).fingerprint


def _bare(template: PromptTemplate) -> PromptTemplate:
    """Without signals; neighbouring literals are one piece."""

    def merged(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        result: list[Piece] = []
        for piece in pieces:
            if piece.kind == "literal" and result and result[-1].kind == "literal":
                result[-1] = Piece("literal", result[-1].text + piece.text)
            else:
                result.append(replace(piece, signal=False))
        return tuple(result)

    return replace(template, suffix=merged(template.suffix), answer=merged(template.answer))


def _before_number(template: PromptTemplate) -> list[tuple[Literal["suffix", "answer"], int, Piece]]:
    """(section, place, piece) of the literals and queries before the answer's number."""
    number = [piece.kind == "slot" for piece in template.answer].index(True)
    suffix = [("suffix", index, piece) for index, piece in enumerate(template.suffix) if piece.kind != "special"]
    answer = [("answer", index, piece) for index, piece in enumerate(template.answer[:number])]
    return [*suffix, *((s, i, p) for s, i, p in answer if p.kind != "special")]  # pyright: ignore[reportReturnType]


def _all_signals(
    encoder: PromptEncoder, section: Literal["suffix", "answer"], index: int, piece: Piece
) -> tuple[Piece | None, list[SignalToken]]:
    if piece.kind == "slot":
        return replace(piece, signal=True), [SignalToken(section, index, -1, f"{{{piece.text}}}, its last token")]
    ids = encoder.tokenizer.encode_scaffold(piece.text)
    places = tuple(range(-len(ids), 0))
    found = [
        SignalToken(section, index, place, encoder.tokenizer.decode([token]))
        for place, token in zip(places, ids, strict=True)
    ]
    return (replace(piece, signal=places) if ids else None), found


def _with_piece(template: PromptTemplate, section: str, index: int, piece: Piece) -> PromptTemplate:
    pieces = list(getattr(template, section))
    pieces[index] = piece
    return replace(template, **{section: tuple(pieces)})


def _suffix_ids(encoder: PromptEncoder) -> list[int]:
    """The suffix of a probe, its answer included."""
    return encoder.encode(_PROBE, answer=[0]).suffix.tolist()
