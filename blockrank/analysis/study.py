"""A model on validation lists: which layer and tokens rank best, layer by layer, and where its attention goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from blockrank.analysis.attention import AttentionMap, AttentionReader, check_layers
from blockrank.analysis.readings import SignalReader, prepared
from blockrank.analysis.search import Estimate, Finding, Readout, Search
from blockrank.attention.visibility import PATTERNS
from blockrank.data.collection import Collection
from blockrank.errors import UserError
from blockrank.layout import TokenLayout
from blockrank.models.decoder import Decoder
from blockrank.prompts.encode import PromptEncoder
from blockrank.prompts.signals import SignalToken, with_signals
from blockrank.prompts.template import PromptTemplate
from blockrank.rankers.attention import AttentionSettings
from blockrank.rankers.readout import signal_masses
from blockrank.retrieval.lists import open_lists, select_judged
from blockrank.training.recipe import HeldOutConfig
from blockrank.types import CandidateList, Qrels


@dataclass(frozen=True)
class ValidationLists:
    """Lists as an evaluation would read them, and the judgements of their queries."""

    lists: tuple[CandidateList, ...]
    qrels: Qrels
    missing: int

    @staticmethod
    def open(collection: Collection, config: HeldOutConfig) -> ValidationLists:
        """`missing` counts judged queries without a list, where they count 0. Raises `UserError` for no list at all."""
        lists, qrels = select_judged(open_lists(collection, config), collection.qrels(config.split), config.max_queries)
        judged = {query: grades for query, grades in qrels.items() if grades}
        kept = tuple(
            candidates
            for candidates in prepared(lists, config.depth, ignore_self=collection.ignore_self)
            if candidates.query.id in judged
        )
        if not kept:
            raise UserError(f"the {config.split} split of {collection.name} has no judged query with a candidate list")
        missing = len(judged) - len(kept) if config.missing == "zero" else 0
        return ValidationLists(kept, judged, missing)


@dataclass(frozen=True, eq=False)
class SignalReport:
    """What a search found. `singles` [L, S] are means of single tokens, `layers` those of the present signals."""

    measure: str
    queries: int
    missing: int
    tokens: tuple[SignalToken, ...]
    finding: Finding
    singles: Float[np.ndarray, "L S"]
    single_intervals: dict[tuple[int, int], tuple[float, float]]
    layers: tuple[Estimate, ...]

    def names(self, readout: Readout) -> list[str]:
        """The tokens of a readout in words."""
        return [str(self.tokens[token]) for token in readout.tokens]

    def as_json(self) -> dict[str, Any]:
        """Everything a table or a figure shows."""
        finding = self.finding

        def readout(found: Readout, value: Estimate) -> dict[str, Any]:
            return {"score_layer": found.layer, "signals": self.names(found), **estimate(value)}

        return {
            "measure": self.measure,
            "queries": self.queries,
            "missing": self.missing,
            "best": readout(finding.best, finding.value),
            "present": readout(finding.present, finding.present_value),
            "cross_validated": finding.cross_validated and estimate(finding.cross_validated),
            "difference_from_present": finding.difference and estimate(finding.difference),
            "p_value": finding.p_value,
            "better_than_present": finding.is_better,
            "resampled_wins": [
                {"layer": layer, "token": str(self.tokens[token]), "share": share}
                for (layer, token), share in finding.resampled_wins.items()
            ],
            "layers": [estimate(value) for value in self.layers],
            "tokens": [str(token) for token in self.tokens],
            "layer_by_token": self.singles.tolist(),
        }


def estimate(value: Estimate) -> dict[str, Any]:
    """An estimate for JSON."""
    return {"mean": value.mean, "interval_95": list(value.interval)}


def study_signals(
    reader: SignalReader,
    validation: ValidationLists,
    present_layer: int,
    *,
    measure: str,
    max_signals: int,
    samples: int,
    seed: int,
    listed: int = 10,
) -> SignalReport:
    """Searches all layers and tokens; the present readout is the one at `present_layer` with the template's signals.

    Intervals are of the `listed` best single tokens. Raises `UserError` for a measure the search does not know.
    """
    readings = reader.read(validation.lists, validation.qrels)
    exponent = reader.settings.length_normalization
    search = Search(readings, measure, exponent=exponent, missing=validation.missing)
    signals = tuple(reader.tokens.index(token) for token in reader.present)
    finding = search.find(Readout(present_layer, signals), max_signals=max_signals, samples=samples, seed=seed)
    means = search.singles.mean(axis=0)
    best = [tuple(map(int, np.unravel_index(i, means.shape))) for i in np.argsort(-means, axis=None, kind="stable")]
    return SignalReport(
        measure=search.measure.name,
        queries=search.queries,
        missing=validation.missing,
        tokens=reader.tokens,
        finding=finding,
        singles=means,
        single_intervals={
            (layer, token): Estimate.of(search.singles[:, layer, token], seed).interval
            for layer, token in best[:listed]
        },
        layers=tuple(Estimate.of(values, seed) for values in search.layer_values(signals).T),
    )


def study_layers(reader: SignalReader, validation: ValidationLists, measure: str, seed: int) -> tuple[Estimate, ...]:
    """The present signals' measure at every layer, of the model the reader holds."""
    readings = reader.read(validation.lists, validation.qrels)
    search = Search(readings, measure, exponent=reader.settings.length_normalization, missing=validation.missing)
    tokens = [reader.tokens.index(token) for token in reader.present]
    return tuple(Estimate.of(values, seed) for values in search.layer_values(tokens).T)


def found_template(encoder: PromptEncoder, report: SignalReport) -> PromptTemplate:
    """The encoder's template with the signals of the best readout."""
    return with_signals(encoder.template, [report.tokens[token] for token in report.finding.best.tokens])


def attention_maps(
    model: Decoder,
    encoder: PromptEncoder,
    settings: AttentionSettings,
    lists: Sequence[CandidateList],
    visibility: str = "dense",
) -> Iterator[tuple[CandidateList, AttentionMap]]:
    """Each list with the attention between the parts of its prompt, under any visibility of the model's weights.

    `dense` is what section 3 of the paper looks at. Lists without text are left out.
    """
    read = replace(settings, visibility=visibility)
    reader = AttentionReader(model, PATTERNS[visibility], settings.attention_backend)
    for candidates in lists:
        segments = encoder.encode(candidates)
        if segments.documents:
            yield candidates, reader.map(read.lay_out([segments]))


def suffix_masses(
    model: Decoder, encoder: PromptEncoder, settings: AttentionSettings, candidates: CandidateList, layer: int
) -> tuple[Float[np.ndarray, "Q N"], list[str], list[int]]:
    """The mass that each suffix token puts on each document with text at a layer, as the readout reads a signal's.

    With the tokens' text, and the documents' places in the list.
    """
    segments = encoder.encode(candidates)
    if not segments.documents:
        raise UserError(f"query {candidates.query.id!r}: no document has text")
    check_layers(layer, layer, model.config.num_layers)
    every = replace(segments, signals=tuple(range(len(segments.suffix))))
    graph, state = nnx.split(model)

    def read(state: nnx.State, layout: TokenLayout) -> Float[Array, "B Q N"]:
        model = nnx.merge(graph, state)
        states = model.states_at(layout, layer, visibility=settings.pattern, backend=settings.attention_backend)
        return signal_masses(model.probe(layer), states, layout)

    found = np.asarray(jax.jit(read)(state, settings.lay_out([every])))
    masses = found[0, :, : len(segments.documents)]
    texts = [encoder.tokenizer.decode([int(token)]) for token in segments.suffix]
    return masses, texts, list(segments.document_index)


def mean_shares(maps: Sequence[AttentionMap]) -> Float[np.ndarray, "L 3"]:
    """`document_shares` over several lists, each token of a document weighing the same."""
    weights = np.array([found.tokens[1:-1].sum() for found in maps], np.float64)
    return np.tensordot(weights, np.stack([found.document_shares() for found in maps]), axes=1) / weights.sum()
