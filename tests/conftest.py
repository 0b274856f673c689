"""Fixtures every test may use."""

from __future__ import annotations

import os
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
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, the one that the test's collections use."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BLOCKRANK_CACHE", str(folder))
    return folder
