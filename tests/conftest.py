"""Fixtures every test may use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # libtpu, there to compile for TPUs, would look for one and say so

settings.register_profile("no_deadline", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("no_deadline")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real collections for development (`BLOCKRANK_DATA`, or `../shared/data`); they skip without it."""
    folder = Path(os.environ.get("BLOCKRANK_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no development collections at {folder} (set BLOCKRANK_DATA)")
    return folder


@pytest.fixture(scope="session")
def shared_parity() -> Path:
    """Numbers of the released PyTorch code (`BLOCKRANK_PARITY`, or `../shared/parity`)."""
    folder = Path(os.environ.get("BLOCKRANK_PARITY", REPOSITORY.parent / "shared" / "parity"))
    if not folder.is_dir():
        pytest.skip(f"no parity files at {folder} (set BLOCKRANK_PARITY)")
    return folder


@pytest.fixture
def run_on_eight_devices() -> Callable[..., None]:
    """Runs a file of tests, with more options of pytest, in a process with eight CPU devices."""

    def run(file: str, *options: str) -> None:
        flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file, *options],
            cwd=Path(__file__).parent,
            env={**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}", "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert "passed" in done.stdout
        if "skipped" in done.stdout:
            pytest.skip(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, the one that the test's collections use."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BLOCKRANK_CACHE", str(folder))
    return folder
