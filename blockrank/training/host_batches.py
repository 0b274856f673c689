"""Every process makes its part of a batch; here they agree on one layout for it, and on what the log says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, fields, replace
from typing import Any, Protocol

import numpy as np

from blockrank.errors import UserError
from blockrank.hosts import gather
from blockrank.layout import LayoutShape
from blockrank.losses import TrainingBatch
from blockrank.training.batches import HostBatch

_READY, _ENDED, _FAILED = range(3)
_HEAD = ("status", "part")
_COUNTS = ("tokens", "documents", "truncated", "without_positive")
_SIZES = len(fields(LayoutShape))


class Parts(Protocol):
    """The stream of this process's parts of the batches, as `training_iterator` gives it."""

    def __next__(self) -> HostBatch: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...

    def query_ids(self) -> tuple[str, ...]:
        """Those of the last batch, whole."""
        ...


class HostBatches:
    """This process's part of every batch, laid out as large as the largest part, with counts and ids of the whole.

    `part`: which it is (`parallel.list_part`); processes whose devices share lists have the same. An error while any
    process makes its part ends the run on all.
    """

    def __init__(self, parts: Parts, part: int, gather: Callable[[np.ndarray], np.ndarray] = gather) -> None:
        self._parts, self._part, self._gather = parts, part, gather

    def __next__(self) -> HostBatch:
        batch, failure = None, None
        try:
            batch = next(self._parts)
        except StopIteration:
            status = _ENDED
        except Exception as error:
            status, failure = _FAILED, error
        else:
            status = _READY
        told = self._gather(np.array([status, self._part, *_describe(batch)], np.int32))
        if failure is not None:
            raise failure
        states, part = told[:, : len(_HEAD)].T
        if failed := np.flatnonzero(states == _FAILED).tolist():
            raise UserError(
                f"process {', '.join(map(str, failed))} of {len(told)} could not make its part of a batch: "
                "see what it printed"
            )
        if batch is None or (states == _ENDED).any():
            raise StopIteration
        parts = told[np.unique(part, return_index=True)[1], len(_HEAD) :]
        shape = LayoutShape(*parts[:, len(_COUNTS) :].max(axis=0).tolist())
        positive = np.pad(batch.data.positive, ((0, 0), (0, shape.documents - batch.data.layout.shape.documents)))
        layout = batch.data.layout.padded(shape)
        whole = dict(zip(_COUNTS, parts.sum(axis=0).tolist(), strict=False))
        return replace(
            batch,
            query_ids=self._parts.query_ids(),
            data=TrainingBatch(layout, positive),
            tokens=whole["tokens"],
            padding_share=1.0 - whole["tokens"] / (layout.tokens.size * len(parts)),
            truncated_share=whole["truncated"] / max(whole["documents"], 1),
            without_positive=whole["without_positive"],
        )

    def get_state(self) -> Any:
        return self._parts.get_state()

    def set_state(self, state: Any) -> None:
        self._parts.set_state(state)


def _describe(batch: HostBatch | None) -> list[int]:
    if batch is None:
        return [0] * (len(_COUNTS) + _SIZES)
    layout = batch.data.layout
    documents = int(np.asarray(layout.document_mask).sum())
    truncated = round(batch.truncated_share * documents)
    return [batch.tokens, documents, truncated, batch.without_positive, *astuple(layout.shape)]
