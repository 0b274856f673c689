"""Prompt templates: YAML files of literal pieces and slots, never one string that is cut up again.

A template has four lists of pieces: `prefix`, `document`, `suffix` and `answer`. A piece is a string in which
`{query}`, `{count}` (how many documents have text), `{title}`, `{text}` or `{number}` (a document's number, or letter)
stand for content (write `{{` for a brace), or a mapping: `text` with `signal: true` (its last token is a signal
position) or `signal: [-3, -1]` (these tokens are, counted as Python's lists are; `[]` keeps a piece apart that has
none), `text: "{number}"` with a `separator` (for several answers), a document's literal `text` that stands only `with:
title` (or text), or `special: <bos>`, `<turn>` or `<eos>`. `{query}` alone may be a signal by its last token.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from blockrank.errors import UserError

Section = Literal["prefix", "document", "suffix", "answer"]
Numbering = Literal["content", "position", "hash"]
Identifiers = Literal["number", "letter"]

SECTIONS: tuple[Section, ...] = get_args(Section)
SLOTS: dict[Section, tuple[str, ...]] = {
    "prefix": ("query", "count"),
    "document": ("title", "text", "number"),
    "suffix": ("query", "count"),
    "answer": ("number",),
}
SPECIALS: dict[Section, tuple[str, ...]] = {
    "prefix": ("<bos>",),
    "document": (),
    "suffix": ("<turn>",),
    "answer": ("<eos>",),
}
TEMPLATE_FILE = "prompt.yaml"
HASHED_NUMBERS = 9000
"""How many numbers `numbering: hash` has: with `first_number: 1000` all of them have four digits."""


@dataclass(frozen=True)
class Piece:
    """A run of the prompt that is tokenised apart from its neighbours.

    `literal`: `text` as it stands. `slot`: `text` names the content, `lead` is white space tokenised together with it
    (and left out when the content is empty); `separator` stands between several numbers. `slot_with`: the slot without
    whose content a literal is left out. `special`: `<bos>`, `<turn>` (the user's turn ends and the assistant's begins;
    a line break without a chat template) or `<eos>` (the end of the answer). `signal`: whether the last token is a
    signal, or which tokens are.
    """

    kind: Literal["literal", "slot", "special"]
    text: str
    lead: str = ""
    signal: bool | tuple[int, ...] = False
    separator: str = ""
    slot_with: str = ""

    @property
    def plain(self) -> bool:
        """Whether this is literal text that may join the literal text beside it."""
        return self.kind == "literal" and self.signal is False and not self.slot_with

    def to_config(self) -> Any:
        if self.kind == "special":
            return {"special": self.text}
        text = f"{self.lead}{{{self.text}}}"
        if self.kind == "literal":
            text = self.text.replace("{", "{{").replace("}", "}}")
        if self.signal is not False:
            return {"text": text, "signal": True if self.signal is True else list(self.signal)}
        if self.slot_with:
            return {"text": text, "with": self.slot_with}
        return {"text": text, "separator": self.separator} if self.separator else text


@dataclass(frozen=True)
class PromptTemplate:
    """How a candidate list becomes text. See the module's docstring for the YAML.

    `numbering` says which document gets which number, from `first_number` on: `content` numbers in the order of content
    hashes, so that scores do not depend on candidate order; `position` in candidate order; `hash` adds a hash of the
    content below `HASHED_NUMBERS`, so that a document reads the same in every list (and two may share a number).
    `identifiers`: numbers are written as such, or as the letters A to Z. `chat` wraps the tokenizer's own chat template
    around the prompt. `system`: the words of the system's turn; a prompt without one begins with them.
    """

    name: str
    prefix: tuple[Piece, ...]
    document: tuple[Piece, ...]
    suffix: tuple[Piece, ...]
    answer: tuple[Piece, ...]
    numbering: Numbering = "content"
    first_number: int = 1
    chat: bool = False
    identifiers: Identifiers = "number"
    system: str = ""

    @classmethod
    def from_yaml(cls, name_or_path: str | Path) -> PromptTemplate:
        """Read a template that comes with the package (`paper`, `release`, …) or a YAML file. Raises UserError."""
        if not isinstance(name_or_path, str | Path):
            raise UserError(
                f"prompt={name_or_path!r:.80} is neither the name of a template nor the path of a YAML file"
            )
        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml"):
            path = prompt_folder() / f"{name_or_path}.yaml"
        if not path.is_file():
            known = sorted(file.stem for file in prompt_folder().glob("*.yaml"))
            raise UserError(f"{path}: no such prompt template; the package has {known}")
        try:
            values = yaml.safe_load(path.read_text("utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
        return cls.from_config(values, str(path), path.stem)

    @classmethod
    def from_config(cls, values: Any, source: str = "prompt", name: str | None = None) -> PromptTemplate:
        """Check a mapping as YAML gives it. Raises UserError that names `source` and the key."""
        if not isinstance(values, Mapping):
            raise UserError(f"{source}: a template is a mapping with the keys {list(SECTIONS)}")
        known = {*SECTIONS, "name", "numbering", "first_number", "chat", "identifiers", "system"}
        if unknown := sorted(set(map(str, values)) - known):
            raise UserError(f"{source}: unknown key {unknown[0]!r}; a template has {sorted(known)}")
        sections = {section: _pieces(values.get(section), section, source) for section in SECTIONS}
        template = cls(
            name=str(values.get("name", name or source)),
            numbering=_choice(values, "numbering", get_args(Numbering), source),
            first_number=_typed(values, "first_number", int, 1, source),
            chat=_typed(values, "chat", bool, False, source),
            identifiers=_choice(values, "identifiers", get_args(Identifiers), source),
            system=_typed(values, "system", str, "", source),
            **sections,
        )
        template._check(source)
        return template

    def to_config(self) -> dict[str, Any]:
        """The mapping that `from_config` reads back into an equal template."""
        pieces = {section: [piece.to_config() for piece in getattr(self, section)] for section in SECTIONS}
        settings = {"numbering": self.numbering, "first_number": self.first_number, "chat": self.chat}
        return {"name": self.name, **settings, **self._special(), **pieces}

    def identifier(self, number: int) -> str:
        """How a document's number is written. Raises UserError for a number beyond the letters."""
        if self.identifiers == "number":
            return str(number)
        place = number - self.first_number
        if place >= len(string.ascii_uppercase):
            raise UserError(
                f"template {self.name!r} names documents by the letters A to Z, which are too few for {place + 1}: "
                "set identifiers: number, or rank fewer at once"
            )
        return string.ascii_uppercase[place]

    def save(self, folder: str | Path) -> Path:
        """Write `prompt.yaml` into a checkpoint folder; `from_yaml` of that file gives this template back."""
        path = Path(folder) / TEMPLATE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(self.to_config(), allow_unicode=True, sort_keys=False, width=2**16), "utf-8")
        return path

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of everything but the name."""
        content = {key: value for key, value in asdict(self).items() if key not in ("name", "identifiers", "system")}
        content |= self._special()
        for piece in chain.from_iterable(content[section] for section in SECTIONS):
            if not piece["slot_with"]:
                del piece["slot_with"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _special(self) -> dict[str, str]:
        """The settings few templates have, where they are not the default."""
        given = {"identifiers": self.identifiers, "system": self.system}
        return {key: value for key, value in given.items() if value not in ("number", "")}

    @property
    def query_in_prefix(self) -> bool:
        """Whether documents are read with the query before them."""
        return "query" in self._slots("prefix")

    def _slots(self, section: Section) -> list[str]:
        return [piece.text for piece in getattr(self, section) if piece.kind == "slot"]

    def _check(self, source: str) -> None:
        slots = self._slots
        required: tuple[tuple[Section, str], ...]
        required = ("document", "text"), ("document", "number"), ("answer", "number")
        for section, slot in required:
            if slot not in slots(section):
                raise UserError(f"{source}: {section} has no {{{slot}}}")
        if slots("answer").count("number") > 1:
            raise UserError(f"{source}: answer has more than one {{number}}; give that one a `separator`")
        if "query" not in slots("prefix") + slots("suffix"):
            raise UserError(f"{source}: neither prefix nor suffix has {{query}}")
        if [index for index, piece in enumerate(self.prefix) if piece.kind == "special"] != [0]:
            raise UserError(f"{source}: prefix must begin with `special: <bos>` and have it once")
        for section in ("prefix", "document"):
            if any(piece.signal for piece in getattr(self, section)):
                raise UserError(f"{source}: {section} has a signal; signals stand in suffix and answer")
        if not any(piece.signal for piece in self.suffix + self.answer):
            raise UserError(f"{source}: no piece of suffix or answer has `signal: true`")
        kinds = [piece.kind == "slot" for piece in self.answer]
        if any(piece.signal for piece in self.answer[kinds.index(True) :]):
            raise UserError(f"{source}: answer has a signal after {{number}}; signals stand before it")
        turns = sum(piece.text == "<turn>" for piece in self.suffix if piece.kind == "special")
        if turns > 1 or (self.chat and not turns):
            raise UserError(f"{source}: suffix has `special: <turn>` {turns} times; with `chat: true` it needs it once")


def prompt_folder() -> Path:
    """The folder of the templates that come with the package."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "configs" / "prompt"
    return installed if installed.is_dir() else package.parent / "configs" / "prompt"


def _choice(values: Mapping[str, Any], key: str, choices: Sequence[str], source: str) -> Any:
    value = values.get(key, choices[0])
    if value not in choices:
        raise UserError(f"{source}: {key}={value!r} is not one of {list(choices)}")
    return value


def _typed(values: Mapping[str, Any], key: str, kind: type, default: Any, source: str) -> Any:
    value = values.get(key, default)
    if type(value) is not kind or (kind is int and value < 0):
        wanted = {int: "a number from 0 on", bool: "true or false", str: "a text"}[kind]
        raise UserError(f"{source}: {key}={value!r} is not {wanted}")
    return value


def _pieces(values: Any, section: Section, source: str) -> tuple[Piece, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise UserError(f"{source}: {section} is missing or not a list of pieces")
    merged: list[Piece] = []
    nested = [_piece(value, section, f"{source}: {section}[{index}]") for index, value in enumerate(values)]
    for piece in chain.from_iterable(nested):
        if piece.plain and merged and merged[-1].plain:
            merged[-1] = Piece("literal", merged[-1].text + piece.text)
        else:
            merged.append(piece)
    return tuple(merged)


def _piece(value: Any, section: Section, where: str) -> list[Piece]:
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, Mapping) or not (("text" in value) ^ ("special" in value)):
        raise UserError(f"{where}: a piece is a string or a mapping with `text` or `special`")
    if unknown := sorted(set(map(str, value)) - {"text", "special", "signal", "separator", "with"}):
        raise UserError(f"{where}: unknown key {unknown[0]!r}; a piece has text, signal, separator, with or special")
    if "special" in value:
        if value["special"] not in SPECIALS[section] or len(value) > 1:
            raise UserError(f"{where}: special {value['special']!r} cannot stand in {section}")
        return [Piece("special", value["special"])]
    if not isinstance(value["text"], str) or not value["text"]:
        raise UserError(f"{where}: text must be a string that is not empty")
    pieces = _split_slots(value["text"], section, where)
    signal = _signal(value.get("signal", False), where)
    if signal is not False and len(pieces) > 1:
        raise UserError(f"{where}: a signal piece is literal text without slots, or {{query}} alone")
    if pieces[0].kind == "slot" and signal not in (False, True):
        raise UserError(f"{where}: {{query}} is a signal by its last token only: write signal: true")
    separator = value.get("separator", "")
    if "separator" in value and (not isinstance(separator, str) or section != "answer" or pieces[0].kind != "slot"):
        raise UserError(f'{where}: separator is a string beside `text: "{{number}}"` in answer')
    slot_with = value.get("with", "")
    if "with" in value and (slot_with not in ("title", "text") or section != "document" or pieces[0].kind != "literal"):
        raise UserError(f"{where}: `with: title` or `with: text` stands beside literal text of document")
    if signal is not False or slot_with:
        return [replace(pieces[0], signal=signal, slot_with=slot_with)]
    if separator:
        return [Piece("slot", pieces[0].text, pieces[0].lead, separator=separator), *pieces[1:]]
    return pieces


def _signal(value: Any, where: str) -> bool | tuple[int, ...]:
    if isinstance(value, bool):
        return value
    whole = isinstance(value, list | tuple) and all(type(token) is int for token in value)
    if not whole or len(set(value)) < len(value):
        raise UserError(f"{where}: signal={value!r} is not true, false or a list of tokens such as [-2, -1]")
    return True if tuple(value) == (-1,) else tuple(value)


def _split_slots(text: str, section: Section, where: str) -> list[Piece]:
    """`"ID: {number} |"` -> literal `ID:`, slot ` {number}`, literal ` |`."""
    try:
        fields = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UserError(f"{where}: {error}; write a literal brace twice") from error
    pieces: list[Piece] = []
    literal = ""
    for text_before, slot, spec, conversion in fields:
        literal += text_before
        if slot is None:
            continue
        if slot not in SLOTS[section] or spec or conversion:
            known = ", ".join(f"{{{name}}}" for name in SLOTS[section])
            raise UserError(f"{where}: unknown slot {{{slot}}}; {section} takes {known}")
        kept = literal.rstrip()
        if kept:
            pieces.append(Piece("literal", kept))
        pieces.append(Piece("slot", slot, lead=literal[len(kept) :]))
        literal = ""
    return [*pieces, Piece("literal", literal)] if literal else pieces
