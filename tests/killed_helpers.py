"""Trainers in processes that tests kill: forked from one that has imported everything and used no device yet."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from blockrank.training.checkpoint import FOLDER, Checkpoints
from blockrank.training.tracking import METRICS_FILE

TESTS = str(Path(__file__).parent)

PARENT = """
import os, sys
sys.path.insert(0, {tests!r})
from survival_helpers import Path, small_trainer
sys.stdin.readline()
for line in iter(sys.stdin.readline, ""):
    folder, steps = line.split("\\t")
    child = os.fork()
    if not child:
        log = os.open(folder + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        code = 1
        try:
            small_trainer(Path(folder), int(steps)).run()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    """Starts one trainer after the other, each a fork."""

    def __init__(self) -> None:
        code = PARENT.format(tests=TESTS)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=dict(os.environ), **pipes)
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._commands, self._answers = self._parent.stdin, self._parent.stdout
        self._tell("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.close()
        self._parent.wait()

    def start(self, folder: Path, steps: int) -> int:
        """The id of a process that runs the trainer in `folder`."""
        self._tell(f"{folder}\t{steps}")
        return int(self._answers.readline())

    def end(self) -> int:
        """The exit status of the process started last, once it has one; of a killed one the negative signal."""
        return int(self._answers.readline())

    def _tell(self, line: str) -> None:
        self._commands.write(line + "\n")
        self._commands.flush()


@dataclass
class Tally:
    """Kills, the step each next life resumed from, and how many kills found a save under way."""

    resumed_from: list[int] = field(default_factory=list)
    in_a_save: int = 0
    before_a_step: int = 0

    def __str__(self) -> str:
        saves, starts = self.in_a_save, self.before_a_step
        return (
            f"{len(self.resumed_from)} kills, {saves} during a save, {starts} before a first step; "
            f"resumed from steps {self.resumed_from}"
        )


def rows(folder: Path) -> int:
    file = folder / METRICS_FILE
    return file.read_bytes().count(b"\n") if file.exists() else 0


def unfinished(folder: Path) -> list[Path]:
    return list((folder / FOLDER).glob("*.orbax-checkpoint-tmp*"))


class Life:
    """What one process has done, apart from what those before it left: a life begins its log with a new file, after it
    has swept away unfinished saves."""

    def __init__(self, folder: Path, resumed_from: int) -> None:
        self._folder, self._resumed_from = folder, resumed_from
        self._before = self._log()

    def _log(self) -> int | None:
        file = self._folder / METRICS_FILE
        return file.stat().st_ino if file.exists() else None

    def steps(self) -> int:
        return 0 if self._log() == self._before else rows(self._folder) - self._resumed_from

    def saves(self) -> int:
        return 0 if self._log() == self._before else len(unfinished(self._folder))


def kill_and_resume(folder: Path, steps: int, kills: int, seed: int) -> Tally:
    """Trains to `steps` through `kills` SIGKILLs at random moments; every second one as soon as a save is under way."""
    rng, tally, startup = random.Random(seed), Tally(), 1.0
    with Nursery() as nursery:
        while len(tally.resumed_from) < kills:
            life = Life(folder, tally.resumed_from[-1] if tally.resumed_from else 0)
            process, begun = nursery.start(folder, steps), time.monotonic()
            saving = len(tally.resumed_from) % 2 == 0
            wanted = rng.randrange(4) if not saving else rng.randrange(1, 4)
            wait(process, life.steps, wanted)
            startup = time.monotonic() - begun if wanted else startup
            if saving:
                wait(process, life.saves, 1)
                time.sleep(rng.uniform(0, 0.01))
            else:  # at most a few steps, or there is nothing left to kill
                wait(process, life.steps, wanted + 8 if wanted else 1, rng.uniform(0, 0.2 if wanted else startup))
            os.kill(process, signal.SIGKILL)
            status = nursery.end()
            if status != -signal.SIGKILL:
                raise AssertionError(f"ended with {status} by itself:\n{Path(f'{folder}.log').read_text()[-3000:]}")
            tally.in_a_save += life.saves() > 0
            tally.before_a_step += life.steps() == 0
            exists = (folder / FOLDER).is_dir()
            tally.resumed_from.append((exists and Checkpoints(folder / FOLDER, read_only=True).latest) or 0)
        nursery.start(folder, steps)
        status = nursery.end()
        assert status == 0, Path(f"{folder}.log").read_text()[-3000:]
    return tally


def wait(process: int, count, wanted: int, seconds: float = 300) -> int:
    """Until `count()` is at least `wanted`, the process has gone, or time is up."""
    end = time.monotonic() + seconds
    while (found := count()) < wanted and time.monotonic() < end and Path(f"/proc/{process}/stat").exists():
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.002)
    return found
