"""A tiny random bi-encoder's folder, as sentence-transformers lays it out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from blockrank.models.hf_encoder import parse_config, weights

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
CONFIG = {
    "model_type": "bert",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40,
}


def bi_encoder_folder(folder: Path, *, seed: int = 0, normalize: bool = False, max_length: int = 24) -> Path:
    """Writes config, weights, tokenizer and the settings: mean pooling, `normalize`, `max_length`."""
    config, rng = parse_config(CONFIG), np.random.default_rng(seed)
    (folder / "1_Pooling").mkdir(parents=True)
    tensors = {
        name: 0.5 * rng.normal(size=weight.tensor_shape).astype(np.float32)
        for weight in weights(config)
        for name, _ in weight.tensors(config.num_layers)
    }
    save_file(tensors, folder / "model.safetensors")
    modules = ["Transformer", "Pooling", *["Normalize"] * normalize]
    rows = [
        {"path": "1_Pooling" if m == "Pooling" else "", "type": f"sentence_transformers.models.{m}"} for m in modules
    ]
    contents = {
        "config.json": CONFIG,
        "modules.json": rows,
        "1_Pooling/config.json": {"pooling_mode": "mean"},
        "sentence_bert_config.json": {"max_seq_length": max_length},
        "tokenizer_config.json": {"pad_token": "[PAD]", "unk_token": "[UNK]"},
    }
    for name, values in contents.items():
        (folder / name).write_text(json.dumps(values))
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(VOCABULARY[:4])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
