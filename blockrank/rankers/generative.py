"""Rankers that write the number of the most relevant document: greedy or beam search over the list's own numbers.

The decoding baseline of arXiv 2510.05396 (section 5): a beam of 10 gives MRR@10, a beam of 1 is greedy decoding. What
is written is one of the list's numbers by construction, so nothing has to be parsed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from blockrank.errors import UserError
from blockrank.layout import TokenLayout
from blockrank.models.beam import Trie, beam_search
from blockrank.models.decoder import Decoder
from blockrank.models.loading import cast_parameters
from blockrank.packing import round_up_geometric
from blockrank.prompts.encode import PromptEncoder, PromptSegments
from blockrank.rankers.reading import Batch, ListReader, ReadingSettings, list_scores, unread, whole
from blockrank.types import CandidateList, ListScores

EMPTY_SCORE = -1e9
"""Score of a document without text: it has no number."""
NOT_FOUND = 1.0
"""How far below the worst beam a document scores that no beam reached; such documents tie."""


@dataclass(frozen=True)
class GenerativeSettings:
    """`beams`: how many documents are found, best first; None searches all of the list.

    `reading`: None is the checkpoint's, else the `paper` preset's.
    """

    beams: int | None = 10
    reading: ReadingSettings | None = None
    kind: Literal["generative"] = "generative"

    def __post_init__(self) -> None:
        if self.beams is not None:
            whole(self, "beams", 1)


class GenerativeRanker:
    """Scores candidate lists by the log-probability of each document's number as the answer.

    Documents that no beam reached tie below those that one did (`NOT_FOUND`). `extra` holds `beams`, how many were
    found, `unreached`, how many were not, and `first_digit_entropy`, `second_digit_entropy`: the entropies (bits) of
    the digits of the numbers found.
    Whole models only: the answer comes from the last block. One device.
    """

    score_kind = "log"

    def __init__(
        self,
        model: Decoder,
        encoder: PromptEncoder,
        settings: GenerativeSettings | None = None,
        name: str = "generative",
    ) -> None:
        if encoder.template.numbering == "hash":
            raise UserError(
                f"prompt {encoder.template.name!r}: with numbering=hash two documents may share a number, so decoding "
                "one would name both: use numbering=content"
            )
        self.name, self.encoder = name, encoder
        settings = settings or GenerativeSettings()
        reading = settings.reading or ReadingSettings()
        self.settings = replace(settings, reading=reading)
        self.reader = ListReader(encoder, reading, model.config.max_positions)
        self.model = cast_parameters(model, model.dtype)
        self._state = nnx.state(self.model)
        graph = nnx.graphdef(self.model)

        def search(
            state: nnx.State, layout: TokenLayout, trie: Trie, beams: int
        ) -> tuple[Int[Array, "B W"], Float[Array, "B W"]]:
            model = nnx.merge(graph, state)
            options = {"visibility": reading.pattern, "backend": reading.attention_backend}
            return beam_search(model, layout, trie, beams, **options)

        self._search = jax.jit(search, static_argnames="beams")

    def score(self, lists: Sequence[CandidateList]) -> list[ListScores]:
        """Scores of each list in its own order; documents without text score `EMPTY_SCORE`."""
        results = [unread(candidates, EMPTY_SCORE) for candidates in lists]

        def program(batch: Batch, layout: TokenLayout) -> tuple[Array, Array]:
            paths = [self._paths(lists[i]) for i, _ in batch]
            paths += [paths[-1]] * (len(layout.tokens) - len(paths))
            count = round_up_geometric(max(map(len, paths)))
            trie = Trie.of(paths, count, max(len(path) for answers in paths for path in answers))
            return self._search(self._state, layout, trie, beams=min(self.settings.beams or count, count))

        for batch, layout, (found, logp) in self.reader.read(lists, program):
            tokens, found, logp = layout.token_count(), np.asarray(found), np.asarray(logp)
            for row, (i, segments) in enumerate(batch):
                results[i] = self._result(lists[i], segments, found[row], logp[row], int(tokens[row]))
        return results

    def _paths(self, candidates: CandidateList) -> list[tuple[int, ...]]:
        return list(self.encoder.answer_paths(candidates).values())

    def _result(
        self, candidates: CandidateList, segments: PromptSegments, found: np.ndarray, logp: np.ndarray, tokens: int
    ) -> ListScores:
        if np.isnan(logp).any():
            raise UserError(f"query {candidates.query.id!r}: log-probabilities are not numbers; check the weights")
        numbers = self.encoder.numbers(candidates)
        places = np.asarray(list(numbers))
        reached = found >= 0
        scores = np.full(len(candidates), EMPTY_SCORE, np.float32)
        scores[places] = logp[reached].min() - NOT_FOUND
        scores[places[found[reached]]] = logp[reached]
        written = [str(numbers[int(place)]) for place in places[found[reached]]]
        extra = {"beams": float(len(written)), "unreached": float(len(places) - len(written))}
        extra |= {f"{name}_digit_entropy": digit_entropy(written, i) for i, name in enumerate(("first", "second"))}
        return list_scores(segments, scores, tokens, **extra)


def digit_entropy(numbers: Sequence[str], place: int) -> float:
    """The entropy, in bits, of the digit at `place` (0 is the first) among numbers; a missing digit is a digit too.

    arXiv 2510.05396 finds beams that agree on the first digit and differ in the second: numbers near each other, not
    documents near each other.
    """
    counts = Counter(number[place : place + 1] for number in numbers)
    total = counts.total()
    return sum(n / total * math.log2(total / n) for n in counts.values())
