"""A module imports only from modules above it, so that the tree reads as the pipeline it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "blockrank"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("paths",),
    ("types", "config", "chips"),
    ("data",),
    ("prompts",),
    ("packing",),
    ("layout", "parallel", "hosts"),
    ("attention",),
    ("models",),
    ("retrieval",),
    ("rankers",),
    ("losses",),
    ("training",),
    ("sources",),
    ("evaluation",),
    ("analysis", "costs"),
    ("serving",),
    ("api",),
    ("benchmark",),
    ("prepare", "train", "eval", "rerank", "serve", "bench", "aot", "analyze", "store", "stress"),
)
"""From what everything may import to what nothing may import. Names of one layer do not import each other."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def sources() -> dict[str, Path]:
    """Dotted module name below `blockrank` -> file; a package goes by its own name."""
    files = {path.relative_to(PACKAGE).with_suffix(""): path for path in sorted(PACKAGE.rglob("*.py"))}
    names = {".".join(name.parts[:-1] if name.name == "__init__" else name.parts): path for name, path in files.items()}
    return {name: path for name, path in names.items() if name}


MODULES = sources()


def imports(name: str, *, at_import_time: bool = False) -> Iterator[tuple[str, int]]:
    """(module of this package, line) of each import in `name`, those inside functions too unless `at_import_time`."""
    pending: list[ast.AST] = [ast.parse(MODULES[name].read_text("utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom):
            yield from ((target, node.lineno) for target in _targets(name, node))
        elif isinstance(node, ast.Import):
            dotted = (alias.name for alias in node.names)
            yield from ((n.removeprefix("blockrank."), node.lineno) for n in dotted if n.startswith("blockrank."))
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_for_type_checkers(node)
        if not (at_import_time and deferred):
            pending.extend(ast.iter_child_nodes(node))


def _targets(name: str, node: ast.ImportFrom) -> list[str]:
    if node.level:
        own = name.split(".")
        package = own if MODULES[name].name == "__init__.py" else own[:-1]
        base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
    elif node.module and node.module.split(".")[0] == "blockrank":
        base = node.module.split(".")[1:]
    else:
        return []
    inside = [".".join([*base, alias.name]) for alias in node.names]
    return [target if target in MODULES else ".".join(base) for target in inside]


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def layer(name: str) -> str:
    return name.split(".")[0]


def test_the_order_is_that_of_the_pipeline() -> None:
    named = (
        "data",
        "prompts",
        "layout",
        "attention",
        "models",
        "retrieval",
        "rankers",
        "training",
        "evaluation",
        "api",
    )
    assert all(LEVEL[before] < LEVEL[after] for before, after in pairwise(named))


def test_every_module_has_a_layer() -> None:
    unknown = sorted({layer(name) for name in MODULES} - LEVEL.keys())
    assert not unknown, f"say in LAYERS where these belong: {unknown}"


@pytest.mark.parametrize("name", sorted({layer(name) for name in MODULES}))
def test_imports_go_up(name: str) -> None:
    wrong = [
        f"blockrank/{MODULES[module].relative_to(PACKAGE)}:{line} imports blockrank.{target}"
        for module in MODULES
        if layer(module) == name
        for target, line in imports(module)
        if layer(target) != name and LEVEL[layer(target)] >= LEVEL[name]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name: {target for target, _ in imports(name, at_import_time=True)} & MODULES.keys() for name in MODULES}
    while graph:
        leaves = {name for name, targets in graph.items() if not targets}
        assert leaves, f"circular imports among {sorted(graph)}"
        graph = {name: targets - leaves for name, targets in graph.items() if name not in leaves}


def foreign(name: str) -> set[str]:
    """Top-level names of everything else that `name` imports."""
    nodes = list(ast.walk(ast.parse(MODULES[name].read_text("utf-8"))))
    dotted = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    dotted += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.split(".")[0] for name in dotted}


def test_imports_are_read() -> None:
    assert {"layout", "attention.dispatch", "models.stack"} <= {target for target, _ in imports("models.decoder")}
    assert ("data.pydocs" in dict(imports("data.collection"))) > (
        "data.pydocs" in dict(imports("data.collection", at_import_time=True))
    )
    assert {"jax", "flax"} <= foreign("models.decoder")


def test_text_needs_no_jax() -> None:
    early = [module for module in MODULES if LEVEL[layer(module)] <= LEVEL["prompts"]]
    early += ["retrieval.bm25", "retrieval.first_stage", "retrieval.lists", "retrieval.settings", "retrieval.write"]
    assert {module: found for module in early if (found := foreign(module) & {"jax", "flax", "optax"})} == {}


def test_the_package_needs_no_torch() -> None:
    assert {module: found for module in MODULES if (found := foreign(module) & {"torch", "transformers"})} == {}
