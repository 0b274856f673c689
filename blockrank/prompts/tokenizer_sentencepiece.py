"""SentencePiece models (Mistral, Llama 2, T5), through the `sentencepiece` library."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import sentencepiece

from blockrank.errors import UserError
from blockrank.prompts.tokenizer import BaseTokenizer, TokenizerConfig

protobuf: Any = import_module("sentencepiece.sentencepiece_model_pb2")
"""SentencePiece's generated protocol buffer classes, which type checkers cannot see."""

_Piece = protobuf.ModelProto.SentencePiece


class SentencePieceTokenizer(BaseTokenizer):
    """A SentencePiece model whose dummy prefix is switched off, so that pieces are continuations."""

    def __init__(self, model: bytes, config: TokenizerConfig, source: str = "tokenizer.model") -> None:
        self._model = model
        proto = protobuf.ModelProto()
        try:
            proto.ParseFromString(model)
        except Exception as error:  # protobuf's error class differs by backend
            raise UserError(f"{source}: not a SentencePiece model ({error})") from error
        if not proto.pieces:
            raise UserError(f"{source}: not a SentencePiece model (no pieces)")
        self.prefix_space = proto.normalizer_spec.add_dummy_prefix
        self._collapse_spaces = proto.normalizer_spec.remove_extra_whitespaces
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        specials = {
            piece.piece: index
            for index, piece in enumerate(proto.pieces)
            if piece.type in (_Piece.CONTROL, _Piece.UNKNOWN)
        }
        ids = {name: getattr(self._processor, f"{name}_id")() for name in ("bos", "eos", "pad", "unk")}
        known = {f"{name}_token": proto.pieces[index].piece for name, index in ids.items() if index >= 0}
        stated = {name: getattr(config, name) or known.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        for name, token in stated.items():
            if token is not None and token not in specials:
                index = self._processor.piece_to_id(token)
                if self._processor.id_to_piece(index) != token:
                    raise UserError(f"{source}: {name} {token!r} is not in the vocabulary")
                specials[token] = index
        full = TokenizerConfig(**stated, unk_token=known.get("unk_token"), chat_template=config.chat_template)
        super().__init__(specials, len(proto.pieces), full)

    @classmethod
    def read(cls, path: Path, config: TokenizerConfig) -> SentencePieceTokenizer:
        return cls(path.read_bytes(), config, str(path))

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(re.sub(" {2,}", " ", text) if self._collapse_spaces else text)

    def _decode(self, ids: list[int]) -> str:
        runs = groupby(ids, key=lambda index: self._processor.is_control(index))
        return "".join(
            "".join(map(self._processor.id_to_piece, run)) if control else self._processor.decode(list(run))
            for control, run in runs
        )

    def token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._processor.id_to_piece(token_id)

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.model").write_bytes(self._model)
        self.config.write(folder, "LlamaTokenizer", add_bos_token=True, add_eos_token=False, legacy=False)

    def _content(self) -> bytes:
        return self._model
