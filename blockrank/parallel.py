"""The device mesh: its axes, how many devices each has, and over which of them every array is spread.

`data`   lists of a batch are spread; weights are replicated.
`fsdp`   lists are spread as over `data`, and weights too: a layer's are gathered when it runs.
`doc`    the rows of each list are spread: every device reads prefix, suffix and its own documents, so N documents cost
         a device the work of N / doc. Per layer only the suffix's attention is merged (`attention/merge.py`).
`tensor` attention heads and the MLP's inner features are spread.

Weights are placed by one table from parameter paths to axes; everything else follows from the batch's axis.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from blockrank.config import build, config_dir
from blockrank.errors import UserError

log = logging.getLogger(__name__)
T = TypeVar("T")

AXES = ("data", "fsdp", "doc", "tensor")
LISTS = ("data", "fsdp")
"""The axes that lists are spread over."""
BATCH = PartitionSpec(("doc", *LISTS))
"""Axis 0 of a batch: its entries are the first shard of every list, then the second of every list, ..."""
REST = -1
"""As the size of a mesh axis: all devices that the other axes leave."""

RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"embed\.embedding", PartitionSpec("tensor", "fsdp")),
    (r"head\.kernel", PartitionSpec("fsdp", "tensor")),
    (r".*\b(query|key|value|gate|up)\.kernel", PartitionSpec("fsdp", "tensor")),
    (r".*\b(query|key|value|gate|up)\.bias", PartitionSpec("tensor")),
    (r".*\b(out|down)\.kernel", PartitionSpec("tensor", "fsdp")),
    (r".*", PartitionSpec()),
)
"""Parameter path (a regular expression that matches all of it; the first counts) -> axes of its last dimensions. The
dimensions before, such as the layer of a stacked block, are not spread."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices per mesh axis; -1, for one axis at most, takes all that the others leave."""

    data: int = 1
    fsdp: int = 1
    doc: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        sizes = [getattr(self, axis) for axis in AXES]
        if any(size < 1 and size != REST for size in sizes) or sizes.count(REST) > 1:
            raise UserError(f"mesh {self}: axes are 1 or more, and one of them may be {REST} for the remaining devices")

    def __str__(self) -> str:
        return ", ".join(f"{axis}={getattr(self, axis)}" for axis in AXES)

    @property
    def single(self) -> bool:
        return all(getattr(self, axis) == 1 for axis in AXES)

    def sizes(self, devices: int) -> tuple[int, int, int, int]:
        """Devices along each of `AXES` when so many are present. Raises `UserError` when they do not divide."""
        sizes = [getattr(self, axis) for axis in AXES]
        product = math.prod(size for size in sizes if size != REST)
        if product > devices or (REST in sizes and devices % product):
            need = f"a multiple of {product}" if REST in sizes else f"{product}"
            raise UserError(f"mesh {self} needs {need} devices, but {devices} are present: change the axes' sizes")
        data, fsdp, doc, tensor = (devices // product if size == REST else size for size in sizes)
        return data, fsdp, doc, tensor

    def make(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh over `devices` (all that are present); those it does not need stay idle."""
        devices = jax.devices() if devices is None else devices
        sizes = self.sizes(len(devices))
        used = math.prod(sizes)
        if used < len(devices):
            if jax.process_count() > 1:
                raise UserError(f"mesh {self} uses {used} of {len(devices)} devices; several hosts must use all")
            log.info("mesh %s uses %d of %d devices", self, used, len(devices))
        return Mesh(np.asarray(devices[:used]).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def open_mesh(mesh: Mesh | MeshConfig | str | None) -> Mesh | None:
    """A mesh from a name in `configs/mesh`, its sizes, or itself; None for one device. Raises `UserError`."""
    if isinstance(mesh, str):
        mesh = named_mesh(mesh)
    if isinstance(mesh, MeshConfig):
        mesh = None if mesh.single else mesh.make()
    if mesh is not None and mesh.axis_names != AXES:
        raise UserError(f"the mesh has axes {mesh.axis_names}; blockrank's are {AXES}, in this order")
    return mesh


def named_mesh(name: str) -> MeshConfig:
    """`configs/mesh/<name>.yaml`."""
    from omegaconf import DictConfig, OmegaConf

    known = {path.stem: path for path in (config_dir() / "mesh").glob("*.yaml")}
    if name not in known:
        raise UserError(f"mesh={name!r} is unknown: choose one of {', '.join(sorted(known))}, or give a MeshConfig")
    loaded = OmegaConf.load(known[name])
    assert isinstance(loaded, DictConfig)
    return build(MeshConfig, loaded, "mesh")


def active_mesh() -> AbstractMesh | None:
    """The mesh of several devices that is being traced for (`jax.set_mesh`), if it is one of ours."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == AXES and mesh.size > 1 else None


def target_platform() -> str:
    """`cpu`, `gpu` or `tpu`: of the active mesh's devices, which need not be present; without a mesh, JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def spread_batch(x: jax.Array) -> jax.Array:
    """Under a mesh, `x` with its first axis held to the batch's devices; otherwise `x`."""
    return x if active_mesh() is None else jax.lax.with_sharding_constraint(x, BATCH)


def parameter_spec(path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The axes of a parameter's dimensions by `RULES`. Raises `UserError` where a dimension does not divide."""
    rule = next(spec for pattern, spec in RULES if re.fullmatch(pattern, path))
    spec = PartitionSpec(*(None,) * (len(shape) - len(rule)), *rule) if rule else rule
    for size, axis in zip(shape, spec, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise UserError(f"{path} {tuple(shape)} does not divide over {axis}={mesh.shape[axis]} devices")
    return spec


def spread_parameters(tree: T) -> T:
    """Under a mesh, a nested dict of parameters (or their gradients) held to the parameters' devices."""
    mesh = active_mesh()
    if mesh is None:
        return tree

    def hold(path: Any, leaf: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(leaf, parameter_spec(_name(path), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(hold, tree)


def place_state(state: T, parameters: Any, mesh: Mesh) -> T:
    """Shapes of a training state, placed: what has the path and shape of a parameter, as moments do, lies as it does.

    `parameters`: the nested dict of parameters or their shapes. All else is on every device.
    """
    specs = {
        (_name(path), leaf.shape): parameter_spec(_name(path), leaf.shape, mesh)
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
    }

    def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        keys = _name(path).split(".")
        ends = ((".".join(keys[i:]), leaf.shape) for i in range(len(keys)))
        spec = next((specs[end] for end in ends if end in specs), PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, state)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def spread_lists(batch: T, mesh: Mesh) -> T:
    """A host batch, or its shapes, placed on the mesh; every leaf has the entries on axis 0."""
    sharding = NamedSharding(mesh, BATCH)

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(place, batch)
