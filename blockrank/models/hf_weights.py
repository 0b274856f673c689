"""Tables of parameters, and reading them from safetensors: each tensor exactly once, stacked over layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import Progress

from blockrank.errors import UserError
from blockrank.models.hf_files import readers_of, some

_DTYPES: Final[Mapping[str, np.dtype]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Weight:
    """One parameter of a model and where Hugging Face keeps it.

    `tensor` holds `{layer}` when the parameter is stacked over layers; `shape` is ours without that axis; `transposed`
    says that the tensor's axes are the other way round (torch's Linear is [out, in]).
    """

    path: str
    tensor: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.tensor

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape

    def tensors(self, num_layers: int) -> Iterator[tuple[str, int | None]]:
        """Each tensor's name with its layer (None when not stacked)."""
        if not self.stacked:
            yield self.tensor, None
            return
        for layer in range(num_layers):
            yield self.tensor.format(layer=layer), layer

    def full_shape(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers, *self.shape) if self.stacked else self.shape


def check_finite(params: Mapping[str, Any], source: str = "model") -> None:
    """Raises `UserError` naming the first parameter (and layer, when stacked) that holds NaN or infinity."""
    for path, value in params.items():
        array = np.asarray(value)
        for layer, part in enumerate(array) if path.startswith("blocks.") else ((None, array),):
            _check_finite(part, f"{path}" if layer is None else f"{path} of layer {layer}", source)


def _check_finite(array: np.ndarray, name: str, source: str) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        bad = int(finite.size - finite.sum())
        raise UserError(f"{source}: {name} holds {bad} NaN or infinite values of {finite.size}; get sound weights")


def read_weights(
    folder: Path,
    files: Mapping[str, Path],
    table: tuple[Weight, ...],
    num_layers: int,
    dtype: str | np.dtype | type | None = "float32",
    *,
    finite: bool = True,
) -> dict[str, np.ndarray]:
    """All parameters of `table` from the tensors in `files` (name -> file), as arrays of `dtype` (None: as stored).

    Each tensor is read once, one at a time and straight into its stacked array; files are mapped one at a time, so the
    peak is the parameters plus the pages of one file, which the system may drop. `finite=False` skips the search for
    NaN and infinity. Raises `UserError` for missing, extra, misshapen, quantised or non-finite tensors.
    """
    slots = {name: (weight, layer) for weight in table for name, layer in weight.tensors(num_layers)}
    missing, extra = [name for name in slots if name not in files], [name for name in files if name not in slots]
    if missing or extra:
        told = [
            f"{len(names)} {kind}: {some(names)}" for kind, names in (("missing", missing), ("extra", extra)) if names
        ]
        raise UserError(f"{folder}: the tensors are not those of its config.json: {'; '.join(told)}")
    stored = _stored_dtypes(table, files, num_layers)
    target = {path: kept if dtype is None else float_dtype(dtype) for path, kept in stored.items()}
    params = {w.path: np.empty(w.full_shape(num_layers), target[w.path]) for w in table}
    with progress_bar(sum(array.nbytes for array in params.values())) as progress:
        task = progress.add_task(f"reading {folder.name}", total=len(slots))
        for file in sorted(set(files.values())):
            with readers_of({file}) as readers:
                for name in (name for name in slots if files[name] == file):
                    weight, layer = slots[name]
                    out = params[weight.path] if layer is None else params[weight.path][layer]
                    _read_tensor(readers[file].get_tensor(name), out, weight.transposed, name, file, finite)
                    progress.advance(task)
    return params


def _read_tensor(tensor: np.ndarray, out: np.ndarray, transposed: bool, name: str, file: Path, finite: bool) -> None:
    if finite:
        _check_finite(tensor, name, str(file))
    with np.errstate(over="ignore"):
        out[...] = tensor.T if transposed else tensor
    if finite and out.dtype.itemsize < tensor.dtype.itemsize and not np.isfinite(out).all():
        raise UserError(f"{file}: {name} does not fit into {out.dtype.name}; choose a wider dtype")


def float_dtype(dtype: str | np.dtype | type) -> np.dtype:
    """A dtype that weights may have; anything else is a `UserError`."""
    found = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if found not in _DTYPES.values():
        raise UserError(f"dtype {found.name} cannot hold weights; use float32, bfloat16, float16 or float64")
    return found


def _stored_dtypes(table: tuple[Weight, ...], files: Mapping[str, Path], num_layers: int) -> dict[str, np.dtype]:
    """Each parameter's dtype in the files (the widest of its layers); shapes and kinds are checked on the way."""
    stored: dict[str, np.dtype] = {}
    with readers_of(set(files.values())) as readers:
        for weight in table:
            for name, _ in weight.tensors(num_layers):
                view = readers[files[name]].get_slice(name)
                shape, kind = list(view.get_shape()), view.get_dtype()
                if shape != (expected := list(weight.tensor_shape)):
                    raise UserError(f"{files[name]}: {name} has shape {shape}, but config.json asks for {expected}")
                if kind not in _DTYPES:
                    raise UserError(f"{files[name]}: {name} is {kind}; only float weights are read, not quantised ones")
                known = stored.get(weight.path, _DTYPES[kind])
                stored[weight.path] = np.promote_types(known, _DTYPES[kind])
            stored.setdefault(weight.path, np.dtype(np.float32))
    return stored


def progress_bar(num_bytes: int) -> Progress:
    """A progress bar on stderr, shown only for models large enough to wait for."""
    return Progress(console=Console(stderr=True), transient=True, disable=num_bytes < 1 << 30)
