"""Tokenizers from the metadata of GGUF files.

Built here, not by `transformers`, whose GGUF reader loses the digit splitting of the `smollm` pre-tokenizer and the eos
token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from blockrank.errors import UserError
from blockrank.prompts.gguf_file import field_value, open_gguf
from blockrank.prompts.tokenizer import BaseTokenizer, TokenizerConfig
from blockrank.prompts.tokenizer_json import JsonTokenizer
from blockrank.prompts.tokenizer_sentencepiece import SentencePieceTokenizer, protobuf

CONTROL, USER_DEFINED, BYTE = 3, 4, 6
"""Token types of GGUF; they are SentencePiece's own numbers."""

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def gguf_tokenizer(path: str | Path) -> BaseTokenizer:
    """The tokenizer a GGUF file describes: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).

    Raises UserError for a kind or pre-tokenizer we do not implement.
    """
    path = Path(path)
    reader = open_gguf(path)
    kind = field_value(reader, "tokenizer.ggml.model")
    tokens = field_value(reader, "tokenizer.ggml.tokens")
    if not tokens:
        raise UserError(f"{path}: GGUF key tokenizer.ggml.tokens is missing")
    config = TokenizerConfig(
        bos_token=_special(reader, tokens, "bos", path),
        eos_token=_special(reader, tokens, "eos", path),
        pad_token=_special(reader, tokens, "padding", path),
        unk_token=_special(reader, tokens, "unknown", path),
        chat_template=field_value(reader, "tokenizer.chat_template"),
    )
    types = field_value(reader, "tokenizer.ggml.token_type", [1] * len(tokens))
    if kind == "gpt2":
        return JsonTokenizer(_byte_level_bpe(reader, tokens, types, path), config, str(path))
    if kind == "llama":
        return SentencePieceTokenizer(_sentencepiece(reader, tokens, types, config, path), config, str(path))
    raise UserError(f"{path}: tokenizer.ggml.model={kind!r} is not supported (have gpt2, llama)")


def _special(reader: GGUFReader, tokens: list[str], name: str, path: Path) -> str | None:
    index = field_value(reader, f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise UserError(f"{path}: tokenizer.ggml.{name}_token_id={index} is outside the vocabulary of {len(tokens)}")
    return tokens[index]


def _pre_tokenizer(name: str | None, path: Path) -> Any:
    """llama.cpp's name of a pre-tokenizer -> its steps, in order: what splits first cannot be joined later."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in ("smollm", "starcoder"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "gpt-2":
        return byte_level
    if name in ("llama-bpe", "qwen2"):
        words = Regex(_LLAMA3_WORDS if name == "llama-bpe" else _QWEN2_WORDS)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), bytes_only])
    raise UserError(
        f"{path}: tokenizer.ggml.pre={name!r} is not supported (have gpt-2, llama-bpe, qwen2, smollm, starcoder)"
    )


def _byte_level_bpe(reader: GGUFReader, tokens: list[str], types: list[int], path: Path) -> dict[str, Any]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise UserError(f"{path}: tokenizer.ggml.tokens holds {len(tokens) - len(vocabulary)} duplicates")
    name = field_value(reader, "tokenizer.ggml.pre")
    pairs = [tuple(merge.split(" ", 1)) for merge in field_value(reader, "tokenizer.ggml.merges", [])]
    try:
        model = BPE(vocab=vocabulary, merges=pairs, ignore_merges=name == "llama-bpe")
    except Exception as error:  # the Rust side raises bare Exception
        raise UserError(f"{path}: tokenizer.ggml.merges do not fit the vocabulary ({error})") from error
    tokenizer = RustTokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(name, path)
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, token_type in zip(tokens, types, strict=True) if token_type == kind]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    return json.loads(tokenizer.to_str())


def _sentencepiece(
    reader: GGUFReader, tokens: list[str], types: list[int], config: TokenizerConfig, path: Path
) -> bytes:
    scores = field_value(reader, "tokenizer.ggml.scores")
    if scores is None:
        raise UserError(f"{path}: GGUF key tokenizer.ggml.scores is missing")
    proto = protobuf.ModelProto()
    for token, score, token_type in zip(tokens, scores, types, strict=True):
        proto.pieces.add(piece=token, score=score, type=token_type)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = protobuf.TrainerSpec.BPE
    trainer.vocab_size = len(tokens)
    trainer.byte_fallback = BYTE in types
    for name in ("unk", "bos", "eos", "pad"):
        token = getattr(config, f"{name}_token")
        if token is not None:
            setattr(trainer, f"{name}_piece", token)
            setattr(trainer, f"{name}_id", tokens.index(token))
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = field_value(reader, "tokenizer.ggml.add_space_prefix", True)
    normalizer.remove_extra_whitespaces = field_value(reader, "tokenizer.ggml.remove_extra_whitespaces", False)
    return proto.SerializeToString()
