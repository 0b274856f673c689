"""Several rankers on the same held-out lists, and one table of what they reach."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockrank.data.collection import Collection
from blockrank.errors import UserError
from blockrank.evaluation.evaluator import Evaluator
from blockrank.evaluation.files import write_text
from blockrank.evaluation.metrics import MetricsReport
from blockrank.evaluation.records import EvaluationResult
from blockrank.evaluation.tables import Table, metrics_table
from blockrank.rankers.first_stage import FirstStageRanker
from blockrank.retrieval.lists import open_lists, select_judged
from blockrank.training.recipe import HeldOutConfig
from blockrank.types import Ranker

log = logging.getLogger(__name__)

FIRST_STAGE = "first stage"
"""The row of the first stage's own order."""

_TABLE = "table.md"


def row_folder(row: str) -> str:
    """The folder of a row, one level below the evaluation's.

    Raises `UserError` for a name that is no folder's, or whose folder would lie elsewhere or on the table of all rows.
    """
    folder = row.replace(" ", "_")
    if (
        not row.strip()
        or folder.casefold() in (".", "..", _TABLE)
        or not row.isprintable()
        or any(c in row for c in "/\\:")
    ):
        raise UserError(
            f"{row!r} cannot name a row and its folder: give a plain name without slash, backslash, colon and control "
            f"characters, other than '.', '..' and {_TABLE!r}"
        )
    return folder


def check_row(row: str) -> None:
    """Raises `UserError` for a ranker's name that is no row's or, in any case of letters, the first stage's."""
    if row_folder(row).casefold() == row_folder(FIRST_STAGE):
        raise UserError(f"{row!r} is the name of the first stage's own row: choose another")


class HeldOut:
    """Rankers measured against a split's qrels, each in a folder of its own below `folder`; resumable.

    `max_queries` takes a fixed subset of the judged queries. A judged query without a list counts as `missing` says.
    """

    def __init__(self, collection: Collection, config: HeldOutConfig, folder: Path, seed: int):
        self.config, self.folder, self._seed = config, folder, seed
        self._collection = collection
        lists, qrels = open_lists(collection, config), collection.qrels(config.split)
        self.lists, self._qrels = select_judged(lists, qrels, config.max_queries)
        if not self.lists:
            raise UserError(
                f"max_queries={config.max_queries}: none of the queries chosen from the {config.split} split has a "
                "candidate list: choose more queries, or candidates for all of them"
            )
        self._reports: dict[str, MetricsReport] = {}
        self.runs: dict[str, Path] = {}

    def measure(
        self, row: str, ranker: Ranker, identity: Mapping[str, Any], *, overwrite: bool = False, **recorded: Any
    ) -> EvaluationResult:
        """Scores, measures and writes one ranker's row. `identity` is what its scores depend on."""
        config = self.config
        result = Evaluator(
            ranker,
            self.lists,
            self.folder / row_folder(row),
            config.batch_size,
            qrels=self._qrels,
            measures=config.measures,
            depth=config.depth,
            tail=config.tail,
            missing=config.missing,
            ignore_self=self._collection.ignore_self,
            name=row,
            collection=self._collection.name,
            identity=identity,
            seed=self._seed,
            overwrite=overwrite,
            **recorded,
        ).run()
        if result.report is not None:
            self._reports[row] = result.report
        if result.files is not None:
            self.runs[row] = result.files.run
        return result

    def measure_first_stage(self, identity: Mapping[str, Any], **options: Any) -> EvaluationResult | None:
        """The row of the first stage; none, with a warning, where its scores say nothing of the order."""
        if self.lists.uninformative:
            log.warning("no row for the first stage: its scores are equal within every list, so it has no order")
            return None
        return self.measure(
            FIRST_STAGE, FirstStageRanker("first_stage", allow_constant_scores=True), identity, **options
        )

    def table(self, baseline: str | None = None) -> Table:
        """All rows so far; those above are compared with `baseline`, if it is among them."""
        config = self.config
        title = f"{self._collection.name}, {config.split} split, {len(self.lists)} lists of {config.depth}"
        known = baseline if baseline in self._reports else None
        return metrics_table(self._reports, config.measures, baseline=known, title=title, seed=self._seed)

    def write_table(self, path: Path, baseline: str | None = None) -> str:
        """The table as Markdown, also written to `path`."""
        text = self.table(baseline).to_markdown()
        write_text(path, text)
        return text
