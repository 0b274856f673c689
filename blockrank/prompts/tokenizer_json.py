"""Hugging Face `tokenizer.json` files, through the `tokenizers` library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from blockrank.errors import UserError
from blockrank.prompts.tokenizer import SPECIAL_TOKENS, BaseTokenizer, TokenizerConfig


class JsonTokenizer(BaseTokenizer):
    """A `tokenizer.json` read so that pieces are continuations: no dummy prefix, no truncation, no padding."""

    def __init__(self, definition: dict[str, Any], config: TokenizerConfig, source: str = "tokenizer.json") -> None:
        self._definition = definition
        core = json.loads(json.dumps(definition))
        core["truncation"] = core["padding"] = core["post_processor"] = None
        try:
            self.prefix_space = _remove_prefix_space(core)
            self._tokenizer = RustTokenizer.from_str(json.dumps(core))
        except Exception as error:  # the Rust side raises bare Exception
            raise UserError(f"{source}: not a tokenizer definition ({error})") from error
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        specials = {token.content: index for index, token in added.items() if token.special}
        for name in SPECIAL_TOKENS:
            token = getattr(config, name)
            index = None if token is None else self._tokenizer.token_to_id(token)
            if token is not None and index is None:
                raise UserError(f"{source}: {name} {token!r} is not in the vocabulary")
            if token is not None and index is not None:
                specials[token] = index
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        super().__init__(specials, max(ids, default=-1) + 1, config)

    @classmethod
    def read(cls, path: Path, config: TokenizerConfig) -> JsonTokenizer:
        try:
            definition = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: not JSON ({error})") from error
        if not isinstance(definition, dict) or "model" not in definition:
            raise UserError(f"{path}: not a tokenizer definition (no `model`)")
        return cls(definition, config, str(path))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._tokenizer.id_to_token(token_id)

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(self._definition, ensure_ascii=False, indent=1), "utf-8")
        self.config.write(folder, "PreTrainedTokenizerFast")

    def _content(self) -> bytes:
        return json.dumps(self._definition, sort_keys=True).encode()


def _remove_prefix_space(definition: dict[str, Any]) -> bool:
    """Switch off, in place, whatever puts a space before a text; whether there was any."""
    found = False
    normalizer = definition.get("normalizer") or {}
    if normalizer.get("type") == "Prepend":
        definition["normalizer"], found = None, True
    elif normalizer.get("type") == "Sequence":
        kept = [step for step in normalizer["normalizers"] if step["type"] != "Prepend"]
        found = len(kept) < len(normalizer["normalizers"])
        normalizer["normalizers"] = kept
    pre_tokenizer = definition.get("pre_tokenizer") or {}
    for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            step["prepend_scheme"], found = "never", True
            step.pop("add_prefix_space", None)
        if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
            step["add_prefix_space"], found = False, True
    return found
