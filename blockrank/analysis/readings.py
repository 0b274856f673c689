"""What every layer and every possible signal token says of a list's documents, in one forward pass.

L layers, S signal tokens, N documents, B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from blockrank.data.progress import track
from blockrank.errors import UserError
from blockrank.evaluation.ranking import check_documents, select, without_self
from blockrank.layout import TokenLayout
from blockrank.models.decoder import Decoder
from blockrank.models.loading import cast_parameters
from blockrank.prompts.encode import PromptEncoder
from blockrank.prompts.signals import SignalToken, present_signals, signal_tokens
from blockrank.rankers.attention import AttentionSettings
from blockrank.rankers.reading import ListReader
from blockrank.rankers.readout import per_length, signal_masses
from blockrank.types import CandidateList, Qrels


@dataclass(frozen=True, eq=False)
class ListReading:
    """One list as all layers and signal tokens read it.

    `masses` float32 [L, S, N], in the list's order, 0 for documents without text; `lengths` tokens of each document,
    float32 [N]; `readable` bool [N]: which documents have text; `grades` int [N]; `ideal`: all positive grades the
    query has in the qrels, best first.
    """

    query_id: str
    masses: Float[np.ndarray, "L S N"]
    lengths: np.ndarray
    readable: np.ndarray
    grades: np.ndarray
    ideal: tuple[int, ...]

    def scores(self, masses: np.ndarray, exponent: float) -> np.ndarray:
        """Masses [..., N], summed over the signals of a readout, as that readout's scores."""
        if exponent == 0:
            return masses
        return np.asarray(per_length(jnp.asarray(masses), jnp.asarray(self.lengths), exponent))


class SignalReader:
    """Reads lists with every token that could be a signal as one.

    Prompts hold the tokens of `encoder`'s. A list takes 4·L·S·N bytes of host memory.
    """

    def __init__(self, model: Decoder, encoder: PromptEncoder, settings: AttentionSettings) -> None:
        template, self.tokens = signal_tokens(encoder)
        self.present: tuple[SignalToken, ...] = present_signals(encoder, self.tokens)
        self.settings = settings
        self._encoder = PromptEncoder(template, encoder.tokenizer, encoder.limits)
        self._reader = ListReader(self._encoder, settings, model.config.max_positions)
        self._shape = model.config.num_layers, len(self.tokens)
        self._program = _mass_program(model, settings)
        self.set_model(model)

    def set_model(self, model: Decoder) -> None:
        """Read with another model of the same config from now on; nothing is compiled anew."""
        self._state = nnx.state(cast_parameters(model, model.dtype))

    def read(self, lists: Sequence[CandidateList], qrels: Qrels, *, description: str = "reading") -> list[ListReading]:
        """A reading of each list that has a judged query; documents in the list's order."""
        chosen = [candidates for candidates in lists if qrels.get(candidates.query.id)]
        found = [_unread(candidates, qrels, self._shape) for candidates in chosen]
        batches = self._reader.read(chosen, lambda _, layout: self._program(self._state, layout))
        with track(description, len(chosen)) as advance:
            for batch, _, masses in batches:
                host = np.asarray(masses)
                for row, (index, segments) in enumerate(batch):
                    add = np.asarray(segments.document_index, int)
                    per_candidate, reading = np.moveaxis(found[index].masses, 2, 0), found[index]
                    np.add.at(per_candidate, add, np.moveaxis(host[:, row, :, : len(add)], 2, 0))
                    np.add.at(reading.lengths, add, [len(tokens) for tokens in segments.documents])
                    if not np.isfinite(reading.masses).all():
                        raise UserError(f"query {reading.query_id!r}: attention is not finite; check the weights")
                advance(len(batch))
        return found


def _mass_program(
    model: Decoder, settings: AttentionSettings
) -> Callable[[nnx.State, TokenLayout], Float[Array, "L B S N"]]:
    graph = nnx.graphdef(model)

    def masses(state: nnx.State, layout: TokenLayout) -> Float[Array, "L B S N"]:
        return nnx.merge(graph, state).observe(
            layout,
            lambda block, states, _: signal_masses(block, states, layout),
            visibility=settings.pattern,
            backend=settings.attention_backend,
        )

    return jax.jit(masses)


def _unread(candidates: CandidateList, qrels: Qrels, shape: tuple[int, int]) -> ListReading:
    grades = qrels[candidates.query.id]
    return ListReading(
        query_id=candidates.query.id,
        masses=np.zeros((*shape, len(candidates)), np.float32),
        lengths=np.zeros(len(candidates), np.float32),
        readable=np.array([not document.is_empty for document in candidates.documents], bool),
        grades=np.array([grades.get(document.id, 0) for document in candidates.documents], int),
        ideal=tuple(sorted((grade for grade in grades.values() if grade > 0), reverse=True)),
    )


def prepared(lists: Sequence[CandidateList], depth: int, *, ignore_self: bool) -> Iterator[CandidateList]:
    """The lists as an evaluation reads them: without the query's own document, and no longer than `depth`."""
    for candidates in lists:
        check_documents(candidates)
        own = without_self(candidates) if ignore_self else candidates
        yield own if len(own) <= depth else select(own, list(range(depth)))
