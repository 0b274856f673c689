"""TPU slices that are not there: their devices, to compile for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from blockrank.chips import Chip, chip_named
from blockrank.errors import UserError

NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Without these libtpu asks a metadata server, for minutes, which TPU it is on, and lets one process alone compile."""


@dataclass(frozen=True)
class Topology:
    """A chip and the devices of a slice of it."""

    chip: Chip
    devices: tuple[Any, ...]

    @staticmethod
    def of(name: str) -> Topology:
        """`chip:grid`, as `v6e:2x4`. Raises `UserError` without libtpu, or for a slice that does not exist."""
        from jax.experimental import topologies

        chip = chip_named(name.partition(":")[0])
        if find_spec("libtpu") is None:
            raise UserError("compiling for TPUs needs the package libtpu: pip install 'blockrank[tpu]'")
        for key, value in NO_MACHINE.items():
            os.environ.setdefault(key, value)
        try:
            found = topologies.get_topology_desc(name, platform="tpu")
        except Exception as error:
            raise UserError(f"topology={name!r}: {str(error).splitlines()[0]}") from error
        return Topology(chip, tuple(found.devices))
