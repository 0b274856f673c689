"""Where the wall time of a run goes. Goodput is the share of it in which the device ran a training step."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal, get_args

Phase = Literal["restore", "compile", "data", "validation", "checkpoint"]
"""What keeps the loop from its steps. `data`: waiting for a batch; `checkpoint`: the part of a save that blocks."""


class Goodput:
    """Adds up the seconds of a run by what they went to, from its creation on.

    The host prepares the next step while the device runs one, so of a phase only what no step overlaps is counted.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._busy_until = clock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[tuple[Phase, float, float]] = []

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Counts what happens inside."""
        start = self._clock()
        try:
            yield
        finally:
            self._open.append((name, start, self._clock()))

    def stepped(self, dispatched: float, finished: float) -> float:
        """Counts a step that was given to the device and finished at these times, in order; returns its seconds.

        Phases seen since the step before can overlap with this one only.
        """
        started = max(dispatched, self._busy_until)
        self._settle(started, finished)
        self._busy_until = finished
        self._seconds["step"] += finished - started
        return finished - started

    def seconds(self) -> dict[str, float]:
        """Seconds so far by phase, `step`, and `other`; together they are `wall`."""
        now = self._clock()
        self._settle(now, now)
        wall = now - self._start
        known = {name: self._seconds[name] for name in ("step", *get_args(Phase))}
        return {**known, "other": wall - sum(known.values()), "wall": wall}

    def _settle(self, started: float, finished: float) -> None:
        for name, start, end in self._open:
            self._seconds[name] += end - start - overlap((start, end), (started, finished))
        self._open.clear()


def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    """How long two intervals (start, end) coincide."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def goodput_text(seconds: dict[str, float]) -> str:
    """One line: `goodput 93.1 % of 5,021 s: compile 2.2 %, data 0.4 %, ...`; what took nothing is left out."""
    wall = max(seconds["wall"], 1e-9)
    names = sorted((n for n in seconds if n not in ("step", "wall")), key=lambda n: -seconds[n])
    shown = [f"{name} {share:.1%}" for name in names if (share := seconds[name] / wall) >= 0.0005]
    return f"goodput {seconds['step'] / wall:.1%} of {seconds['wall']:,.0f} s" + (
        f"; {', '.join(shown)}" if shown else ""
    )


class Finishes:
    """Tells when results become ready, by a thread that waits for them: the loop is elsewhere by then.

    `on_finish` is called after each, in that thread.
    """

    def __init__(self, on_finish: Callable[[], None] = lambda: None):
        self._on_finish = on_finish
        self._waiting: queue.SimpleQueue[tuple[Any, Future[float]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="step-finishes", daemon=True).start()

    def watch(self, result: Any) -> Future[float]:
        """The time at which `result` (a JAX array) is ready, or its computation has failed."""
        future: Future[float] = Future()
        self._waiting.put((result, future))
        return future

    def close(self) -> None:
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            result, future = item
            with contextlib.suppress(Exception):  # the loop meets the failure when it reads the result
                result.block_until_ready()
            future.set_result(time.perf_counter())
            self._on_finish()
