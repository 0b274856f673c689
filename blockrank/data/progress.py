"""One progress bar for work that may take more than a few seconds; silent when short or when nobody watches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextlib.contextmanager
def track(description: str, total: float) -> Iterator[Callable[[float], None]]:
    """A bar on stderr (only on a terminal); the value is a function that advances it."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    pending = 0.0
    with bar:
        task = bar.add_task(description, total=total)

        def advance(amount: float) -> None:
            nonlocal pending
            pending += amount
            if pending >= total / 200:
                bar.advance(task, pending)
                pending = 0.0

        yield advance
