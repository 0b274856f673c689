"""The literal pieces of a template as token ids, once for all prompts; slots stay to be filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from blockrank.errors import UserError
from blockrank.prompts.chat import SYSTEM_END, ChatFrame
from blockrank.prompts.template import Piece, PromptTemplate, Section
from blockrank.prompts.tokenizer import Tokenizer


@dataclass(frozen=True)
class Scaffold:
    """A literal or special piece with its ids; `signals` are indices into them."""

    ids: tuple[int, ...]
    signals: tuple[int, ...] = ()
    slot_with: str = ""


Compiled: TypeAlias = tuple[Scaffold | Piece, ...]
Cue = Literal["signals", "suffix", "number"]
"""Where a prompt without an answer ends: after the piece of the last signal token, after the template's suffix, or
right before the first number of the answer."""


def compile_section(
    section: Section, template: PromptTemplate, tokenizer: Tokenizer, frame: ChatFrame | None
) -> Compiled:
    """Scaffold pieces to ids. Chat text joins the literal beside it, as it would in one string.

    A prefix begins with exactly one bos, where the tokenizer has one. Raises UserError for a bos that is written twice,
    and for an eos that the tokenizer lacks.
    """
    compiled = _compile(getattr(template, section), section == "prefix", template, tokenizer, frame)
    return _one_bos(compiled, template, tokenizer) if section == "prefix" else compiled


def cues(suffix: Compiled, answer: Compiled) -> dict[Cue, Compiled]:
    """What follows the documents where there is no answer."""
    whole = suffix + answer
    signals = [piece.signals if isinstance(piece, Scaffold) else piece.signal for piece in whole]
    signal = max(i for i, found in enumerate(signals) if found)
    number = len(suffix) + next(i for i, piece in enumerate(answer) if isinstance(piece, Piece))
    return {"signals": whole[: signal + 1], "suffix": suffix, "number": whole[:number]}


def _compile(
    pieces: Sequence[Piece], prefix: bool, template: PromptTemplate, tokenizer: Tokenizer, frame: ChatFrame | None
) -> Compiled:
    compiled: list[Scaffold | Piece] = []
    text = ""
    first = frame is None and prefix and tokenizer.prefix_space

    def flush() -> None:
        nonlocal text
        if text:
            compiled.append(Scaffold(tuple(tokenizer.encode_scaffold(text))))
        text = ""

    def write(words: str) -> None:
        nonlocal text, first
        text += f" {words}" if first and not words.startswith(" ") else words
        first = False

    for piece in pieces:
        if piece.kind == "special" and frame is not None:
            text += {"<bos>": frame.head, "<turn>": frame.turn, "<eos>": frame.tail}[piece.text]
        elif piece.text == "<turn>" and piece.kind == "special":
            text += "\n"
        elif piece.kind == "special":
            flush()
            compiled.append(Scaffold(_special_ids(piece.text, template, tokenizer)))
            if prefix and template.system:
                write(template.system + SYSTEM_END)
        elif piece.plain:
            write(piece.text)
        else:
            flush()
            compiled.append(piece if piece.kind == "slot" else _apart(piece, template, tokenizer))
    flush()
    return tuple(compiled)


def _apart(piece: Piece, template: PromptTemplate, tokenizer: Tokenizer) -> Scaffold:
    """A literal piece that says which of its tokens are signals, or which slot it stands with."""
    ids = tuple(tokenizer.encode_scaffold(piece.text))
    wanted = (-1,) if piece.signal is True else piece.signal or ()
    signals = sorted({token % len(ids) for token in wanted if -len(ids) <= token < len(ids)})
    if len(signals) < len(wanted):
        raise UserError(
            f"template {template.name!r}: {piece.text!r} has {len(ids)} tokens, and signal={list(wanted)} "
            "names one that is not there, or one twice"
        )
    return Scaffold(ids, tuple(signals), piece.slot_with)


def _special_ids(name: str, template: PromptTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    if name == "<eos>":
        if tokenizer.eos_id is None:
            raise UserError(f"template {template.name!r} ends answers with <eos>, but the tokenizer has none")
        return (tokenizer.eos_id,)
    return () if tokenizer.bos_id is None else (tokenizer.bos_id,)


def _one_bos(prefix: Compiled, template: PromptTemplate, tokenizer: Tokenizer) -> Compiled:
    """The prefix with exactly one leading bos, when the tokenizer has one, whoever wrote it."""
    bos = tokenizer.bos_id
    if bos is None:
        return prefix
    scaffolds = [piece for piece in prefix if isinstance(piece, Scaffold) and piece.ids]
    lead = [token for piece in scaffolds[:2] for token in piece.ids][:2]
    if lead[:1] != [bos]:
        return (Scaffold((bos,)), *prefix)
    if lead == [bos, bos]:
        raise UserError(f"template {template.name!r} writes the bos token twice; leave it to `special: <bos>`")
    return prefix
