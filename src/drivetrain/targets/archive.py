"""Archives of code. Their name is the digest of their content, so that a machine needs each only once."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from drivetrain.settings import PACKAGE

NOT_NEEDED = ("page", "__pycache__")  # folders of this package that no training needs


@dataclass(frozen=True)
class Archive:
    """A gzipped tar file in memory."""

    data: bytes

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def unpack(self, folder: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(self.data), mode="r:gz") as archive:
            archive.extractall(folder, filter="data")


def make_archive(files: Mapping[str, bytes]) -> Archive:
    """Returns the archive of files, path -> content. The same files give the same bytes."""
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb", mtime=0) as compressed, tarfile.open(fileobj=compressed, mode="w") as archive:
        for path in sorted(files):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(files[path]), 0o644
            archive.addfile(entry, io.BytesIO(files[path]))
    return Archive(stream.getvalue())


def package_files() -> dict[str, bytes]:
    """Returns the files of drivetrain itself, path -> content."""
    files = {}
    for path in PACKAGE.rglob("*"):
        parts = path.relative_to(PACKAGE).parts
        if path.is_file() and not any(part in NOT_NEEDED for part in parts):
            files[f"{PACKAGE.name}/{'/'.join(parts)}"] = path.read_bytes()
    return files


@cache
def package_archive() -> Archive:
    """Returns the archive of drivetrain itself: the machine runs the version that submits."""
    return make_archive(package_files())
