"""`python -m blockrank.stress`: does a ranker rank by what documents say, whatever their order and their claims?

    python -m blockrank.stress +exp=quickstart checkpoint=runs/quickstart
    python -m blockrank.stress +exp=quickstart checkpoint=runs/quickstart \\
        'rows={attention: {ranker: attention}, generative: {ranker: generative}}'

Each list is ranked with its relevant documents first, in the middle and last and in random orders, and with documents
that are not relevant but say they are. `output_dir` gets `order` and `injection` tables (.md, .tex, .csv, .html) and
`stress.json` with every query. Keys are those of `blockrank.eval`. Exits with status 2 on bad input.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from blockrank.config import entry, to_plain
from blockrank.errors import FieldError, UserError, at_least, not_empty
from blockrank.evaluation.files import git_commit, versions, write_json
from blockrank.evaluation.held_out import HeldOut
from blockrank.evaluation.opening import check_models, open_ranker, ranker_identity
from blockrank.evaluation.ranking import without_self
from blockrank.evaluation.settings import EvalConfig
from blockrank.evaluation.stress import (
    CONTROL,
    Mode,
    StressLists,
    injection_effects,
    injection_table,
    order_robustness,
    order_table,
)


@dataclass(frozen=True, kw_only=True)
class StressConfig(EvalConfig):
    """`configs/stress.yaml`: an evaluation's rankers and lists of one collection; P@1 is what is measured."""

    shuffles: int
    modes: tuple[Mode, ...]
    injections: dict[str, str] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "shuffles")
        not_empty(self, "modes")
        for key in ("collections", "depths", "runs"):
            if getattr(self, key) is not None:
                raise FieldError(key, "is of blockrank.eval: stress ranks the lists of one collection anew")
        for name, text in (self.injections or {}).items():
            if name == CONTROL or not text.strip():
                raise FieldError("injections", f"{name!r} is the name of a document's own text, or its text is empty")


@entry("stress", StressConfig)
def main(config: StressConfig) -> int:
    logging.getLogger("absl").setLevel(logging.ERROR)
    stress(config, Console(soft_wrap=True, highlight=False))
    return 0


def stress(config: StressConfig, console: Console) -> dict[str, Any]:
    """Puts all rankers to the test on the same lists, prints the tables and writes them; returns `stress.json`."""
    if config.data is None:
        raise UserError("data: which collection? Give data=beir_folder data.path=..., ir_datasets, icr, hf or pydocs")
    rows, target = config.ranker_configs(), config.output_dir / "stress.json"
    if not rows:
        raise UserError("give checkpoint=<training run or model folder>, model=<name in configs/model> or rows={...}")
    if target.exists() and not config.overwrite:
        raise UserError(f"{target} exists: choose another output_dir, or set overwrite=true")
    check_models(rows.values())
    collection = config.data.open()
    settings = config.held_out(collection)
    held_out = HeldOut(collection, settings, config.output_dir, config.seed)
    drop = without_self if collection.ignore_self else (lambda candidates: candidates)
    tested = StressLists.of([drop(candidates) for candidates in held_out.lists], settings.depth)
    title = f"{collection.name}, {settings.split} split, {len(tested.lists)} lists of at most {settings.depth}"
    order: dict[str, Any] = {}
    injection: dict[str, Any] = {}
    identity: dict[str, Any] = {}
    for name, row in rows.items():
        ranker = open_ranker(row)
        key = name or ranker.name
        options = {"batch_size": row.batch_size or settings.batch_size}
        identity[key] = ranker_identity(ranker)
        order[key] = order_robustness(ranker, tested.lists, shuffles=config.shuffles, seed=config.seed, **options)
        if config.injections:
            injection[key] = injection_effects(ranker, tested.lists, config.injections, modes=config.modes, **options)
        del ranker
    tables = {"order": order_table(order, title)}
    if injection:
        tables["injection"] = injection_table(injection, title)
    for name, table in tables.items():
        table.write_all(config.output_dir / name)
        console.print(table.to_markdown(), markup=False)
    counts = {"without_positive": tested.without_positive, "without_negative": tested.without_negative}
    report = {
        "collection": collection.name,
        "lists": len(tested.lists),
        "left_out": counts,
        "order": order,
        "injection": injection,
        "rankers": identity,
        "config": to_plain(config),
        "git_commit": git_commit(),
        "versions": versions(),
    }
    write_json(target, report)
    console.print(
        f"{counts['without_positive']} lists without a relevant document, {counts['without_negative']} without"
    )
    console.print(f"another one were left out. Per query: {target}", markup=False)
    return report


if __name__ == "__main__":
    main()
