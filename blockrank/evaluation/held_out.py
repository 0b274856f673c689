"""Several rankers on the same held-out lists, and one table of what they reach."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockrank.data.collection import Collection
from blockrank.evaluation.evaluator import Evaluator
from blockrank.evaluation.files import write_text
from blockrank.evaluation.metrics import MetricsReport
from blockrank.evaluation.records import EvaluationResult
from blockrank.evaluation.tables import Table, metrics_table
from blockrank.rankers.first_stage import FirstStageRanker
from blockrank.retrieval.lists import open_lists, select_queries
from blockrank.training.recipe import HeldOutConfig
from blockrank.types import Ranker

log = logging.getLogger(__name__)

FIRST_STAGE = "first stage"
"""The row of the first stage's own order."""


class HeldOut:
    """Rankers measured against a split's whole qrels, each in a folder of its own below `folder`; resumable."""

    def __init__(self, collection: Collection, config: HeldOutConfig, folder: Path, seed: int):
        self.config, self.folder, self._seed = config, folder, seed
        self._collection = collection
        self.lists = select_queries(open_lists(collection, config), config.max_queries)
        kept = {candidates.query.id for candidates in self.lists} if config.max_queries else None
        qrels = collection.qrels(config.split)
        self._qrels = {query: grades for query, grades in qrels.items() if kept is None or query in kept}
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
            self.folder / row.replace(" ", "_"),
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
