"""A tiny model, tokenizer-free prompts and a batch iterator with a position, for the tests of training.

Programs are compiled once for all trainers, also those in processes that tests start (a compilation cache on disk).
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from blockrank.layout import TokenLayout
from blockrank.losses import Objective, TrainingBatch
from blockrank.models.config import DecoderConfig
from blockrank.models.loading import random_decoder
from blockrank.training.batches import HostBatch

VOCABULARY = 64

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="blockrank-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def tiny_config(layers: int = 2, vocabulary: int = VOCABULARY) -> DecoderConfig:
    return DecoderConfig(
        family="llama",
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        windows=(None,) * layers,
        tie_embeddings=True,
    )


def tiny_model(layers: int = 2, seed: int = 0) -> nnx.Module:
    return random_decoder(tiny_config(layers), seed)


OBJECTIVE = Objective(score_layer=1, temperature=0.5)


def make_batch(step: int, batch_size: int = 4, documents: int = 3) -> HostBatch:
    """Lists of random documents whose positive shares the query's tokens; label lengths differ between lists."""
    rng = np.random.default_rng([7, step])
    blocks, positive = [], np.zeros((batch_size, documents), bool)
    for row in range(batch_size):
        query = rng.integers(10, VOCABULARY, 4).tolist()
        lists = [rng.integers(10, VOCABULARY, rng.integers(3, 9)).tolist() for _ in range(documents)]
        target = int(rng.integers(documents))
        lists[target] += query[:2]
        positive[row, target] = True
        blocks.append([[1, *query], *lists, [2, *query, 3, 4, 5 + target, 9]])
    layout = TokenLayout.from_blocks(blocks, signals=(-4, -3), answer_length=2, row_length=16, suffix_offset=64)
    labels = np.array(layout.labels)
    labels[::2, -1] = -1
    layout = dataclasses.replace(layout, labels=labels)
    ids = tuple(f"q{step}-{row}" for row in range(batch_size))
    return HostBatch(ids, TrainingBatch(layout, positive), int(layout.token_count().sum()), 0.1, 0.0, 0)


class CountedBatches:
    """Batches made from their number; the state is the next number."""

    def __init__(self, make: Callable[[int], HostBatch] = make_batch, stop: int = 10**9):
        self.make, self.stop, self.next = make, stop, 0

    def __iter__(self) -> CountedBatches:
        return self

    def __next__(self) -> HostBatch:
        if self.next >= self.stop:
            raise StopIteration
        self.next += 1
        return self.make(self.next)

    def get_state(self) -> dict[str, Any]:
        return {"next": self.next}

    def set_state(self, state: dict[str, Any]) -> None:
        self.next = state["next"]
