"""Finds, downloads and checks the files of data sets: digits (included), IDX files such as MNIST's, and CIFAR-10."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import torch

from drivetrain.data import Tensors
from drivetrain.names import check_folder
from drivetrain.outcomes import Outcome, Problem

SCHEMES = ("https",)
"""URL schemes that downloads may use."""
Split = Literal["train", "test"]
NUM_TRAIN_DIGITS = 1347
IDX_SOURCES: dict[str, tuple[str, dict[str, str]]] = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion-mnist": (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        {
            "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
}
"""data set -> (URL, {file: SHA-256 of the gzipped file as published})"""

CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR10_URL = f"https://www.cs.toronto.edu/~kriz/{CIFAR10_ARCHIVE}"
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_FILES: dict[Split, tuple[str, ...]] = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
CIFAR10_RECORD_BYTES = 1 + 3 * 32 * 32
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def digits(split: Split) -> Tensors:
    """Returns 1,797 handwritten digits, 8x8 in [0, 1]: 1,347 to train, 450 to test. Licence: vision/digits.md."""
    with resources.files("drivetrain.tasks.vision").joinpath("digits.npz").open("rb") as file:
        arrays = np.load(file)
        images, labels = arrays["images"], arrays["labels"]
    samples = slice(None, NUM_TRAIN_DIGITS) if split == "train" else slice(NUM_TRAIN_DIGITS, None)
    x = torch.from_numpy(images[samples]).float() / 16.0
    return Tensors(x, torch.from_numpy(labels[samples]).long())


def idx(name: str, split: Split, data_dir: str) -> Tensors:
    """Returns images [n, 1, height, width] as uint8 and labels of MNIST or Fashion-MNIST."""
    prefix, folder = "train" if split == "train" else "t10k", local_data(data_dir)
    images = read_idx(_locate(name, f"{prefix}-images-idx3-ubyte", folder), dimensions=3)
    labels = read_idx(_locate(name, f"{prefix}-labels-idx1-ubyte", folder), dimensions=1)
    if len(images) != len(labels):
        raise Problem(f"{name} in {data_dir}: {len(images)} {split} images but {len(labels)} labels")
    return Tensors(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long())


def local_data(data_dir: str) -> Path:
    """Returns the folder that a task's `data_dir` names."""
    return Path(check_folder(data_dir, "data_dir")).expanduser()


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Returns the array in an IDX file of unsigned bytes, gzipped or not; raises Problem for any other content."""

    def malformed(reason: str) -> Problem:
        return Problem(
            f"{path} is not an IDX file of {dimensions}-dimensional bytes ({reason}): put the original there, or delete it to fetch it again"
        )

    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, ValueError) as error:
            raise malformed(str(error)) from None
    if data[:4] != bytes([0, 0, 8, dimensions]):
        raise malformed(f"it begins with {data[:4].hex(' ')}")
    header = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, header, 4))
    expected = int(np.prod(shape, dtype=np.int64))
    if len(data) - header != expected:
        raise malformed(f"{len(data) - header:,} bytes of data where its header says {expected:,}")
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape).copy()


def _locate(name: str, file: str, folder: Path) -> Path:
    """Returns a file's path: under one of its usual names, or downloaded."""
    dotted_name = file.replace("-idx", ".idx")
    for parent in (folder, folder / name, folder / name / "raw"):
        for file_name in (file, dotted_name):
            for path in (parent / file_name, parent / f"{file_name}.gz"):
                if path.is_file():
                    return path
    url, checksums = IDX_SOURCES[name]
    target = folder / name / f"{file}.gz"
    files = ", ".join(f"{f}[.gz]" for f in checksums)
    advice = f"put {files} into {(folder / name).absolute()}, or say data_dir=FOLDER"
    fetch(f"{url}/{file}.gz", target, checksums[file], advice)
    return target


def cifar10(split: Split, data_dir: str) -> Tensors:
    """Returns images [n, 3, 32, 32] as uint8 and labels of CIFAR-10, from its binary version."""
    folder = _locate_cifar10(local_data(data_dir))
    records = np.concatenate([_read_cifar10(folder / name) for name in CIFAR10_FILES[split]])
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    return Tensors(torch.from_numpy(images), torch.from_numpy(records[:, 0].astype(np.int64)))


def _read_cifar10(path: Path) -> np.ndarray:
    """Returns records: each a label, then the red, the green and the blue pixels."""
    size, fix = path.stat().st_size, "put the original there, or delete it to have it unpacked again"
    if size == 0 or size % CIFAR10_RECORD_BYTES:
        raise Problem(f"{path} is no file of CIFAR-10: its {size:,} bytes are no whole records of {CIFAR10_RECORD_BYTES:,}; {fix}")
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, CIFAR10_RECORD_BYTES)
    if (highest := records[:, 0].max()) > 9:
        raise Problem(f"{path} is no file of CIFAR-10: it has a label {highest}, which should be at most 9; {fix}")
    return records


def _locate_cifar10(folder: Path) -> Path:
    """Returns the folder with all CIFAR-10 files; if they are missing, unpacks or downloads the archive."""
    parents = (folder, folder / "cifar10")
    files = [name for names in CIFAR10_FILES.values() for name in names]
    for unpacked in (folder, *(parent / CIFAR10_FOLDER for parent in parents), folder / "cifar10"):
        if all((unpacked / name).is_file() for name in files):
            return unpacked
    archive = next((parent / CIFAR10_ARCHIVE for parent in parents if (parent / CIFAR10_ARCHIVE).is_file()), None)
    advice = f"put {CIFAR10_ARCHIVE} (or its *.bin files) into {(folder / 'cifar10').absolute()}, or say data_dir=FOLDER"
    if archive is None:
        _refuse_pickles(parents, advice)
        archive = folder / "cifar10" / CIFAR10_ARCHIVE
        fetch(CIFAR10_URL, archive, CIFAR10_SHA256, advice)
    return _unpack(archive, files, archive.parent / CIFAR10_FOLDER)


def _refuse_pickles(folders: tuple[Path, ...], advice: str) -> None:
    for folder in folders:
        for name in ("cifar-10-python.tar.gz", "cifar-10-batches-py", "data_batch_1"):
            if (folder / name).exists():
                raise Problem(
                    f"{folder / name} is CIFAR-10's Python version: it is pickle, which can run code when read, and is refused;"
                    f" the binary version has the same images: {advice}"
                )


def _unpack(archive: Path, files: list[str], target: Path) -> Path:
    """Extracts files from an archive into a folder, in one process only. A file appears in the folder only when it is complete."""
    try:
        with open(archive.with_name(f".{archive.name}.lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if all((target / name).is_file() for name in files):
                return target
            with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpack-") as temporary, tarfile.open(archive) as tar:
                for member in tar:
                    name = PurePosixPath(member.name).name
                    if member.isfile() and name in files:
                        tar.extract(member.replace(name=name, deep=False), temporary, filter="data")
                missing = [name for name in files if not Path(temporary, name).is_file()]
                if missing:
                    raise Problem(f"{archive} lacks {', '.join(missing)}: put the original there, or delete it to fetch it again")
                target.mkdir(exist_ok=True)
                for name in files:
                    Path(temporary, name).replace(target / name)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Problem(f"{archive} is damaged ({error}): put the original there, or delete it to fetch it again") from None
    except OSError as error:
        raise Problem(
            f"{archive} could not be unpacked to {target} ({error.strerror or error}): unpack it yourself", Outcome.DATA
        ) from None
    return target


def fetch(url: str, target: Path, sha256: str, advice: str) -> None:
    """Downloads a file, in one process only: resumes an interrupted download, and checks the SHA-256."""
    if os.environ.get("DRIVETRAIN_OFFLINE", "0") not in ("", "0"):
        raise Problem(f"{target.name} is missing and DRIVETRAIN_OFFLINE=1 forbids downloads: {advice}")
    try:
        _check_scheme(url)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(f".{target.name}.lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not target.exists():
                _download(url, target, sha256)
    except urllib.error.URLError as error:
        raise Problem(f"{target.name} could not be fetched from {url} ({error.reason}): {advice}", Outcome.DATA) from None
    except OSError as error:
        raise Problem(f"{target.name} could not be fetched from {url} ({error.strerror or error}): {advice}", Outcome.DATA) from None


def _download(url: str, target: Path, sha256: str) -> None:
    part = target.with_name(f".{target.name}.part")
    part_bytes = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={part_bytes}-"} if part_bytes else {})
    with urllib.request.build_opener(_SecureRedirects).open(request, timeout=30) as reply:
        resumed = reply.status == 206
        total = int(reply.headers.get("Content-Length") or 0) + (part_bytes if resumed else 0)
        with open(part, "ab" if resumed else "wb") as file:
            last_shown = time.monotonic()
            while block := reply.read(1 << 18):
                file.write(block)
                if time.monotonic() - last_shown > 1:
                    last_shown = time.monotonic()
                    share = f" of {total / 1e6:.1f}" if total else ""
                    print(f"fetching {target.name}: {file.tell() / 1e6:.1f}{share} MB", file=sys.stderr, flush=True)
    if part.stat().st_size < total:
        raise urllib.error.URLError(
            f"the connection broke off after {part.stat().st_size:,} of {total:,} bytes; run the command again to continue"
        )
    with open(part, "rb") as file:
        actual_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if actual_sha256 != sha256:
        part.unlink()
        raise Problem(
            f"{url} is not the expected file (SHA-256 {actual_sha256}, expected {sha256}); the download was deleted", Outcome.DATA
        )
    part.replace(target)


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects only to encrypted addresses."""

    def redirect_request(self, request: Any, reply: Any, code: Any, message: Any, headers: Any, url: str) -> Any:
        _check_scheme(url)
        return super().redirect_request(request, reply, code, message, headers, url)


def _check_scheme(url: str) -> None:
    if urllib.parse.urlsplit(url).scheme not in SCHEMES:
        raise urllib.error.URLError(f"{url} is not encrypted: only https addresses are allowed")
