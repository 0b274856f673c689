"""Which bi-encoder searches a collection, and how its embeddings are made and kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blockrank.errors import UserError, at_least

DENSE = "dense"


@dataclass(frozen=True)
class EncoderSettings:
    """`encoder` in `configs/prepare.yaml`.

    `path`: a folder of sentence-transformers or Hugging Face (BERT or DistilBERT, safetensors), or `all-minilm-l6-v2`.
    `pooling`, `normalize`, `max_length` and the prefixes are the folder's own where null. `batch_tokens`: tokens, with
    padding, that all devices take at once. `shard_size`: passages in a file, the most that a kill can lose.
    `index_dir`: where embeddings are kept (null: in the cache).
    """

    path: str = "all-minilm-l6-v2"
    pooling: Literal["mean", "cls"] | None = None
    normalize: bool | None = None
    max_length: int | None = None
    query_prefix: str | None = None
    document_prefix: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch_tokens: int = 16_384
    shard_size: int = 65_536
    index_dir: Path | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_tokens", "shard_size")
        at_least(self, 3, "max_length")


def dense_settings(source: str) -> EncoderSettings | None:
    """The encoder that `dense` or `dense:<path or name>` stands for; None for any other source."""
    name, colon, path = source.partition(":")
    if name != DENSE:
        return None
    if colon and not path:
        raise UserError("candidates: `dense:` needs a folder or name of an encoder after the colon")
    return EncoderSettings(path) if path else EncoderSettings()
