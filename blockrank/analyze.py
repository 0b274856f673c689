"""`python -m blockrank.analyze`: which layer and tokens of a model rank best, and where its attention goes.

    python -m blockrank.analyze +exp=quickstart checkpoint=runs/quickstart output_dir=runs/quickstart/analysis
    python -m blockrank.analyze +exp=quickstart checkpoint=runs/quickstart parts=[signals,steps]
    python -m blockrank.analyze data=beir_folder data.path=scifact split=train checkpoint=exported apply=better

Writes `analysis.json`, `analysis.md`, figures and `readout.yaml` into `output_dir`; the last is what `blockrank.eval
readout=...` and `Reranker.from_pretrained(..., readout=...)` take. `apply` writes the finding into an exported folder.
Exits with status 2 on bad input.
"""

from __future__ import annotations

import logging

from rich.console import Console

from blockrank.analysis.command import analyze
from blockrank.analysis.settings import AnalyzeConfig
from blockrank.config import entry


@entry("analyze", AnalyzeConfig)
def main(config: AnalyzeConfig) -> int:
    logging.getLogger("absl").setLevel(logging.ERROR)
    analyze(config, Console(soft_wrap=True, highlight=False))
    return 0


if __name__ == "__main__":
    main()
