"""What every tokenizer does, whatever file it comes from, and the loader that picks the reader."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from blockrank.errors import UserError

CONFIG_FILE = "tokenizer_config.json"


class Tokenizer(Protocol):
    """Text to ids and back, with no hidden additions.

    Pieces encoded one after another are continuations: no space is invented in front of them. `encode(" " + text)` is
    what a SentencePiece model with a dummy prefix makes of `text` alone (`prefix_space` is then True).
    """

    bos_id: int | None
    eos_id: int | None
    pad_id: int
    vocab_size: int
    prefix_space: bool
    chat_template: str | None

    def encode(self, text: str) -> list[int]:
        """Ids of untrusted text: no special token is added, and none is recognised in it."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on several cores where the reader can."""
        ...

    def encode_scaffold(self, text: str) -> list[int]:
        """Ids of trusted text, in which special tokens are recognised."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens written out."""
        ...

    def special_id(self, token: str) -> int:
        """The id of a special token. Raises UserError when the vocabulary has no such special token."""
        ...

    def token(self, token_id: int | None) -> str | None:
        """The piece that an id stands for (None for None)."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write files from which `load_tokenizer(folder)` makes the same tokenizer."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides ids and chat rendering."""
        ...


SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class TokenizerConfig:
    """The parts of a tokenizer that its vocabulary file does not say."""

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None = None

    @classmethod
    def read(cls, folder: Path) -> TokenizerConfig:
        """From `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja`, as far as they exist."""
        values = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / CONFIG_FILE)}
        config = cls(
            **{name: _token(values.get(name), f"{folder}: {name}") for name in SPECIAL_TOKENS},
            chat_template=_chat_template(values.get("chat_template")),
        )
        jinja = folder / "chat_template.jinja"
        if not jinja.is_file():
            return config
        try:
            return replace(config, chat_template=jinja.read_text("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{jinja}: not UTF-8 ({error})") from error

    def write(self, folder: Path, tokenizer_class: str, **extra: Any) -> None:
        values = {"tokenizer_class": tokenizer_class, **asdict(self), **extra}
        text = json.dumps({key: value for key, value in values.items() if value is not None}, indent=2, sort_keys=True)
        (folder / CONFIG_FILE).write_text(text + "\n", "utf-8")


class BaseTokenizer(ABC):
    """The shared half of the readers; a reader supplies `_encode`, `_decode`, `token` and `save`."""

    prefix_space: bool

    def __init__(
        self, special_ids: Mapping[str, int], vocab_size: int, config: TokenizerConfig, pad_fallback: int | None = None
    ) -> None:
        self.special_ids = dict(special_ids)
        self.vocab_size = vocab_size
        self.config = config
        self.chat_template = config.chat_template
        self.bos_id = None if config.bos_token is None else self.special_id(config.bos_token)
        self.eos_id = None if config.eos_token is None else self.special_id(config.eos_token)
        pad = config.pad_token if config.pad_token is not None else config.unk_token
        fallback = next((token for token in (pad_fallback, self.eos_id) if token is not None), 0)
        self.pad_id = fallback if pad is None else self.special_id(pad)
        self._specials = set(self.special_ids.values())

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    @abstractmethod
    def token(self, token_id: int | None) -> str | None: ...

    @abstractmethod
    def save(self, folder: str | Path) -> None: ...

    @abstractmethod
    def _content(self) -> bytes:
        """The bytes that decide ids, for the fingerprint."""

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        config = json.dumps(asdict(self.config), sort_keys=True).encode()
        return hashlib.sha256(self._content() + b"\0" + config).hexdigest()

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        tokens = sorted(self.special_ids, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, tokens)) + ")") if tokens else None

    def special_id(self, token: str) -> int:
        if token not in self.special_ids:
            raise UserError(f"the tokenizer has no special token {token!r}; its first are {list(self.special_ids)[:8]}")
        return self.special_ids[token]

    def encode(self, text: str) -> list[int]:
        text = _without_surrogates(text)
        return self._without_specials(text, self._encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        texts = [_without_surrogates(text) for text in texts]
        return [self._without_specials(*pair) for pair in zip(texts, self._encode_batch(texts), strict=True)]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _without_specials(self, text: str, ids: list[int]) -> list[int]:
        if self._specials.isdisjoint(ids):
            return ids
        # A model may know a special token's spelling as an ordinary piece: break the spelling up.
        parts: list[str] = []
        for piece in self._split_specials(text):
            parts += [piece[:1], piece[1:]] if piece in self.special_ids else [piece]
        ids = [token for part in parts if part for token in self._encode(part)]
        return [token for token in ids if token not in self._specials or self.token(token) == self.config.unk_token]

    def encode_scaffold(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._split_specials(text):
            if piece in self.special_ids:
                ids.append(self.special_ids[piece])
            elif piece:
                ids.extend(self._encode(piece))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode([int(token) for token in ids])

    def _split_specials(self, text: str) -> list[str]:
        return [text] if self._special_pattern is None else self._special_pattern.split(text)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """A tokenizer from a folder (`tokenizer.json`, a SentencePiece model or a GGUF file in it) or from one such file.

    Raises UserError when there is none, or when the file cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        path = _vocabulary_file(path)
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file or folder")
    from blockrank.prompts.tokenizer_gguf import gguf_tokenizer
    from blockrank.prompts.tokenizer_json import JsonTokenizer
    from blockrank.prompts.tokenizer_sentencepiece import SentencePieceTokenizer

    if path.suffix == ".gguf":
        return gguf_tokenizer(path)
    config = TokenizerConfig.read(path.parent)
    if path.suffix == ".json":
        return JsonTokenizer.read(path, config)
    return SentencePieceTokenizer.read(path, config)


def _vocabulary_file(folder: Path) -> Path:
    for pattern in ("tokenizer.json", "tokenizer.model", "*.model", "*.model.v*", "*.gguf"):
        files = sorted(folder.glob(pattern))
        if len(files) > 1:
            raise UserError(f"{folder}: several tokenizers; name one of {[file.name for file in files]}")
        if files:
            return files[0]
    raise UserError(f"{folder}: no tokenizer.json, SentencePiece model (*.model) or *.gguf file in this folder")


def _without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object")
    return values


def _token(value: Any, where: str) -> str | None:
    token = value.get("content") if isinstance(value, dict) else value
    if token is not None and not isinstance(token, str):
        raise UserError(f"{where}={token!r:.80} is not a token's text")
    return token


def _chat_template(value: Any) -> str | None:
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        return named.get("default")
    return value
