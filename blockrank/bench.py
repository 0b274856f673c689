"""`python -m blockrank.bench`: rankers side by side in one run, and where the speed of BlockRank comes from.

    python -m blockrank.bench                                            # SmolLM2 on lists like MS MARCO's
    python -m blockrank.bench candidates='[10,50]' dense='[]' seconds_per_cell=5
    python -m blockrank.bench model=mistral_7b data=beir_folder data.path=scifact lists.kind=collection

Each system runs in a process of its own; those of one list length take turns, repetition by repetition. Writes
`results.json`, `bench.md` and `latency.png` into `output_dir`. Exits with status 1 when nothing could be measured, 2 on
bad input.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from blockrank.benchmark.records import Cell, Results
from blockrank.benchmark.report import write_report
from blockrank.benchmark.runner import run_cells
from blockrank.benchmark.settings import BenchConfig
from blockrank.config import entry


@entry("bench", BenchConfig)
def main(config: BenchConfig) -> int:
    console = Console(soft_wrap=True, highlight=False)
    results = bench(config, console)
    return 0 if results.measured() else 1


def bench(config: BenchConfig, console: Console) -> Results:
    """Measures all cells, writes the report after each and prints it at the end."""
    progress = Console(stderr=True, soft_wrap=True, highlight=False)
    results, text = Results(()), ""
    with tempfile.TemporaryDirectory() as folder, progress.status("preparing prompts") as status:
        for cell in run_cells(config, Path(folder), status.update):
            results = Results((*results.cells, cell))
            progress.print(_line(cell), markup=False)
            text = write_report(config, results)
    console.print(text, markup=False)
    for name in ("results.json", "bench.md", "latency.png"):
        if (path := config.output_dir / name).exists():
            console.print(f"{path}", markup=False)
    return results


def _line(cell: Cell) -> str:
    if cell.error is not None:
        return f"N={cell.candidates} {cell.error}"
    memory = f"{cell.peak_bytes / 1e9:.2f} GB"
    return f"N={cell.candidates} {cell.system}: {cell.median:.3g} s, {memory}, MFU {cell.utilisation:.0%}"


if __name__ == "__main__":
    main()
