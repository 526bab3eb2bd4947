"""Caches of compiled code are in folders that only the user may write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from drivetrain.names import private_cache


@pytest.fixture
def shared_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the temporary folder, which all users share; the user has no cache folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_users_own_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert private_cache("kernels") == tmp_path / "cache" / "drivetrain" / "kernels" == private_cache("kernels")
    assert private_cache("kernels").stat().st_mode & 0o777 == 0o700


def test_in_a_shared_folder_only_a_private_folder_is_used(shared_tmp: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    usual_folder = shared_tmp / f"drivetrain-{os.geteuid()}"
    assert private_cache("kernels") == private_cache("kernels") == usual_folder / "kernels"
    usual_folder.chmod(0o777)  # other users could put their code there
    new_folder = private_cache("kernels")
    assert new_folder.parent == shared_tmp and new_folder != usual_folder / "kernels" and new_folder.stat().st_mode & 0o777 == 0o700
    assert private_cache("kernels") != new_folder, "nobody can predict its name"
    usual_folder.rename(shared_tmp / "away")
    usual_folder.symlink_to(tmp_path_factory.mktemp("elsewhere"))
    assert private_cache("kernels").parent == shared_tmp
