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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
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
FACTORED = ("v_row", "v_col")
"""Second moments of optax's Adafactor: means over the longest dimension of a parameter, over its second longest."""
REST = -1
"""As the size of a mesh axis: all devices that the other axes leave."""

RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"embed\.embedding", PartitionSpec("tensor", "fsdp")),
    (r"head\.kernel", PartitionSpec("fsdp", "tensor")),
    (r".*\b(query|key|value|gate|up)\.kernel", PartitionSpec("fsdp", "tensor")),
    (r".*\b(query|key|value|gate|up)\.(bias|kernel_scale)", PartitionSpec("tensor")),
    (r".*\b(out|down)\.kernel", PartitionSpec("tensor", "fsdp")),
    (r".*\b(query|key|value|gate|up)\.lora\.a", PartitionSpec("fsdp", None)),
    (r".*\b(query|key|value|gate|up)\.lora\.b", PartitionSpec(None, "tensor")),
    (r".*\b(out|down)\.lora\.a", PartitionSpec("tensor", None)),
    (r".*\b(out|down)\.lora\.b", PartitionSpec(None, "fsdp")),
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

    def abstract(self) -> AbstractMesh:
        """A mesh of these sizes over devices that need not be there; where one takes the rest, over those present."""
        known = math.prod(getattr(self, axis) for axis in AXES if getattr(self, axis) != REST)
        sizes = self.sizes(max(known, jax.device_count()))
        return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def open_mesh(mesh: Mesh | MeshConfig | str | None) -> Mesh | None:
    """A mesh from a name in `configs/mesh`, its sizes, or itself; None for one device. Raises `UserError`."""
    if isinstance(mesh, str):
        mesh = named_mesh(mesh)
    if isinstance(mesh, MeshConfig):
        mesh = None if mesh.single and jax.process_count() == 1 else mesh.make()
    if mesh is not None and mesh.axis_names != AXES:
        raise UserError(f"the mesh has axes {mesh.axis_names}; blockrank's are {AXES}, in this order")
    return mesh


def host_memory() -> AbstractContextManager[Any]:
    """While it is open, new arrays are made in the host's memory, not on the first accelerator."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        log.warning("JAX has no CPU backend, so weights are read into the first device: add cpu to JAX_PLATFORMS")
        return nullcontext()


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


def gather_weight(path: str, weight: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Under a mesh, a parameter in `dtype` on every device of the axis `fsdp`; its gradient is scattered over it again.

    Cast before it is sent. Where a layer runs, so that no more than a layer's weights are whole at a time.
    """
    mesh = active_mesh()
    if mesh is None or mesh.shape["fsdp"] == 1:
        return weight
    parts = parameter_spec(path, weight.shape, mesh)
    if "fsdp" not in parts:
        return weight
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        return jax.lax.with_sharding_constraint(weight, _without_fsdp(parts))
    return _gather(weight, jnp.dtype(dtype).name, weight.dtype.name, parts)


def _without_fsdp(parts: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if axis == "fsdp" else axis for axis in parts))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(weight: jax.Array, dtype: str, own: str, parts: PartitionSpec) -> jax.Array:
    del own
    cast = jax.lax.with_sharding_constraint(weight.astype(dtype), parts)
    return jax.lax.with_sharding_constraint(cast, _without_fsdp(parts))


def _gather_forward(weight: jax.Array, dtype: str, own: str, parts: PartitionSpec) -> tuple[jax.Array, None]:
    return _gather(weight, dtype, own, parts), None


def _gather_backward(dtype: str, own: str, parts: PartitionSpec, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del dtype
    return (jax.lax.with_sharding_constraint(cotangent, parts).astype(own),)


_gather.defvjp(_gather_forward, _gather_backward)


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


def spread_state(state: T, parameters: Any) -> T:
    """Under a mesh, a traced training state held to the devices that `place_state` gives it."""
    mesh = active_mesh()
    if mesh is None:
        return state
    return jax.tree.map(jax.lax.with_sharding_constraint, state, _state_specs(state, parameters, mesh))


def place_state(state: T, parameters: Any, mesh: Mesh | AbstractMesh) -> T:
    """Shapes of a training state, placed: what is shaped like the parameter whose path it has lies as that does.

    So do moments that Adafactor factors, over the axes they keep. `parameters`: the nested dict of parameters or their
    shapes; of one in the state, the leading (layer) dimension may be cut. All else is on every device.
    """

    def place(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, state, _state_specs(state, parameters, mesh))


def _state_specs(state: T, parameters: Any, mesh: Mesh | AbstractMesh) -> T:
    shapes = {_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)}

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        keys = _name(path).split(".")
        name = next((end for i in range(len(keys)) if (end := ".".join(keys[i:])) in shapes), None)
        if name is None or not leaf.shape or not shapes[name]:
            return PartitionSpec()
        whole = shapes[name]
        if leaf.ndim == len(whole) and leaf.shape[1:] == whole[1:]:
            return parameter_spec(name, leaf.shape, mesh)
        if len(whole) < 2:
            return PartitionSpec()
        whole = whole if len(whole) == 2 else (leaf.shape[0], *whole[1:])
        for moment, axis in zip(FACTORED, np.argsort(whole)[-2:][::-1], strict=True):
            if moment in keys and leaf.shape == tuple(np.delete(whole, axis)):
                kept = [*parameter_spec(name, whole, mesh), *[None] * len(whole)][: len(whole)]
                return PartitionSpec(*kept[:axis], *kept[axis + 1 :])
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, state)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def place_arrays(tree: T, placed: T) -> T:
    """Copies of arrays that this host holds whole, as `placed` shapes say; each device is sent its part alone."""

    def place(leaf: Any, wanted: Any) -> jax.Array:
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, wanted.sharding, lambda index: np.array(whole[index]))

    return jax.tree.map(place, tree, placed)


def list_part(mesh: Mesh | None) -> tuple[int, int]:
    """(index, count): which of `count` equal consecutive parts of every batch's lists this host's devices read.

    Raises `UserError` for a mesh that deals them otherwise.
    """
    if mesh is None or jax.process_count() == 1:
        return 0, 1
    groups, own = math.prod(mesh.shape[axis] for axis in LISTS), _own_groups(mesh)
    if groups % len(own) or own[0] % len(own) or own != list(range(own[0], own[0] + len(own))):
        raise UserError(
            f"mesh {dict(mesh.shape)}: a host has the list groups {own} of {groups}, not its share in a row"
        )
    return own[0] // len(own), groups // len(own)


def _own_groups(mesh: Mesh) -> list[int]:
    """The places along `LISTS`, flattened, of this host's devices."""
    devices: list[Any] = list(mesh.devices.flat)
    places = zip(np.ndindex(mesh.devices.shape), devices, strict=True)
    own = {place for place, device in places if device.process_index == jax.process_index()}
    return sorted({data * mesh.shape["fsdp"] + fsdp for data, fsdp, _, _ in own})


def spread_lists(batch: T, mesh: Mesh) -> T:
    """A host batch, or its shapes, placed on the mesh; every leaf has the entries on axis 0.

    On several hosts, `batch` holds this host's `list_part` of the lists in all shards, and the result all lists.
    """
    sharding = NamedSharding(mesh, BATCH)
    part, parts = list_part(mesh)

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        values = np.asarray(leaf)
        lists, size = (
            len(values) // mesh.shape["doc"],
            len(values) * parts // math.prod(mesh.shape[a] for a in BATCH[0]),
        )

        def read(index: Any) -> np.ndarray:
            shard, first = divmod(index[0].start or 0, lists * parts)
            start = (shard - part) * lists + first
            return values[start : start + size]

        return jax.make_array_from_callback((len(values) * parts, *values.shape[1:]), sharding, read)

    return jax.tree.map(place, batch)
