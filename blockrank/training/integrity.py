"""Checksums that are saved with a checkpoint and compared when it is read.

Neither Orbax nor TensorStore notices a byte of an array that changed on its way to the disk or on it. What is summed
here are values, not files, so a checkpoint written by one number of devices is checked on any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from blockrank.training.optimizer import path_name

SUMS_FILE = "SHA256SUMS"
"""In a folder of files, what `sha256sum --check` reads."""

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


class DamageError(Exception):
    """Something read is not what was written; the text names it."""


def checksums(tree: Any) -> dict[str, int]:
    """Path -> a 32-bit checksum of each array of a tree, whatever its sharding. Any one changed element changes it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_checksums([leaf for _, leaf in leaves]))
    return {path_name(path): int(value) for (path, _), value in zip(leaves, sums, strict=True)}


def check_sums(tree: Any, wanted: Mapping[str, int]) -> None:
    """Raises `DamageError` naming the arrays of `tree` whose checksum is not the one `wanted`."""
    changed = [name for name, value in checksums(tree).items() if wanted.get(name) != value]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise DamageError(f"{', '.join(changed[:3])}{more}: not the values that were saved")


@jax.jit
def _checksums(leaves: list[Array]) -> list[UInt32[Array, ""]]:
    return [_checksum(leaf) for leaf in leaves]


def _checksum(leaf: Array) -> UInt32[Array, ""]:
    """The sum of a hash of (index, bits) over all elements: integer sums do not depend on their order."""
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
    bits = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize]).astype(jnp.uint32)
    index, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    mixed = bits ^ (index * np.uint32(0x9E3779B1) + np.uint32(1))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # each step is one-to-one in 32 bits
        mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def seal(value: Mapping[str, Any]) -> dict[str, Any]:
    """JSON `value` with its digest beside it."""
    return {"sha256": _digest(value), "value": dict(value)}


def unseal(sealed: Any) -> dict[str, Any]:
    """What was sealed. Raises `DamageError` if it is not the same any more."""
    if not isinstance(sealed, dict) or sealed.get("sha256") != _digest(sealed.get("value")):
        raise DamageError("not the JSON that was saved")
    return sealed["value"]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_sums(folder: Path) -> None:
    """Writes the digests of all files of `folder` (not of folders in it) into `SHA256SUMS` there."""
    lines = [f"{_file_digest(file)}  {file.name}\n" for file in sorted(folder.iterdir()) if file.is_file()]
    (folder / SUMS_FILE).write_text("".join(lines), "utf-8")


def check_files(folder: Path) -> None:
    """Raises `DamageError` for a file listed in `SHA256SUMS` that is absent or another, or if that list is absent."""
    sums = folder / SUMS_FILE
    if not sums.is_file():
        raise DamageError(f"{sums.name} is missing")
    for line in sums.read_text("utf-8", "replace").splitlines():
        digest, _, name = line.partition("  ")
        file = folder / name
        if not name or not file.is_file():
            raise DamageError(f"{name or sums.name} is missing or unreadable")
        if _file_digest(file) != digest:
            raise DamageError(f"{name} is not the file that was saved")


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def reason_of(error: BaseException) -> str:
    """The first line of the error that began a chain of them, without TensorStore's specifications."""
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
    text = str(error).partition(" [tensorstore_spec=")[0].strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
