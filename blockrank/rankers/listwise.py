"""Listwise LLM rankers: a window of documents is put in order at a time, from the tail of the list to its head.

`permutation`: the order is written, `[2] > [3] > [1]` (RankGPT, arXiv 2304.09542; RankVicuna, 2309.15088; RankZephyr,
2312.02724). `logits`: it is that of the identifiers' logits where the first one would be written, one pass per window
(FIRST, 2406.15657).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from blockrank.errors import UserError
from blockrank.layout import TokenLayout
from blockrank.models.decoder import Decoder
from blockrank.models.generate import greedy, last_places
from blockrank.models.loading import cast_parameters
from blockrank.packing import round_up
from blockrank.prompts.encode import PromptEncoder
from blockrank.rankers.permutation import PermutationParser, Repairs, sliding_windows
from blockrank.rankers.reading import Batch, ListReader, ReadingSettings, one_of, unread, whole
from blockrank.types import CandidateList, ListScores

log = logging.getLogger(__name__)

Mode = Literal["permutation", "logits"]
EMPTY_SCORE = -1e9
"""Score of a document without text: it is in no window."""
_TOKENS_STEP = 16


@dataclass(frozen=True)
class ListwiseSettings:
    """`mode`: how the order of a window is found. `window`: documents in one prompt; `stride`: how far windows begin
    apart; `passes`: how often the whole list is gone through.

    `max_new_tokens`: the most tokens of a written permutation; None: as many as one of the whole window has.
    """

    mode: Mode = "permutation"
    window: int = 20
    stride: int = 10
    passes: int = 1
    max_new_tokens: int | None = None
    reading: ReadingSettings = field(default_factory=lambda: ReadingSettings(visibility="dense"))
    kind: Literal["listwise"] = "listwise"

    def __post_init__(self) -> None:
        one_of(self, "mode", get_args(Mode))
        whole(self, "window", 2)
        whole(self, "stride", 1)
        whole(self, "passes", 1)
        if self.max_new_tokens is not None:
            whole(self, "max_new_tokens", 1)
        if self.stride > self.window:
            raise UserError(f"stride={self.stride} is above window={self.window}: documents between would not be read")


@dataclass
class _Progress:
    """A list that is being put in order: `order` holds indices of its documents, the best first so far."""

    candidates: CandidateList
    order: list[int]
    windows: list[tuple[int, int]]
    truncated: np.ndarray
    query_truncated: bool = False
    tokens: int = 0
    generated: int = 0
    repairs: Repairs = field(default_factory=Repairs)

    def at(self, step: int) -> CandidateList:
        """The documents of a window as a list of their own."""
        start, end = self.windows[step]
        documents = tuple(self.candidates.documents[i] for i in self.order[start:end])
        return CandidateList(self.candidates.query, documents)


class ListwiseRanker:
    """Orders candidate lists by sliding windows; a document's score is minus its final rank, so scores do not tie.

    Documents without text are in no window and come last. What is malformed in a written permutation is repaired (see
    `permutation.repaired`) and counted in `extra`: `windows`, `malformed_windows`, `repeated_ids`, `unknown_ids`,
    `missing_ids`, and `generated_tokens`. A document is flagged as truncated if it was so in any window.
    Whole models only, on one device. Windows of several lists are read together; shapes are bucketed.

    Raises `UserError` where the template cannot name a window's documents, and in mode `logits` where an identifier is
    not one token.
    """

    def __init__(
        self,
        model: Decoder,
        encoder: PromptEncoder,
        settings: ListwiseSettings | None = None,
        name: str = "listwise",
    ) -> None:
        self.name, self.encoder = name, encoder
        self.settings = settings or ListwiseSettings()
        reading, logits = self.settings.reading, self.settings.mode == "logits"
        if encoder.template.numbering == "hash":
            raise UserError(
                f"template {encoder.template.name!r} numbers documents by hashes, which two of a window may share: "
                "take one with numbering: position"
            )
        self.reader = ListReader(encoder, reading, model.config.max_positions, cue="number" if logits else "suffix")
        self._identifiers = _identifier_tokens(encoder, self.settings.window if logits else 0)
        self._parser = _parser(encoder)
        self._stops = sorted(encoder.stops | set(model.config.eos_ids))
        self._budgets: dict[int, int] = {}
        self._budget(self.settings.window)
        self._malformed_told = False
        self.model = cast_parameters(model, model.dtype)
        self._state = nnx.state(self.model)
        graph = nnx.graphdef(self.model)
        options = {"visibility": reading.pattern, "backend": reading.attention_backend}

        def write(state: nnx.State, layout: TokenLayout, count: int) -> Int[Array, "B count"]:
            return greedy(nnx.merge(graph, state), layout, count, **options)

        def read(state: nnx.State, layout: TokenLayout, identifiers: Int[Array, " W"]) -> Float[Array, "B W"]:
            model = nnx.merge(graph, state)
            states = model.states(layout, **options)[0]
            last = jnp.take_along_axis(states, last_places(layout)[:, None, None], axis=1)[:, 0]
            return model.head_logits(last)[:, identifiers]

        self._write = jax.jit(write, static_argnames="count")
        self._read = jax.jit(read)

    def score(self, lists: Sequence[CandidateList]) -> list[ListScores]:
        """Scores of each list in its own order; documents without text score `EMPTY_SCORE`."""
        work = [self._start(candidates) for candidates in lists]
        for step in range(max((len(one.windows) for one in work), default=0)):
            active = [one for one in work if step < len(one.windows)]
            self._step(active, step)
        return [self._result(one) for one in work]

    def _start(self, candidates: CandidateList) -> _Progress:
        order = [i for i, document in enumerate(candidates.documents) if not document.is_empty]
        windows = sliding_windows(len(order), self.settings.window, self.settings.stride) * self.settings.passes
        return _Progress(candidates, order, windows, np.zeros(len(candidates), bool))

    def _step(self, active: list[_Progress], step: int) -> None:
        """Puts one window of each list in order."""
        windows = [one.at(step) for one in active]
        program = self._logits if self.settings.mode == "logits" else self._permutations
        for batch, layout, found in self.reader.read(windows, program):
            tokens, found = layout.token_count(), np.asarray(found)
            for row, (i, segments) in enumerate(batch):
                one, (start, end) = active[i], active[i].windows[step]
                present = one.order[start:end]
                one.truncated[present] |= np.asarray(segments.truncated)
                one.query_truncated |= segments.query_truncated
                one.tokens += int(tokens[row])
                one.order[start:end] = [present[place] for place in self._places(one, windows[i], found[row])]

    def _logits(self, _: Batch, layout: TokenLayout) -> Float[Array, "B W"]:
        return self._read(self._state, layout, self._identifiers)

    def _permutations(self, batch: Batch, layout: TokenLayout) -> Int[Array, "B count"]:
        count = round_up(max(self._budget(len(segments.truncated)) for _, segments in batch), _TOKENS_STEP)
        self.reader.note_positions(int(layout.positions.max()) + 1 + count)
        return self._write(self._state, layout, count=count)

    def _places(self, one: _Progress, window: CandidateList, found: np.ndarray) -> list[int]:
        """The places of a window's documents in their new order."""
        numbers = self.encoder.numbers(window)
        if self.settings.mode == "logits":
            logits = np.asarray([found[numbers[place] - self._first] for place in range(len(window))])
            _check_numbers(window, not np.isnan(logits).any())
            one.repairs += Repairs(1)
            return np.argsort(-logits, kind="stable").tolist()
        written = found[: self._budget(len(window))]
        _check_numbers(window, (written >= 0).all())
        stops = np.flatnonzero(np.isin(written, self._stops))
        ended = bool(stops.size)
        written = written[: stops[0]] if ended else written
        one.generated += len(written)
        tokenizer = self.encoder.tokenizer
        text = tokenizer.decode(written[written < tokenizer.vocab_size].tolist())
        items = {self.encoder.template.identifier(numbers[place]): place for place in range(len(window))}
        places, repairs = self._parser.parse(text, items, ended=ended)
        one.repairs += repairs
        if repairs.malformed and not self._malformed_told:
            self._malformed_told = True
            log.warning(
                "query %r: what the model wrote is no permutation of its window of %d: %.120r; repaired, as are later "
                "ones: the results count them",
                *(window.query.id, len(window), text),
            )
        return places

    def _budget(self, documents: int) -> int:
        """The most tokens of a written permutation, its end included: in pieces as the template cuts them or joined."""
        if self.settings.max_new_tokens is not None:
            return self.settings.max_new_tokens
        if documents not in self._budgets:
            ids = self.encoder.permutation(range(self._first, self._first + documents))
            text = [token for token in ids if token not in self._stops]
            joined = self.encoder.tokenizer.encode(self.encoder.tokenizer.decode(text))
            self._budgets[documents] = max(len(text), len(joined)) + 1
        return self._budgets[documents]

    @property
    def _first(self) -> int:
        return self.encoder.template.first_number

    def _result(self, one: _Progress) -> ListScores:
        result = unread(one.candidates, EMPTY_SCORE)
        result.scores[one.order] = -np.arange(1, len(one.order) + 1, dtype=np.float32)
        extra = one.repairs.counts()
        if self.settings.mode == "permutation":
            extra["generated_tokens"] = float(one.generated)
        return replace(
            result, truncated=one.truncated, query_truncated=one.query_truncated, tokens=one.tokens, extra=extra
        )


def _identifier_tokens(encoder: PromptEncoder, count: int) -> np.ndarray:
    """The one token of each of the first `count` identifiers, int32 [count].

    Raises `UserError` where an identifier is several tokens, or two begin alike.
    """
    first, template = encoder.template.first_number, encoder.template
    tokens = {template.identifier(number): encoder.answer_number(number) for number in range(first, first + count)}
    several = [name for name, ids in tokens.items() if len(ids) != 1]
    if several or len(set(tokens.values())) < len(tokens):
        name = several[0] if several else next(iter(tokens))
        kind = type(encoder.tokenizer).__name__
        raise UserError(
            f"ranker.mode=logits: identifier {name!r} of template {template.name!r} is "
            f"{'several tokens' if several else 'the same token as another'} in this model's tokenizer ({kind}, "
            f"{encoder.tokenizer.vocab_size} ids): take a template with identifiers: letter, such as prompt=first, "
            f"or a window of fewer documents than {count}"
        )
    return np.asarray([ids[0] for ids in tokens.values()], np.int32)


def _check_numbers(window: CandidateList, numbers: bool | np.bool_) -> None:
    if not numbers:
        raise UserError(f"query {window.query.id!r}: logits are not numbers; check the weights")


def _parser(encoder: PromptEncoder) -> PermutationParser:
    """Reads what the template's answer writes: identifiers between the characters that enclose them there."""
    pieces = encoder.template.answer
    at = next(i for i, piece in enumerate(pieces) if piece.kind == "slot")
    sides = (pieces[at - 1 : at] if at else (), pieces[at + 1 : at + 2])
    before, after = ("".join(piece.text for piece in side if piece.kind == "literal").strip() for side in sides)
    return PermutationParser(before[-1:], after[:1], encoder.template.identifiers == "letter")
