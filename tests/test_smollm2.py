"""SmolLM2-135M-Instruct, real weights: GGUF -> our decoder, and GGUF -> our export -> `transformers` on torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from blockrank.errors import UserError
from blockrank.models import gguf, hf
from blockrank.models.decoder import Decoder
from blockrank.models.loading import decoder_from, flat_parameters, load_decoder
from blockrank.prompts.tokenizer import Tokenizer, load_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT = "The capital of France is"
TEXTS = (
    PROMPT,
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "In 2024, the 17 members of the committee — 東京, Zürich and São Paulo — met again; ranking documents by relevance "
    "to a query is the central problem of information retrieval. 🙂",
)


@dataclass
class Pair:
    """The same weights twice, and the folder by which they went to torch."""

    decoder: Decoder
    reference: Any
    tokenizer: Tokenizer
    folder: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    try:
        path = gguf.embedded_model_path()
    except UserError as error:
        pytest.skip(str(error))
    config, parameters, tokenizer = gguf.read_config(path), gguf.read_parameters(path), load_tokenizer(path)
    folder = hf.save(
        tmp_path_factory.mktemp("smollm2") / "export", config, parameters, tokenizer, max_shard_bytes=1 << 28
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return Pair(decoder_from(config, parameters), reference, tokenizer, folder)


def greedy(decoder: Decoder, prompt: list[int], steps: int) -> list[int]:
    """The prompt with our `steps` most likely next tokens, end-of-text or not."""
    ids = np.zeros((1, len(prompt) + steps), np.int32)
    ids[0, : len(prompt)] = prompt
    for end in range(len(prompt), ids.shape[1]):
        ids[0, end] = next_tokens(decoder, jnp.asarray(ids))[0, end - 1]
    return ids[0].tolist()


@nnx.jit
def next_tokens(decoder: Decoder, ids: jax.Array) -> jax.Array:
    return decoder.logits(ids).argmax(-1)


def torch_logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def test_export_is_a_sharded_llama(pair: Pair) -> None:
    assert type(pair.reference).__name__ == "LlamaForCausalLM"
    assert len(list(pair.folder.glob("model-*-of-*.safetensors"))) >= 2
    assert sum(weight.numel() for weight in pair.reference.parameters()) == 134_515_008


def test_export_reads_back_bit_equal(pair: Pair) -> None:
    ours, again = flat_parameters(pair.decoder), flat_parameters(load_decoder(pair.folder))
    assert ours.keys() == again.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(again[path], value, err_msg=path)


def test_logits(pair: Pair) -> None:
    ids = [pair.tokenizer.encode(text) for text in TEXTS]
    batch = np.zeros((len(ids), max(map(len, ids))), np.int32)
    for row, tokens in zip(batch, ids, strict=True):
        row[: len(tokens)] = tokens
    ours = np.asarray(nnx.jit(Decoder.logits)(pair.decoder, jnp.asarray(batch)))
    for logits, tokens in zip(ours, ids, strict=True):
        expected = torch_logits(pair.reference, tokens)
        np.testing.assert_allclose(logits[: len(tokens)], expected, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_greedy_continuation(pair: Pair) -> None:
    """Along our own 32 tokens, torch too finds each the most likely."""
    prompt = pair.tokenizer.encode(PROMPT)
    ids = greedy(pair.decoder, prompt, steps=32)
    assert len(ids) == len(prompt) + 32
    theirs = torch_logits(pair.reference, ids)
    assert theirs.argmax(-1)[len(prompt) - 1 : -1].tolist() == ids[len(prompt) :]
    assert pair.tokenizer.decode(ids[len(prompt) :]).startswith(" Paris")


def test_exported_tokenizer_is_the_same(pair: Pair) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(pair.folder)
    again = load_tokenizer(pair.folder)
    for text in TEXTS:
        ids = pair.tokenizer.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert again.encode(text) == ids
    assert theirs.eos_token_id == pair.tokenizer.eos_id
