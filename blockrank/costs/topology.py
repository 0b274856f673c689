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


HOST = (2, 2, 1)
"""Chips of one host along each dimension of a slice, if the slice is as large."""


@dataclass(frozen=True)
class Topology:
    """A chip and the devices of a slice of it."""

    chip: Chip
    devices: tuple[Any, ...]

    @staticmethod
    def of(name: str) -> Topology:
        """`chip:grid`, as `v6e:2x4` or `v6e:1x1`. Raises `UserError` without libtpu, or for no such slice."""
        from jax.experimental import topologies

        kind, _, grid = name.partition(":")
        chip = chip_named(kind)
        if find_spec("libtpu") is None:
            raise UserError("compiling for TPUs needs the package libtpu: pip install 'blockrank[tpu]'")
        for key, value in NO_MACHINE.items():
            os.environ.setdefault(key, value)
        try:
            sizes = [int(size) for size in grid.split("x")]
            bounds = [min(pair) for pair in zip([*sizes, 1], HOST, strict=False)]
            found = topologies.get_topology_desc(name, platform="tpu", chips_per_host_bounds=bounds)
        except Exception as error:
            raise UserError(f"topology={name!r}: {str(error).splitlines()[0]}") from error
        return Topology(chip, tuple(found.devices))
