"""The steps of a run as compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax

from blockrank.training.batches import HostBatch
from blockrank.training.state import TrainState
from blockrank.training.step import Step
from blockrank.training.telemetry import Prediction, Telemetry


@dataclass(frozen=True)
class Program:
    """A compiled step, `run(state, batch)`, and what it was predicted to take."""

    run: Any
    full: bool
    predicted: Prediction | None


class StepPrograms:
    """Every `full_every`-th step is `full`, others `between`; each is compiled once, ahead, for arguments of a kind."""

    def __init__(self, full_every: int, full: Step, between: Step):
        self._full_every, self._steps = full_every, {True: full, False: between}
        self.known: dict[Hashable, Program] = {}

    def find(
        self,
        step: int,
        state: TrainState,
        data: Any,
        batch: HostBatch,
        telemetry: Telemetry,
        tell: Callable[[int, dict[str, float]], None],
    ) -> Program:
        """The program of the step after `step` on `data`, which holds `batch`; `tell` gets a new one's prediction."""
        full = step % self._full_every == 0
        key = full, signature((state, data))
        if key not in self.known:
            with telemetry.phase("compile"):
                run = self._steps[full].lower(state, data).compile()
                program = self.known[key] = Program(run, full, telemetry.predict(run, batch, full))
            if program.predicted is not None:
                tell(step, program.predicted.values())
        return self.known[key]


def signature(arguments: Any) -> Hashable:
    """What a compiled program depends on: structure, shapes, dtypes and placement of arrays."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
