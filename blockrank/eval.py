"""`python -m blockrank.eval`: re-rank a collection's candidates and measure the result.

    python -m blockrank.eval data=beir_folder data.path=scifact candidates=bm25.trec checkpoint=runs/train depth=100
    python -m blockrank.eval data=beir_folder data.path=scifact model=smollm2
    python -m blockrank.eval data=beir_folder data.path=scifact checkpoint=runs/train runs=[other.trec]
    python -m blockrank.eval +exp=quickstart checkpoint=runs/quickstart
    python -m blockrank.eval +exp=quickstart checkpoint=runs/quickstart rows='{decoded: {ranker: generative}}'
    python -m blockrank.eval data=beir_folder data.path=scifact checkpoint=runs/train mesh=doc8

Below `output_dir`/eval each row has a folder with the TREC run, `results.json`, `per_query.jsonl` and `table.md`;
`table` beside them (.md, .tex, .csv, .html) holds all rows, and `deltas` (.csv, .png) what each query gains or loses.
With several `collections` or `depths` each has a folder of these, and `table` above them holds all. The same command
continues a killed evaluation. Exits with status 2 on bad input.
"""

from __future__ import annotations

import logging

from rich.console import Console

from blockrank.config import entry
from blockrank.evaluation.held_out import HeldOut
from blockrank.evaluation.settings import EvalConfig
from blockrank.evaluation.suite import evaluate_rows


@entry("eval", EvalConfig)
def main(config: EvalConfig) -> int:
    logging.getLogger("absl").setLevel(logging.ERROR)
    evaluate_rows(config, Console(soft_wrap=True, highlight=False))
    return 0


def evaluate_ranker(config: EvalConfig, console: Console) -> HeldOut:
    """The evaluation of one collection."""
    (held_out,) = evaluate_rows(config, console)
    return held_out


if __name__ == "__main__":
    main()
