"""`python -m blockrank.aot`: compile for a TPU topology without TPUs, and print what a run would cost each chip.

    python -m blockrank.aot +exp=msmarco topology=v6e:2x4 mesh=doc8
    python -m blockrank.aot +exp=msmarco topology=v6e:2x4 programs=[train] mesh.fsdp=8
    python -m blockrank.aot +exp=msmarco topology=v6e:2x4 programs=[encode]

Needs the package `libtpu` (extra `tpu`). Weights are shapes only: no memory of the model's size is needed here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

from rich.console import Console

from blockrank.config import entry
from blockrank.costs.encoding import CorpusConfig, encoding_programs, summary
from blockrank.costs.programs import Planned, PromptLengths, ranking_program, training_program
from blockrank.costs.report import as_json, growth, measure, table
from blockrank.costs.topology import Topology
from blockrank.data.files import atomic_write
from blockrank.errors import FieldError, not_empty
from blockrank.training.recipe import TrainConfig


@dataclass(frozen=True, kw_only=True)
class AotConfig(TrainConfig):
    """`configs/aot.yaml`: a training config, whose model, ranker, loss and optimiser are planned for `topology`.

    `encode` plans for `corpus`, over all devices of the topology.
    """

    topology: str
    programs: tuple[Literal["rank", "train", "encode"], ...]
    depths: tuple[int, ...]
    dtype: Literal["float32", "bfloat16"]
    corpus: CorpusConfig
    prompt_lengths: PromptLengths = field(default_factory=PromptLengths)
    report: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        not_empty(self, "programs", "depths")
        if min(self.depths) < 1:
            raise FieldError("depths", f"{list(self.depths)} must be at least 1")


@entry("aot", AotConfig)
def main(config: AotConfig) -> int:
    logging.getLogger("absl").setLevel(logging.ERROR)
    plan(config, Console(soft_wrap=True, highlight=False))
    return 0


def plan(config: AotConfig, console: Console) -> None:
    """Compiles the programs one by one and prints a table of all."""
    topology = Topology.of(config.topology)
    encoding = encoding_programs(config.corpus, topology.devices) if "encode" in config.programs else []
    rows = []
    for planned in chain(_list_programs(config, topology), (batches.planned for batches in encoding)):
        text = config.report and config.report.with_name(f"{config.report.stem}.{len(rows)}.hlo.txt")
        rows.append(measure(planned, text))
        console.print(table(rows[-1:], topology.chip).splitlines()[-1], markup=False)
    console.print(f"\n{config.topology}, mesh {config.mesh}, per chip:\n", markup=False)
    for text in filter(None, (table(rows, topology.chip), growth(rows))):
        console.print(f"{text}\n", markup=False)
    if encoding and all(row.error is None for row in rows[-len(encoding) :]):
        console.print(summary(config.corpus, rows[-len(encoding) :], encoding, topology.chip), markup=False)
    if config.report is not None:
        figures = [as_json(row, topology.chip) for row in rows]
        content = {"topology": config.topology, "mesh": str(config.mesh), "rows": figures}
        with atomic_write(config.report) as file:
            file.write(json.dumps(content).encode())
        console.print(f"report: {config.report}", markup=False)


def _list_programs(config: AotConfig, topology: Topology) -> Iterator[Planned]:
    """Those over lists, which run on the configured mesh."""
    if set(config.programs) <= {"encode"}:
        return
    mesh = config.mesh.make(topology.devices)
    if "rank" in config.programs:
        decoder = config.model.decoder_config()
        for depth in config.depths:
            yield ranking_program(decoder, config.dtype, config.ranker, config.prompt_lengths, depth, mesh)
    if "train" in config.programs:
        yield training_program(config, mesh)


if __name__ == "__main__":
    main()
