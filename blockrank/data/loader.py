"""The stream of training batches: shuffled, sharded over hosts, and resumable at any step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grain

from blockrank.data.sampling import TrainingLists
from blockrank.errors import UserError
from blockrank.types import CandidateList

_ENDLESS = 2**40
"""Steps of a stream without `num_epochs`."""

Transform: TypeAlias = Callable[[list[CandidateList]], Any]


class TrainingIterator(Iterator[Any]):
    """Batches of one host, with a JSON-ready state that names the next step and what the stream was made of.

    The state is that of the global stream: a run saved on one number of hosts continues on another, as long as the
    global batch size stays.
    """

    def __init__(
        self,
        dataset: grain.MapDataset,
        identity: dict[str, Any],
        options: grain.ReadOptions,
        query_ids: Callable[[int], tuple[str, ...]],
    ) -> None:
        self._iterator = iter(dataset.to_iter_dataset(options))
        self._query_ids = query_ids
        self._identity = identity
        self.num_steps: int | None = None if identity["num_epochs"] is None else len(dataset)
        """Batches in the whole stream, or None when it is endless."""

    def __iter__(self) -> TrainingIterator:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def query_ids(self) -> tuple[str, ...]:
        """The queries of the batch given last, those of all hosts."""
        return self._query_ids(self.get_state()["step"] - 1)

    def get_state(self) -> dict[str, Any]:
        """`{"step": batches given so far, …}`."""
        return {"step": int(self._iterator.get_state()["next_index"]), **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which `get_state` was called.

        Raises `UserError` naming each setting that differs, since other batches would follow than the saved run's.
        """
        changed = [
            f"{name} was {state.get(name)!r} and is {value!r}"
            for name, value in self._identity.items()
            if name != "num_epochs" and state.get(name) != value
        ]
        if changed:
            raise UserError(f"the saved data order does not continue this one: {'; '.join(changed)}")
        if self.num_steps is not None and not 0 <= state["step"] <= self.num_steps:
            raise UserError(f"the saved run stopped after step {state['step']}, this one has {self.num_steps} steps")
        self._iterator.set_state({"next_index": state["step"]})


def training_iterator(
    lists: TrainingLists,
    *,
    num_candidates: int,
    batch_size: int,
    seed: int,
    shard_index: int = 0,
    shard_count: int = 1,
    num_epochs: int | None = None,
    transform: Transform | None = None,
    num_threads: int = 2,
    prefetch: int = 4,
) -> TrainingIterator:
    """Batches of `lists`, each host its part: `batch_size / shard_count` lists, or what `transform` makes of them.

    The global stream is epoch after epoch, each a new permutation of all lists; batches run across the ends of epochs,
    so every query comes exactly once per epoch and all batches are full. With `num_epochs` it ends after the batch that
    holds the last list of the last epoch (filled up from the next epoch). `batch_size` counts the lists of all hosts,
    and host `shard_index` reads the contiguous part of each batch that is its own, so the stream of batches does not
    depend on the number of hosts. `transform` runs in `num_threads` threads, `prefetch` batches ahead.
    """
    if batch_size < 1 or shard_count < 1 or batch_size % shard_count:
        raise UserError(f"batch_size ({batch_size}) must be a positive multiple of the number of hosts ({shard_count})")
    if not 0 <= shard_index < shard_count:
        raise UserError(f"shard_index must be in 0..{shard_count - 1}, got {shard_index}")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed must be in 0..2**32-1, got {seed}")
    if num_epochs is not None and num_epochs < 1:
        raise UserError(f"num_epochs must be at least 1, got {num_epochs}")
    size, per_host = len(lists), batch_size // shard_count
    part = slice(shard_index * per_host, (shard_index + 1) * per_host)

    def load(batch: list[tuple[int, int]]) -> Any:
        drawn = [lists.sample(index, epoch, num_candidates=num_candidates, seed=seed) for epoch, index in batch[part]]
        return drawn if transform is None else transform(drawn)

    num_steps = _ENDLESS if num_epochs is None else -(-num_epochs * size // batch_size)
    stream = grain.MapDataset.range(size).seed(seed).shuffle().repeat(-(-num_steps * batch_size // size))
    places = stream.map_with_index(lambda position, index: (position // size, int(index)))
    steps = places.batch(batch_size, batch_fn=list)[:num_steps]
    identity = {
        "lists": lists.fingerprint,
        "num_candidates": num_candidates,
        "batch_size": batch_size,
        "seed": seed,
        "num_epochs": num_epochs,
    }
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)

    def query_ids(step: int) -> tuple[str, ...]:
        batch: Any = steps[step]
        return tuple(lists.query_id(index) for _, index in batch)

    return TrainingIterator(steps.map(load), identity, options, query_ids)
