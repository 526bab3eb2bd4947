"""Secrets of four kinds that must reach a run or be refused, and must be in no file, log or archive: two of well-known variables, one of
`secrets:`, a password in the URL of a git remote, and one in a setting."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from pathlib import Path

from tests.command import TASK

SECRETS = {"WANDB_API_KEY": "planted-wandb", "HF_TOKEN": "hf_" + "planted" * 4, "MY_PASSWORD": "planted-own"}
NAMES = ["MY_PASSWORD"]
"""For `secrets:` in the target; the others are handed to every run."""
SHOWS = (
    "import hashlib, os; print('arrived', *(hashlib.sha256(os.environ[k].encode()).hexdigest()[:8] for k in KEYS), flush=True)\n        "
)
SETTING = "db_password=planted-setting"


def write_planted_project(text: str = TASK) -> None:
    """Writes a task that shows digests of the secrets it has, in a repository whose remote has a password."""
    shows = SHOWS.replace("KEYS", str(tuple(SECRETS)))
    Path("small.py").write_text(
        text.replace("return F.cross", f"{shows}return F.cross").replace("    epochs: int", '    db_password: str = ""\n    epochs: int')
    )
    for words in (["init", "-q"], ["remote", "add", "origin", "https://me:planted-git@example.org/x.git"]):
        subprocess.run(["git", *words], check=True)


def check_arrived(output: str) -> None:
    digests = [hashlib.sha256(value.encode()).hexdigest()[:8] for value in SECRETS.values()]
    assert f"arrived {' '.join(digests)}" in output


def check_in_no_file(*folders: Path) -> None:
    """Raises AssertionError if a secret is in a file or an archive below the folders."""
    for folder in folders:
        assert folder.is_dir()
        found = subprocess.run(
            ["grep", "-rlaE", "planted-?(wandb|own|git|setting|planted)", str(folder)], capture_output=True, text=True
        ).stdout
        assert [path for path in found.splitlines() if not path.endswith(".git/config")] == []
        for path in folder.rglob("*.tar.gz"):
            with tarfile.open(path) as archive:
                assert not any(b"planted" in archive.extractfile(entry).read() for entry in archive if entry.isfile())  # type: ignore[union-attr]
