"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) on the linear layers of a decoder's blocks.

A kernel W [L, i, o] stays as it is. Beside it `a` [L, i, r] and `b` [L, r, o] learn a change:
x W + (alpha / r) x a b. `b` starts at 0, so that a model with new adapters is the base to the bit.

L layers, i inputs, o outputs, r rank.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from blockrank.errors import FieldError, UserError, above, at_least
from blockrank.models.config import DecoderConfig
from blockrank.models.decoder import Decoder
from blockrank.models.layers import Linear
from blockrank.models.loading import abstract_decoder, cast_parameters
from blockrank.models.products import product
from blockrank.models.quantize import dequantize_kernel, quantize_model
from blockrank.models.stack import stack_layers

M = TypeVar("M", bound=nnx.Module)

_ADAPTER = re.compile(r"(.*\.)?lora\.[ab]")


@dataclass(frozen=True)
class LoraSettings:
    """Adapters of `rank` on the linear layers whose kernel's path `targets` matches, scaled by `alpha / rank`.

    `targets` is a regular expression that a kernel's whole path must match; paths are like
    `blocks.attention.query.kernel` and `blocks.mlp.gate.kernel`. `base` is the type the frozen weights are kept in
    (`int8`: linear layers in eight bits by `blockrank.models.quantize`, the rest in bfloat16); adapters are float32.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str = r"blocks\.attention\.(query|key|value|out)\.kernel"
    base: Literal["float32", "bfloat16", "int8"] = "float32"

    def __post_init__(self) -> None:
        at_least(self, 1, "rank")
        above(self, 0, "alpha")
        try:
            re.compile(self.targets)
        except re.error as error:
            raise FieldError("targets", f"{self.targets!r} is no regular expression: {error}") from error

    @property
    def loaded_as(self) -> Literal["float32", "bfloat16"]:
        """The type in which the base is read, before it is quantised where it is to be."""
        return "bfloat16" if self.base == "int8" else self.base


class Adapter(nnx.Module):
    """`scale * x a b`, in the dtype of `x`. `a` is normal with variance 1 / i, `b` is 0."""

    def __init__(self, inputs: int, outputs: int, settings: LoraSettings, *, rngs: nnx.Rngs):
        std = inputs**-0.5
        self.a = nnx.Param(std * jax.random.normal(rngs.params(), (inputs, settings.rank), jnp.float32))
        self.b = nnx.Param(jnp.zeros((settings.rank, outputs), jnp.float32))
        self.scale = settings.alpha / settings.rank

    def __call__(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        return self.scale * product(product(x, self.a[...]), self.b[...])

    def product(self) -> Float[Array, "*L i o"]:
        """What it adds to the kernel, float32."""
        return self.scale * jnp.matmul(self.a[...], self.b[...], precision=jax.lax.Precision.HIGHEST)


def add_adapters(model: M, settings: LoraSettings, seed: int) -> M:
    """The model with fresh adapters beside the kernels that `settings.targets` names; the base's arrays are shared.

    Raises `UserError` when no kernel matches.
    """
    model = _copied(model)
    linears = dict(_linears(model))
    pattern = re.compile(settings.targets)
    targets = [path for path in linears if pattern.fullmatch(path)]
    if not targets:
        known = ", ".join(sorted(linears))
        raise UserError(f"optimizer.lora.targets={settings.targets!r} matches none of the linear kernels: {known}")
    for path in targets:
        layers, inputs, outputs = linears[path].kernel.get_value().shape
        rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode())))
        linears[path].lora = _stacked(layers, inputs, outputs, settings, rngs)
    return model


def merge_adapters(model: M, dtype: jax.typing.DTypeLike | None = None) -> M:
    """The plain model that computes the same: adapters added to their kernels in float32. Without any, `model`.

    `dtype` is that of the merged kernels; None takes the base's, float32 beside an int8 base, of which every kernel
    becomes plain.
    """
    adapted = [linear for _, linear in _linears(model) if linear.lora is not None]
    if not adapted:
        return model
    model = _copied(model)
    for _, linear in _linears(model):
        kernel, scale = linear.kernel.get_value(), linear.kernel_scale
        if scale is not None:
            kernel, linear.kernel_scale = dequantize_kernel(kernel, scale.get_value()), nnx.data(None)
        elif linear.lora is None:
            continue
        target = kernel.dtype if dtype is None else dtype
        if linear.lora is not None:
            kernel, linear.lora = kernel.astype(jnp.float32) + linear.lora.product(), nnx.data(None)
        linear.kernel = nnx.Param(kernel.astype(target))
    return model


def abstract_start(config: DecoderConfig, dtype: jnp.dtype, settings: LoraSettings | None) -> Decoder:
    """The model that training starts from, by shapes alone: float32 parameters, or a base with adapters."""
    if settings is None:
        return abstract_decoder(config, dtype)
    lora = settings

    def create() -> Decoder:
        base = cast_parameters(Decoder(config, rngs=nnx.Rngs(0), dtype=dtype), jnp.dtype(lora.loaded_as))
        return add_adapters(quantize_model(base) if lora.base == "int8" else base, lora, 0)

    return nnx.eval_shape(create)


def is_adapter(path: str) -> bool:
    """Whether a parameter's path (`blocks.attention.query.lora.a`) is that of an adapter."""
    return _ADAPTER.fullmatch(path) is not None


def _copied(model: M) -> M:
    """Another module of the same arrays."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))


def _linears(model: Any) -> Iterator[tuple[str, Linear]]:
    """Path of the kernel and module of each linear layer in the blocks."""
    for path, module in nnx.iter_modules(model.blocks):
        if isinstance(module, Linear):
            yield ".".join(("blocks", *map(str, path), "kernel")), module


def _stacked(layers: int, inputs: int, outputs: int, settings: LoraSettings, rngs: nnx.Rngs) -> Adapter:
    return stack_layers(lambda rngs: Adapter(inputs, outputs, settings, rngs=rngs), layers, rngs=rngs)
