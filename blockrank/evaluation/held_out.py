"""Several rankers on the same held-out lists, and one table of what they reach."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockrank.data.collection import Collection
from blockrank.errors import UserError
from blockrank.evaluation.evaluator import Evaluator
from blockrank.evaluation.external import external_result, read_external
from blockrank.evaluation.files import EvaluationFiles, write_text
from blockrank.evaluation.metrics import TIE_RULE, MetricsReport
from blockrank.evaluation.recorded import recorded_values
from blockrank.evaluation.records import EvaluationResult, QueryRecord
from blockrank.evaluation.report import write_results
from blockrank.evaluation.tables import SUFFIXES, Table, metrics_table
from blockrank.rankers.first_stage import FirstStageRanker
from blockrank.retrieval.lists import open_lists, select_judged
from blockrank.training.recipe import HeldOutConfig
from blockrank.types import Ranker

log = logging.getLogger(__name__)

FIRST_STAGE = "first stage"
"""The row of the first stage's own order."""

TABLE = "table"
"""The table of all rows, in each format."""

DELTAS = ("deltas.csv", "deltas.png")
SCALING = "scaling.png"

_RESERVED = (".", "..", *(TABLE + suffix for suffix in SUFFIXES), *DELTAS, SCALING)


def row_folder(row: str) -> str:
    """The folder of a row, one level below the evaluation's.

    Raises `UserError` for a name that is no folder's, or whose folder would lie elsewhere or on the table of all rows.
    """
    folder = row.replace(" ", "_")
    if not row.strip() or folder.casefold() in _RESERVED or not row.isprintable() or any(c in row for c in "/\\:"):
        raise UserError(
            f"{row!r} cannot name a row and its folder: give a plain name without slash, backslash, colon and control "
            f"characters, other than {', '.join(map(repr, _RESERVED))}"
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
        self.config, self.folder, self.seed = config, folder, seed
        self.collection = collection
        lists, qrels = open_lists(collection, config), collection.qrels(config.split)
        self.lists, self.qrels = select_judged(lists, qrels, config.max_queries)
        if not self.lists and not len(lists):
            raise UserError(
                f"candidates={config.candidates}: holds no list for any query of {collection.name} ({config.split})"
            )
        if not self.lists:
            raise UserError(
                f"max_queries={config.max_queries}: none of the queries chosen from the {config.split} split has a "
                "candidate list: choose more queries, or candidates for all of them"
            )
        self.reports: dict[str, MetricsReport] = {}
        """Row -> its metrics, in the order of the table; rows of lists without a judgement have none."""
        self.records: dict[str, dict[str, QueryRecord]] = {}
        """Row -> query id -> what was recorded of its list."""
        self.runs: dict[str, Path] = {}

    def measure(
        self, row: str, ranker: Ranker, identity: Mapping[str, Any], *, overwrite: bool = False, **recorded: Any
    ) -> EvaluationResult:
        """Scores, measures and writes one ranker's row. `identity` is what its scores depend on."""
        config = self.config
        self._check_new(row)
        result = Evaluator(
            ranker,
            self.lists,
            self.folder / row_folder(row),
            config.batch_size,
            qrels=self.qrels,
            measures=config.measures,
            depth=config.depth,
            tail=config.tail,
            missing=config.missing,
            ignore_self=self.collection.ignore_self,
            name=row,
            collection=self.collection.name,
            identity=identity,
            seed=self.seed,
            overwrite=overwrite,
            **recorded,
        ).run()
        return self._keep(row, result)

    def measure_run(
        self, row: str, path: Path, *, overwrite: bool = False, config: Mapping[str, Any] | None = None
    ) -> EvaluationResult:
        """Measures and writes the row of another system's TREC run: same queries, depth, measures and rule for ties."""
        settings, collection = self.config, self.collection
        self._check_new(row)
        files = EvaluationFiles(self.folder / row_folder(row))
        files.prepare_without_journal(overwrite)
        external = read_external(
            path, collection, settings.split, depth=settings.depth, missing_documents=settings.missing_documents
        )
        covered = {query.id for query in self.lists.queries}
        result = external_result(external, row, self.qrels, settings.measures, settings.missing, covered, files)
        if settings.with_positives:
            log.warning("%s: candidate lists hold all positives (with_positives), this run holds what it found", path)
        write_results(
            result,
            measures=settings.measures,
            collection=collection.name,
            config=config or {},
            identity=external.identity(),
            seed=self.seed,
            tail="drop",
            score_scale="",
            baseline_name=None,
            paper={},
            ranking_rule=TIE_RULE,
        )
        return self._keep(row, result)

    def _check_new(self, row: str) -> None:
        for other in self.runs:
            if other != row and row_folder(other).casefold() == row_folder(row).casefold():
                raise UserError(f"{row!r} would be in the folder of the row {other!r}: choose another name")

    def _keep(self, row: str, result: EvaluationResult) -> EvaluationResult:
        if result.report is not None:
            self.reports[row] = result.report
        self.records[row] = result.records
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

    @property
    def name(self) -> str:
        """The collection's."""
        return self.collection.name

    def query_texts(self) -> dict[str, str]:
        """query id -> text, for all queries of the split."""
        return {query.id: query.text for query in self.collection.queries(self.config.split).values()}

    @property
    def title(self) -> str:
        return f"{self.collection.name}, {self.config.split} split, {len(self.lists)} lists of {self.config.depth}"

    def table(self, baseline: str | None = None, recorded: Sequence[str] = (), **options: Any) -> Table:
        """All rows so far; the others are compared with `baseline`, if it is among them.

        `recorded`: columns of what was recorded of each list; `options`: `metrics_table`'s.
        """
        return metrics_table(
            self.reports,
            self.config.measures,
            baseline=baseline if baseline in self.reports else None,
            recorded={
                name: {row: recorded_values(found, name) for row, found in self.records.items()} for name in recorded
            },
            title=self.title,
            seed=self.seed,
            **options,
        )

    def write_table(self, path: Path, baseline: str | None = None) -> str:
        """The table as Markdown, also written to `path`."""
        text = self.table(baseline).to_markdown()
        write_text(path, text)
        return text
