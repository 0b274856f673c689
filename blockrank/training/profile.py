"""A profiler trace of chosen steps: `profile=steps:10-13`."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import jax

from blockrank.errors import FieldError

PROFILE_FOLDER = "profile"
"""The folder of traces inside a run's output folder."""


@dataclass(frozen=True)
class ProfiledSteps:
    """Steps `first` to `last`, counted from 1 as in the log, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"steps:{self.first}-{self.last}"

    @staticmethod
    def parse(text: str) -> ProfiledSteps:
        """`steps:10-13`, or `steps:10` for one. Raises `FieldError`."""
        match = re.fullmatch(r"steps:(\d{1,9})(?:-(\d{1,9}))?", text)
        found = match and ProfiledSteps(int(match[1]), int(match[2] or match[1]))
        if not found or not 1 <= found.first <= found.last:
            raise FieldError("profile", f"{text!r} names no steps: write profile=steps:FIRST-LAST, counted from 1")
        return found


class Profiler:
    """Traces `steps` (None: nothing) into `folder`; of a resumed run, those of them that are still to come."""

    def __init__(self, steps: ProfiledSteps | None, folder: Path):
        self.folder, self._steps, self._tracing = folder, steps, False

    def begins(self, step: int) -> bool:
        """Whether tracing starts before `step`, so that earlier ones must be finished."""
        return self._steps is not None and not self._tracing and self._steps.first <= step <= self._steps.last

    def ends(self, step: int) -> bool:
        """Whether tracing ends after `step`, once it is finished."""
        return self._steps is not None and self._tracing and step == self._steps.last

    def start(self) -> None:
        jax.profiler.start_trace(self.folder)
        self._tracing = True

    def stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            print(f"profile: {self.folder} (xprof, TensorBoard or Perfetto read it)")

    def step(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Marks `step` in the trace."""
        if not self._tracing:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)
