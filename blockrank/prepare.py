"""`python -m blockrank.prepare`: fetch a collection, check it and report what is in it, or write its candidates.

    python -m blockrank.prepare data=beir data.path=scifact candidates=bm25
    python -m blockrank.prepare data=ir_datasets data.id=msmarco-passage/dev/small prefetch=true
    python -m blockrank.prepare data=beir data.path=scifact split=train candidates=dense run=runs/train.run
    python -m blockrank.prepare data=beir data.path=scifact split=train candidates=dense lists=runs/train.lists

With `run` a split's candidates are written as a TREC run, what made it beside it (`<run>.json`), with `lists` as lists
in shards, and nothing else is done. Killed, the same command continues: shards that are finished are not made again.
With `part` several processes share the work.
Exits with status 0 when nothing is wrong, 1 with `strict=true` when the report lists problems, 2 on bad input.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from blockrank.config import entry, to_plain
from blockrank.data.collection import Collection, CollectionConfig, IrDatasetsConfig
from blockrank.data.files import atomic_write
from blockrank.data.irds import prefetch
from blockrank.data.preflight import Lengths, Preflight, SplitReport, preflight
from blockrank.data.shards import ALL, Part
from blockrank.errors import UserError, at_least
from blockrank.retrieval.first_stage import first_stage
from blockrank.retrieval.settings import DENSE, EncoderSettings
from blockrank.retrieval.write import Candidates, write_candidates, write_lists


@dataclass(frozen=True)
class PrepareConfig:
    """`configs/prepare.yaml`.

    `split`: the split to check (None: all). `candidates`: as in `first_stage` (None: none are checked). `tokenizer`: a
    tokenizer's folder or file, for lengths in tokens. `sample`: read only so many documents. `report`: also write JSON.
    `run`, `lists`: write the candidates of `split` here. `part`: `0/4` to `3/4`, the share of this process.
    `encoder`: for `candidates=dense`.
    """

    data: CollectionConfig
    split: str | None = None
    candidates: str | None = None
    depth: int = 100
    tokenizer: Path | None = None
    chunk_length: int = 160
    sample: int | None = None
    prefetch: bool = False
    strict: bool = False
    report: Path | None = None
    run: Path | None = None
    lists: Path | None = None
    part: str | None = None
    encoder: EncoderSettings = field(default_factory=EncoderSettings)

    def __post_init__(self) -> None:
        at_least(self, 1, "depth", "chunk_length", "sample")
        if self.run is not None and self.lists is not None:
            raise UserError("run, lists: give one of them; the lists of a run are those of lists=")
        if self.part is not None and self.run is None and self.lists is None:
            raise UserError(f"part={self.part}: give run= or lists=, whose work is shared")


def open_data(config: PrepareConfig) -> Collection:
    """Fetches (with `prefetch`) and opens the collection."""
    if config.prefetch:
        if not isinstance(config.data, IrDatasetsConfig):
            raise UserError(f"prefetch=true is for data=ir_datasets, and this is data={config.data.kind}")
        prefetch(config.data.id)
    return config.data.open()


def prepare(config: PrepareConfig) -> Preflight:
    """Opens and checks the collection."""
    collection = open_data(config)
    splits = collection.splits if config.split is None else (config.split,)
    count_tokens = None
    if config.tokenizer is not None:
        from blockrank.prompts.tokenizer import load_tokenizer

        encode = load_tokenizer(config.tokenizer).encode
        count_tokens = lambda text: len(encode(text))  # noqa: E731
    runs = {}
    if config.candidates is not None:
        runs = {
            split: first_stage(collection, split, config.candidates, config.depth, config.encoder) for split in splits
        }
    return preflight(
        collection,
        splits=splits,
        runs=runs,
        count_tokens=count_tokens,
        chunk_length=config.chunk_length,
        sample=config.sample,
    )


def show(report: Preflight, console: Console) -> None:
    """Prints the report as tables, then its problems."""
    table = Table(title=f"{report.name}: {report.documents:,} documents", title_justify="left")
    for heading in ("", "read", "mean", "median", "90%", "99%", "longest", "over limit"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row(*_length_cells(f"document ({report.document_lengths.unit})", report.document_lengths))
    for name, split in report.splits.items():
        table.add_row(*_length_cells(f"query, {name} ({split.query_lengths.unit})", split.query_lengths))
    console.print(table)
    splits = Table(title=f"{report.titled_documents:,} documents with a title", title_justify="left")
    headings = ("split", "queries", "judgements", "positives", "candidates", "positives among them")
    for heading in headings:
        splits.add_column(heading, justify="left" if heading == "split" else "right")
    for name, split in report.splits.items():
        splits.add_row(name, *_split_cells(split))
    console.print(splits)
    for problem in report.problems:
        console.print(f"! {problem}", markup=False, highlight=False)
    if not report.problems:
        console.print("no problem found")


def _length_cells(name: str, lengths: Lengths) -> list[str]:
    over = "" if lengths.over is None else f"{100 * lengths.over:.1f}% > {lengths.limit}"
    middle = (f"{lengths.percentiles[p]:,}" for p in sorted(lengths.percentiles))
    return [name, f"{lengths.count:,}", f"{lengths.mean:.1f}", *middle, f"{lengths.longest:,}", over]


def _split_cells(split: SplitReport) -> list[str]:
    counts = (split.queries, split.judgements, split.positives, split.candidates, split.positives_among_candidates)
    return ["-" if count is None else f"{count:,}" for count in counts]


def write_out(config: PrepareConfig) -> str:
    """Writes the candidates of one split as `run` or `lists`, and returns what to print.

    Raises `UserError` for what is there and was made differently.
    """
    if config.split is None or config.candidates is None:
        raise UserError("run, lists: give split=<name> and candidates=dense or bm25, too")
    made_with = {name: to_plain(getattr(config, name)) for name in ("data", "split", "candidates", "depth")}
    if config.candidates == DENSE:
        made_with["encoder"] = to_plain(config.encoder)
    candidates = Candidates(
        *(open_data(config), config.split, config.candidates, config.depth, config.encoder, made_with),
        part=ALL if config.part is None else Part.parse(config.part),
    )
    if config.run is not None:
        return write_candidates(candidates, config.run)
    assert config.lists is not None
    return write_lists(candidates, config.lists)


@entry("prepare", PrepareConfig)
def main(config: PrepareConfig) -> int:
    if config.run is not None or config.lists is not None:
        print(write_out(config))
        return 0
    report = prepare(config)
    show(report, Console())
    if config.report is not None:
        content = to_plain(report) | {"problems": report.problems}
        with atomic_write(config.report) as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    return 1 if config.strict and report.problems else 0


if __name__ == "__main__":
    main()
