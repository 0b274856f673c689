"""Trees of arrays as nested dicts of names, and whether two have the same leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from blockrank.errors import UserError
from blockrank.training.optimizer import path_name


def to_nested(tree: Any) -> dict[str, Any]:
    """Any pytree (named tuples, masked nodes) as nested dicts of its leaves, the same for every optax version."""
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, last = [path_name((key,)) for key in path] or ["value"]
        inner = nested
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return nested


def from_nested(nested: Mapping[str, Any], like: Any) -> Any:
    """The inverse of `to_nested`, in the structure of `like`."""
    leaves = []
    for path, _ in jax.tree_util.tree_leaves_with_path(like):
        inner: Any = nested
        for name in [path_name((key,)) for key in path] or ["value"]:
            inner = inner[name]
        leaves.append(inner)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def compare_trees(saved: Any, wanted: Any, source: str) -> None:
    """Raises `UserError` unless both trees have the same paths, shapes and dtypes; lists what is missing or differs."""

    def describe(tree: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {path_name(path): f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}" for path, leaf in leaves}

    have, want = describe(saved), describe(wanted)
    problems = (
        [f"missing {name} {want[name]}" for name in want if name not in have],
        [f"extra {name} {have[name]}" for name in have if name not in want],
        [f"{n} is {have[n]}, wanted {want[n]}" for n in want if n in have and have[n] != want[n]],
    )
    if any(problems):
        shown = [kind[:4] + ([f"and {len(kind) - 4} more"] if len(kind) > 4 else []) for kind in problems]
        text = "; ".join(part for kind in shown for part in kind)
        raise UserError(f"checkpoint {source} does not fit the model or optimiser: {text}")
