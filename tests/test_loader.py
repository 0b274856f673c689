"""The stream of batches: complete, equal on any number of hosts, and the same after a restart."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_candidates import Small
from test_sampling import full_run, numbered, training_lists

from blockrank.data.candidates import candidate_lists
from blockrank.data.loader import TrainingIterator, training_iterator
from blockrank.data.sampling import TrainingLists
from blockrank.errors import UserError
from blockrank.types import CandidateList


def queries(count: int, extra: str = "") -> TrainingLists:
    texts = numbered(12)
    names = [f"q{i:02}{extra}" for i in range(count)]
    return training_lists(texts, {q: full_run(texts) for q in names}, {q: {"d0": 1} for q in names})


def content(batch: list[CandidateList]) -> list[tuple[str, ...]]:
    return [(c.query.id, *(d.id for d in c.documents)) for c in batch]


def iterator(lists: TrainingLists, **settings: Any) -> TrainingIterator:
    defaults: dict[str, Any] = {"num_candidates": 4, "batch_size": 4, "seed": 0}
    return training_iterator(lists, **defaults | settings)


def take(source: TrainingIterator, count: int) -> list[list[tuple[str, ...]]]:
    return [content(next(source)) for _ in range(count)]


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 23), batch_size=st.sampled_from([1, 2, 4, 6]), seed=st.integers(0, 2**31))
def test_every_query_comes_once_per_epoch(size: int, batch_size: int, seed: int) -> None:
    epochs = 3
    source = iterator(queries(size), batch_size=batch_size, seed=seed, num_epochs=epochs)
    batches = [content(batch) for batch in source]
    assert len(batches) == source.num_steps == -(-epochs * size // batch_size)
    assert all(len(batch) == batch_size for batch in batches)
    stream = [row[0] for batch in batches for row in batch]
    for epoch in range(epochs):
        assert Counter(stream[epoch * size : (epoch + 1) * size]) == Counter(f"q{i:02}" for i in range(size))


def test_epochs_differ_in_order_and_in_lists() -> None:
    batches = take(iterator(queries(16)), 8)
    first, second = [row for b in batches[:4] for row in b], [row for b in batches[4:] for row in b]
    assert [row[0] for row in first] != [row[0] for row in second]
    by_query = {row[0]: row[1:] for row in first}
    assert all(by_query[row[0]] != row[1:] for row in second)


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_read_disjoint_parts_of_the_same_batches(hosts: int) -> None:
    lists = queries(10)
    whole = take(iterator(lists), 12)
    parts = [iterator(lists, shard_index=h, shard_count=hosts) for h in range(hosts)]
    for batch in whole:
        assert [row for part in parts for row in content(next(part))] == batch
        assert {part.query_ids() for part in parts} == {tuple(row[0] for row in batch)}


def test_restored_batches_8_to_20_equal_an_unbroken_run() -> None:
    lists = queries(13)
    unbroken = take(iterator(lists), 21)
    broken = iterator(lists)
    assert take(broken, 8) == unbroken[:8]
    state = json.loads(json.dumps(broken.get_state()))
    assert state["step"] == 8
    restored = iterator(queries(13))
    restored.set_state(state)
    assert take(restored, 13) == unbroken[8:21]
    broken.set_state(state)
    assert take(broken, 13) == unbroken[8:21]


def test_a_run_continues_on_another_number_of_hosts() -> None:
    lists = queries(13)
    unbroken = take(iterator(lists), 12)
    one = iterator(lists)
    take(one, 5)
    two = [iterator(lists, shard_index=h, shard_count=2) for h in range(2)]
    for part in two:
        part.set_state(one.get_state())
    for batch in unbroken[5:]:
        assert [row for part in two for row in content(next(part))] == batch


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"batch_size": 8}, "batch_size was 4 and is 8"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"num_candidates": 5}, "num_candidates was 4 and is 5"),
    ],
)
def test_a_state_of_another_stream_is_refused(change: dict[str, int], hint: str) -> None:
    lists = queries(8)
    with pytest.raises(UserError, match=hint):
        iterator(lists, **change).set_state(iterator(lists).get_state())


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(UserError, match="lists was"):
        iterator(queries(8, "x")).set_state(iterator(queries(8)).get_state())


def test_training_may_be_extended_but_not_begin_past_its_end() -> None:
    lists = queries(8)
    done = iterator(lists, num_epochs=2)
    assert len([*done]) == 4
    longer = iterator(lists, num_epochs=3)
    longer.set_state(done.get_state())
    assert [content(b) for b in longer] == take(iterator(lists), 6)[4:]
    with pytest.raises(UserError, match="stopped after step 4, this one has 2 steps"):
        iterator(lists, num_epochs=1).set_state(done.get_state())


def test_transform_sees_the_hosts_part() -> None:
    source = iterator(queries(8), shard_index=1, shard_count=2, transform=len)
    assert [next(source) for _ in range(3)] == [2, 2, 2]


def test_an_error_in_transform_reaches_the_caller() -> None:
    def fail(batch: list[CandidateList]) -> None:
        raise UserError(f"cannot use query {batch[0].query.id}")

    with pytest.raises(UserError, match="cannot use query q"):
        next(iterator(queries(8), transform=fail))


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"batch_size": 0}, "batch_size"),
        (
            {"batch_size": 3, "shard_count": 2},
            r"batch_size \(3\) must be a positive multiple .* \(2\)",
        ),
        ({"shard_index": 2, "shard_count": 2}, "shard_index must be in 0..1"),
        ({"num_epochs": 0}, "num_epochs must be at least 1"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, int], hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        iterator(queries(4), **settings)


def test_changed_text_is_refused_on_resume() -> None:
    def lists(query: str, text: str) -> TrainingLists:
        collection = Small({**numbered(6), "d3": text}, {"q": query}, {"q": {"d0": 1}})
        return TrainingLists(candidate_lists(collection, {"q": full_run(numbered(6))}, "test"))

    state = iterator(lists("query", "text 3")).get_state()
    iterator(lists("query", "text 3")).set_state(state)
    for changed in (lists("other query", "text 3"), lists("query", "text three")):
        with pytest.raises(UserError, match="does not continue this one: lists was"):
            iterator(changed).set_state(state)
