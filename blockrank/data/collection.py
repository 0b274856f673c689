"""What a collection is, and how one is opened from its `kind` and the fields of `configs/data/<kind>.yaml`."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from blockrank.config import build
from blockrank.data.documents import Documents
from blockrank.errors import UserError, at_least
from blockrank.types import Qrels, Query, Run

_IGNORE_SELF = ("arguana", "quora")


class Collection(Protocol):
    """Documents, and for each split queries with judgements.

    `ignore_self` says that a query's own id among its candidates is the query itself and never counts (ArguAna, Quora).
    `queries` and `qrels` raise `UserError` for a split that is not in `splits`.
    """

    name: str
    ignore_self: bool

    @property
    def documents(self) -> Documents: ...

    @property
    def splits(self) -> tuple[str, ...]: ...

    def queries(self, split: str) -> dict[str, Query]: ...

    def qrels(self, split: str) -> Qrels: ...


@runtime_checkable
class HasCandidates(Protocol):
    """A collection that carries its own candidates (in the order given; scores are all zero when it knows none)."""

    def candidates(self, split: str, depth: int | None = None) -> Run: ...


@dataclass(frozen=True)
class BeirConfig:
    """A BEIR folder: `corpus.jsonl`, `queries.jsonl`, `qrels/<split>.tsv`."""

    path: Path
    ignore_self: bool | None = None
    kind: Literal["beir"] = "beir"

    def open(self) -> Collection:
        from blockrank.data.beir import BeirCollection

        return BeirCollection(self.path, self.ignore_self)


@dataclass(frozen=True)
class IcrConfig:
    """ICR JSONL: a file or glob (one split, called `split` or by the file's stem) or a folder of `<split>.jsonl`."""

    path: Path
    split: str | None = None
    qrels: Path | None = None
    kind: Literal["icr"] = "icr"

    def open(self) -> Collection:
        from blockrank.data.icr import open_icr

        return open_icr(self.path, self.split, self.qrels)


@dataclass(frozen=True)
class HfConfig:
    """A Hugging Face data set with ICR's columns: a hub id, a saved data set, or a local parquet/arrow/json file."""

    path: str
    name: str | None = None
    revision: str | None = None
    qrels: Path | None = None
    kind: Literal["hf"] = "hf"

    def open(self) -> Collection:
        from blockrank.data.hf import open_hf

        return open_hf(self.path, self.name, self.revision, self.qrels)


@dataclass(frozen=True)
class IrDatasetsConfig:
    """An ir_datasets id; its sub-datasets with queries are the splits (itself is the split `default`)."""

    id: str
    ignore_self: bool | None = None
    kind: Literal["ir_datasets"] = "ir_datasets"

    def open(self) -> Collection:
        from blockrank.data.irds import IrDatasetsCollection

        return IrDatasetsCollection(self.id, self.ignore_self)


@dataclass(frozen=True)
class PydocsConfig:
    """The embedded collection, made from docstrings of the installed Python, NumPy and JAX."""

    max_words: int = 60
    titles: bool = False
    kind: Literal["pydocs"] = "pydocs"

    def __post_init__(self) -> None:
        at_least(self, 1, "max_words")

    def open(self) -> Collection:
        from blockrank.data.pydocs import PydocsCollection

        return PydocsCollection(self.max_words, titles=self.titles)


CollectionConfig: TypeAlias = BeirConfig | IcrConfig | HfConfig | IrDatasetsConfig | PydocsConfig


def open_collection(kind: str, **fields: Any) -> Collection:
    """The collection of `kind`: beir, icr, hf, ir_datasets or pydocs, e.g. `open_collection("beir", path="scifact")`.

    Raises `UserError` for an unknown kind, and for unknown, missing or mistyped fields.
    """
    classes = {get_args(typing.get_type_hints(c)["kind"])[0]: c for c in get_args(CollectionConfig)}
    if kind not in classes:
        raise UserError(f"data.kind: {kind!r} is none of {', '.join(sorted(classes))}")
    return build(classes[kind], fields, key="data").open()


def check_split(split: str, splits: tuple[str, ...], name: str) -> None:
    """Raises `UserError` naming the splits there are."""
    if split not in splits:
        raise UserError(f"{name} has no split {split!r}; it has {', '.join(splits) or 'none'}")


def ignores_self(name: str) -> bool:
    """Whether the collection called `name` is one whose queries are documents of its own corpus."""
    return any(known in name.lower() for known in _IGNORE_SELF)
