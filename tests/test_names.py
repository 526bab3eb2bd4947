"""Folders that nobody else may write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from drivetrain.names import private_cache


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder that all users share, and a user without a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_users_own_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert private_cache("kernels") == tmp_path / "cache" / "drivetrain" / "kernels" == private_cache("kernels")
    assert private_cache("kernels").stat().st_mode & 0o777 == 0o700


def test_in_a_shared_folder_only_a_private_folder_is_used(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    usual = shared / f"drivetrain-{os.geteuid()}"
    assert private_cache("kernels") == private_cache("kernels") == usual / "kernels"
    usual.chmod(0o777)  # others could put their code there
    strange = private_cache("kernels")
    assert strange.parent == shared and strange != usual / "kernels" and strange.stat().st_mode & 0o777 == 0o700
    assert private_cache("kernels") != strange, "its name cannot be known beforehand"
    usual.rename(shared / "away")
    usual.symlink_to(tmp_path_factory.mktemp("elsewhere"))
    assert private_cache("kernels").parent == shared
