"""The prompts that all systems read: drawn to a distribution of lengths, or of a real collection."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from blockrank.benchmark.settings import BenchConfig, CollectionLists, SyntheticLists
from blockrank.errors import UserError
from blockrank.prompts.encode import PromptEncoder, PromptSegments
from blockrank.prompts.template import PromptTemplate
from blockrank.retrieval.lists import ListsConfig, open_lists
from blockrank.types import CandidateList


def make_prompts(config: BenchConfig, vocabulary: int) -> dict[int, PromptSegments]:
    """One prompt for each number of candidates."""
    if isinstance(config.lists, SyntheticLists):
        return {n: draw_prompt(config.lists, n, vocabulary, config.seed) for n in config.candidates}
    return _from_collection(config, config.lists)


def draw_lengths(lists: SyntheticLists, count: int, rng: np.random.Generator) -> np.ndarray:
    """Log-normal lengths in tokens, int64 [count]."""
    location = np.log(lists.mean) - lists.spread**2 / 2
    drawn = np.round(rng.lognormal(location, lists.spread, count)).astype(np.int64)
    return np.clip(drawn, lists.shortest, lists.longest)


def draw_prompt(lists: SyntheticLists, count: int, vocabulary: int, seed: int) -> PromptSegments:
    """A prompt of random tokens; the same seed and count give the same one."""
    rng = np.random.default_rng((seed, count))
    lengths = draw_lengths(lists, count, rng)

    def tokens(length: int) -> np.ndarray:
        return rng.integers(1, vocabulary, length, dtype=np.int32)

    return _segments(tokens(lists.prefix), [tokens(length) for length in lengths], tokens(lists.suffix))


def _segments(prefix: np.ndarray, documents: list[np.ndarray], suffix: np.ndarray) -> PromptSegments:
    return PromptSegments(
        prefix=prefix,
        documents=tuple(documents),
        document_index=tuple(range(len(documents))),
        suffix=suffix,
        signals=(len(suffix) - 2, len(suffix) - 1),
        answer_start=len(suffix),
        truncated=(False,) * len(documents),
        query_truncated=False,
    )


def _from_collection(config: BenchConfig, lists: CollectionLists) -> dict[int, PromptSegments]:
    assert config.data is not None
    deepest = max(config.candidates)
    chosen = ListsConfig(split=lists.split, candidates=lists.candidates, depth=deepest)
    opened = open_lists(config.data.open(), chosen)
    longest = next((c for c in opened if len(c) >= deepest), None)
    if longest is None:
        found = max((len(c) for c in opened), default=0)
        raise UserError(f"candidates={deepest}: the longest list of split {lists.split!r} has {found} documents")
    encoder = PromptEncoder(PromptTemplate.from_yaml(lists.prompt), config.model.load_tokenizer(), lists.limits)
    return {n: encoder.encode(CandidateList(longest.query, longest.documents[:n])) for n in config.candidates}


def save_prompt(path: Path, segments: PromptSegments) -> None:
    """For the processes that measure: tokens and where the signals are."""
    with path.open("wb") as file:
        np.savez(
            file,
            prefix=segments.prefix,
            documents=np.concatenate(segments.documents),
            ends=np.cumsum([len(ids) for ids in segments.documents]),
            suffix=segments.suffix,
            signals=np.asarray(segments.signals, np.int32),
        )


def load_prompt(path: Path) -> PromptSegments:
    with np.load(path) as saved:
        documents = np.split(saved["documents"], saved["ends"][:-1])
        prompt = _segments(saved["prefix"], documents, saved["suffix"])
        return replace(prompt, signals=tuple(map(int, saved["signals"])))
