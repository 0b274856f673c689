"""Runs every cell: the systems of one length of list together, repetition by repetition in turn (A B C A B C ...)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from blockrank.benchmark.processes import CellProcess
from blockrank.benchmark.prompts import make_prompts, save_prompt
from blockrank.benchmark.records import Cell
from blockrank.benchmark.settings import BenchConfig, System
from blockrank.config import to_plain
from blockrank.errors import UserError

Report = Callable[[str], None]

MATMULS = 3
"""Least number of matrix products measured beside each group."""


@dataclass
class _Running:
    """A cell while it is measured."""

    name: str
    process: CellProcess
    seconds: list[float] = field(default_factory=list)
    error: str | None = None
    done: bool = False

    def repeat(self, config: BenchConfig) -> None:
        try:
            self.seconds.append(self.process.repeat())
        except UserError as error:
            self.fail(error)
            return
        enough = len(self.seconds) >= config.repetitions and sum(self.seconds) >= config.seconds_per_cell
        self.done = enough or len(self.seconds) >= config.max_repetitions

    def fail(self, error: UserError) -> None:
        self.error, self.done = str(error), True


def run_cells(config: BenchConfig, folder: Path, report: Report) -> Iterator[Cell]:
    """Measures everything; each cell is yielded when its group is done. `folder` takes the prompts and jobs."""
    prompts = make_prompts(config, config.model.decoder_config().vocab_size)
    too_slow: set[str] = set()
    for candidates in sorted(prompts):
        save_prompt(folder / f"prompt-{candidates}.npz", prompts[candidates])
        systems = [s for s in config.systems() if config.measured(s, candidates) and s.name not in too_slow]
        for cell in _OneLength(config, folder, candidates, prompts[candidates].num_tokens, report).run(systems):
            yield cell
            if cell.error is not None or cell.seconds[0] > config.longest_repetition_s:
                too_slow.add(cell.system)


@dataclass(frozen=True)
class _OneLength:
    """The cells of one length of list."""

    config: BenchConfig
    folder: Path
    candidates: int
    tokens: int
    report: Report

    def run(self, systems: list[System]) -> Iterator[Cell]:
        """Groups of systems that fit in memory together, each with a matrix product of its own."""
        waiting = list(systems)
        while waiting:
            with ExitStack() as stack:
                matmul, group = self._start(None, stack), list[_Running]()
                if matmul.error is not None:
                    raise UserError(matmul.error)
                while waiting and self._has_room(group):
                    group.append(self._start(waiting.pop(0), stack))
                self._take_turns(matmul, group)
                rate = matmul.process.facts["needed_flops"] / min(matmul.seconds)
                yield from [self._cell(running, rate) for running in group]

    def _start(self, system: System | None, stack: ExitStack) -> _Running:
        name = "matmul" if system is None else system.name
        self.report(f"N={self.candidates}: starting {name}")
        job = self.folder / f"job-{self.candidates}-{name}.json"
        content = {
            "config": to_plain(self.config),
            "system": None if system is None else to_plain(system),
            "prompt": str(self.folder / f"prompt-{self.candidates}.npz"),
            "tokens": self.tokens,
        }
        job.write_text(json.dumps(content), "utf-8")
        running = _Running(name, stack.enter_context(CellProcess(name, job, self.config.cell_timeout_s)))
        try:
            running.process.start()
        except UserError as error:
            running.fail(error)
        warm_up = running.process.facts.get("warm_up_seconds", 0.0)
        if warm_up > self.config.longest_repetition_s:
            running.seconds, running.done = [warm_up], True
        return running

    def _has_room(self, group: list[_Running]) -> bool:
        """Whether one more process as large as the largest so far may join."""
        peaks = [running.process.facts.get("peak_bytes", 0) for running in group]
        return not group or sum(peaks) + max(peaks) <= self.config.memory_gb * 1e9

    def _take_turns(self, matmul: _Running, group: list[_Running]) -> None:
        """One repetition of each cell in turn, a matrix product before each round, until all have enough."""
        rounds = 0
        while len(matmul.seconds) < MATMULS or any(not running.done for running in group):
            rounds += 1
            self.report(f"N={self.candidates}: round {rounds} of {len(group)} systems")
            matmul.repeat(self.config)
            if matmul.error is not None:
                raise UserError(matmul.error)
            for running in group:
                if not running.done:
                    running.repeat(self.config)

    def _cell(self, running: _Running, rate: float) -> Cell:
        peak = 0
        if running.error is None:
            try:
                peak = running.process.finish()
            except UserError as error:
                running.fail(error)
        if running.error is not None:
            return Cell(running.name, self.candidates, error=running.error)
        return Cell(running.name, self.candidates, tuple(running.seconds), peak, rate, running.process.facts)
