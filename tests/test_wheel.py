"""The built wheel, installed elsewhere, finds its configs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "configs").rglob("*.yaml"))

COMPOSE_ALL = """
import sys
from pathlib import Path
from blockrank import config
from blockrank.prompts.template import PromptTemplate

installed = Path(sys.argv[1])
assert Path(config.__file__).is_relative_to(installed), config.__file__
assert config.config_dir() == installed / "blockrank" / "configs", config.config_dir()
for command in sorted(path.stem for path in config.config_dir().glob("*.yaml")):
    config.compose(command)
    print("composed", command)
for experiment in sorted(path.stem for path in (config.config_dir() / "exp").glob("*.yaml")):
    config.compose("train", [f"+exp={experiment}"])
    print("composed train", experiment)
print("template", PromptTemplate.from_yaml("paper").name)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPOSITORY, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if name.endswith(".yaml")) == [f"blockrank/{name}" for name in CONFIGS]
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "blockrank").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"blockrank"}


def test_configs_compose_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", installed, wheel, cwd=elsewhere)
    output = run(sys.executable, "-c", COMPOSE_ALL, installed, cwd=elsewhere, PYTHONPATH=str(installed))
    assert "composed prepare" in output
    assert "composed train quickstart" in output
    assert output.endswith("template paper\n")
