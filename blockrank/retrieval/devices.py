"""Where encoding and search put their arrays: all devices take equal parts, whatever axes the mesh has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def local_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """All devices of this host on one axis, `data`."""
    return Mesh(np.asarray(jax.local_devices() if devices is None else devices), ("data",))


def everywhere(mesh: Mesh) -> NamedSharding:
    """Whole on every device: weights, queries that are searched for."""
    return NamedSharding(mesh, PartitionSpec())


def spread_rows(mesh: Mesh) -> NamedSharding:
    """Axis 0 over all devices: texts that are encoded, documents that are searched."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))
