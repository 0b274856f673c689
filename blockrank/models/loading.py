"""From any weights to a `Decoder` or an `Encoder`, and from a model to a flat dict of arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from blockrank.errors import UserError
from blockrank.models import gguf, hf, hf_encoder
from blockrank.models.config import DecoderConfig
from blockrank.models.decoder import Decoder
from blockrank.models.encoder import Encoder
from blockrank.models.layers import Quantized
from blockrank.parallel import parameter_spec

M = TypeVar("M", bound=nnx.Module)


def abstract_decoder(config: DecoderConfig, dtype: jnp.dtype = jnp.float32) -> Decoder:
    """A decoder of shapes only: nothing is allocated."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))


def random_decoder(config: DecoderConfig, seed: int, dtype: jnp.dtype = jnp.float32) -> Decoder:
    """A decoder with freshly drawn float32 parameters."""
    return Decoder(config, rngs=nnx.Rngs(seed), dtype=dtype)


def flat_parameters(model: nnx.Module) -> dict[str, jax.Array]:
    """Path (`blocks.attention.query.kernel`) -> array, in path order."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return dict(sorted((".".join(map(str, path)), leaf[...]) for path, leaf in flat))


def decoder_from(
    config: DecoderConfig,
    parameters: Mapping[str, np.ndarray | jax.Array],
    *,
    dtype: jnp.dtype = jnp.float32,
    param_dtype: jnp.dtype | None = None,
) -> Decoder:
    """A decoder with these parameters, each used exactly once.

    `dtype` is the type of activations, `param_dtype` that of parameters (as given if None). Raises `UserError` that
    lists missing, extra and wrongly shaped parameters.
    """
    described = f"a {config.family} decoder of {config.num_layers} layers"
    return with_parameters(abstract_decoder(config, dtype), parameters, described, param_dtype)


def with_parameters(
    model: M,
    parameters: Mapping[str, np.ndarray | jax.Array],
    described: str,
    param_dtype: jnp.dtype | None = None,
) -> M:
    """An abstract model filled with parameters, each used exactly once (`decoder_from`'s errors)."""
    expected = {path: leaf.shape for path, leaf in flat_abstract(model).items()}
    faults = [f"missing {path}" for path in expected if path not in parameters]
    faults += [f"unexpected {path}" for path in parameters if path not in expected]
    faults += [
        f"{path} has shape {tuple(parameters[path].shape)}, not {shape}"
        for path, shape in expected.items()
        if path in parameters and tuple(parameters[path].shape) != shape
    ]
    if faults:
        raise UserError(f"parameters do not fit {described}: {'; '.join(faults)}")
    leaves = [
        (tuple(path.split(".")), nnx.Param(jnp.asarray(array, param_dtype))) for path, array in parameters.items()
    ]
    nnx.update(model, nnx.from_flat_state(leaves))
    return model


def cast_parameters(model: M, dtype: jnp.dtype) -> M:
    """A model whose parameters are of `dtype`, but for quantised ones; those that are already are shared.

    Layers compute in the dtype of their input, so casting parameters to the model's `dtype` changes no result.
    """
    graph, state = nnx.split(model)

    def cast(leaf: nnx.Variable) -> nnx.Variable:
        return leaf if isinstance(leaf, Quantized) else leaf.replace(leaf.get_value().astype(dtype))

    return nnx.merge(graph, jax.tree.map(cast, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def check_heads(config: DecoderConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raises `UserError` for a mesh that cannot give each device whole kv heads."""
    if config.num_kv_heads % mesh.shape["tensor"]:
        raise UserError(f"{config.num_kv_heads} kv heads do not divide over tensor={mesh.shape['tensor']} devices")


def place_parameters(state: nnx.State, mesh: Mesh) -> nnx.State:
    """Parameters, or their shapes, placed on the mesh by the table in `blockrank.parallel`."""
    placed = []
    for path, leaf in nnx.to_flat_state(state):
        value = leaf.get_value()
        sharding = NamedSharding(mesh, parameter_spec(".".join(map(str, path)), value.shape, mesh))
        if isinstance(value, jax.ShapeDtypeStruct):
            value = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        else:
            value = jax.device_put(value, sharding)
        placed.append((path, leaf.replace(value)))
    return nnx.from_flat_state(placed)


def weights_fingerprint(model: nnx.Module) -> str:
    """A hash over 4096 values of every parameter, with paths, shapes and dtypes: other weights have another."""
    digest = hashlib.blake2b(digest_size=16)
    for path, array in flat_parameters(model).items():
        sample = np.asarray(array.reshape(-1)[:: max(1, array.size // 4096)])
        digest.update(f"{path} {array.shape} {array.dtype} ".encode() + sample.tobytes())
    return digest.hexdigest()


def flat_abstract(model: nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of each parameter of a real or abstract model."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {
        ".".join(map(str, path)): jax.ShapeDtypeStruct(leaf.get_value().shape, leaf.get_value().dtype)
        for path, leaf in sorted(flat, key=lambda item: item[0])
    }


def load_decoder(
    path: str | Path, *, dtype: jnp.dtype = jnp.float32, param_dtype: jnp.dtype | None = jnp.float32
) -> Decoder:
    """A decoder from a Hugging Face folder (safetensors) or a GGUF file. Weights must be finite."""
    path = Path(path)
    if path.suffix == ".gguf":
        config, parameters = gguf.read_config(path), gguf.read_parameters(path)
        hf.check_finite(parameters, str(path))
    else:
        config, parameters = hf.load(path, param_dtype)
    return decoder_from(config, parameters, dtype=dtype, param_dtype=param_dtype)


def load_encoder(
    folder: str | Path, *, dtype: jnp.dtype = jnp.float32, param_dtype: jnp.dtype | None = jnp.float32
) -> Encoder:
    """An encoder from a Hugging Face folder (BERT or DistilBERT in safetensors). Weights must be finite."""
    config, parameters = hf_encoder.load(folder, param_dtype)
    described = f"a {config.family} encoder of {config.num_layers} layers"
    model = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    return with_parameters(model, parameters, described, param_dtype)
