"""Several processes as one run: how they find each other, what they tell each other, and how they part.

A process is what `jax.distributed` means by it: on TPU pods and CPUs one for each host.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from blockrank.errors import UserError, at_least

log = logging.getLogger(__name__)

LAST_WORDS_S = 3.0
"""How long a failed process 0, whose end ends all others, leaves them to tell what they failed of."""
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


@dataclass(frozen=True)
class DistributedConfig:
    """The processes of a run: `coordinator` (`host:port` of process 0), `num_processes`, and this one's `process_id`.

    All null: what a TPU pod or a SLURM step of several tasks says, elsewhere one process. `num_processes=1` is one
    process anywhere. A process not heard of for `heartbeat_timeout_s` is taken for dead, and the others are ended.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat_timeout_s: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "num_processes", "heartbeat_timeout_s")
        at_least(self, 0, "process_id")
        given = [value is not None for value in (self.coordinator, self.num_processes, self.process_id)]
        if self.num_processes == 1:
            return
        if any(given) and not all(given):
            raise UserError("coordinator, num_processes and process_id go together: set all three, or none")
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            raise UserError(f"process_id={self.process_id} is none of 0 to {self.num_processes - 1}")

    def arguments(self, environment: Mapping[str, str]) -> dict[str, Any] | None:
        """What to give `jax.distributed.initialize`; None for one process."""
        if self.num_processes == 1:
            return None
        timeout = {"heartbeat_timeout_seconds": self.heartbeat_timeout_s}
        if self.coordinator is not None:
            return {
                **timeout,
                "coordinator_address": self.coordinator,
                "num_processes": self.num_processes,
                "process_id": self.process_id,
                "cluster_detection_method": "deactivate",
            }
        slurm = all(name in environment for name in _SLURM) and int(environment["SLURM_NTASKS"]) > 1
        return timeout if slurm or _on_tpu(environment) else None


def _on_tpu(environment: Mapping[str, str]) -> bool:
    """Whether JAX, when imported, found chips of a Cloud TPU, and is to use them."""
    platforms = environment.get("JAX_PLATFORMS", "")
    return environment.get("TPU_ML_PLATFORM") == "JAX" and platforms.split(",")[0] in ("", "tpu")


@contextmanager
def joined(config: DistributedConfig) -> Iterator[None]:
    """Within, this process is one of the run's. Open it before JAX computes anything.

    Processes other than 0 log errors only. A process that fails leaves at once, without waiting for those that may be
    waiting for it: JAX ends them, as soon as process 0 is gone or has missed another's heartbeats. Raises `UserError`
    when they do not find each other.
    """
    arguments = config.arguments(os.environ)
    if arguments is None:
        yield
        return
    try:
        jax.distributed.initialize(**arguments)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"config key distributed: the processes of the run did not meet ({reason})") from error
    if jax.process_index() != 0:
        logging.getLogger().setLevel(logging.ERROR)
    log.info("process %d of %d, %d devices", jax.process_index(), jax.process_count(), jax.device_count())
    try:
        yield
    except BaseException as error:
        leave_at_exit(2 if isinstance(error, UserError) else 1)
        raise


def leave_at_exit(status: int) -> None:
    """Has this process, one of several, end with `status` without waiting for the others."""
    if jax.process_count() > 1:
        atexit.register(_leave, status)


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.process_index() == 0:
        time.sleep(LAST_WORDS_S)
    os._exit(status)


def gather(values: np.ndarray) -> np.ndarray:
    """int32 [...] of this process -> [processes, ...], the same on all. Every process must call it, and waits."""
    if jax.process_count() == 1:
        return values[None]
    return np.asarray(multihost_utils.process_allgather(values))


def agree(what: str, content: str) -> None:
    """Raises `UserError`, on all processes, unless `content` is the same on all."""
    digest = np.frombuffer(hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest(), np.int32)
    told = gather(digest)
    others = np.flatnonzero((told != told[0]).any(axis=1)).tolist()
    if others:
        raise UserError(
            f"{what} of process {', '.join(map(str, others))} differs from that of process 0: start all processes with "
            "the same command, files and versions"
        )


def first_request(signal_number: int | None) -> int | None:
    """The signal that asked any process to stop, or None; the same on all. On one process, its own."""
    if jax.process_count() == 1:
        return signal_number
    return int(gather(np.asarray(signal_number or 0, np.int32)).max()) or None
