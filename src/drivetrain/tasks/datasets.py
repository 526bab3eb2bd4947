"""Data sets: digits (embedded), IDX files such as MNIST's, and CIFAR-10; found, fetched and checked."""

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

SCHEMES = ("https",)  # of addresses that may be fetched
Split = Literal["train", "test"]
DIGITS_TRAIN = 1347

# data set -> (address, {file: SHA-256 of the gzipped file as published})
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

CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR10_ADDRESS = f"https://www.cs.toronto.edu/~kriz/{CIFAR10_ARCHIVE}"
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_FILES: dict[Split, tuple[str, ...]] = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
CIFAR10_RECORD = 1 + 3 * 32 * 32
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def digits(split: Split) -> Tensors:
    """1,797 handwritten digits, 8x8 in [0, 1]: 1,347 to train, 450 to test. Licence: digits.md beside the file."""
    with resources.files("drivetrain.tasks.vision").joinpath("digits.npz").open("rb") as file:
        arrays = np.load(file)
        images, labels = arrays["images"], arrays["labels"]
    part = slice(None, DIGITS_TRAIN) if split == "train" else slice(DIGITS_TRAIN, None)
    x = torch.from_numpy(images[part]).float() / 16.0
    return Tensors(x, torch.from_numpy(labels[part]).long())


def idx(name: str, split: Split, data_dir: str) -> Tensors:
    """Images [n, 1, height, width] as uint8 and labels of MNIST or Fashion-MNIST."""
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
    """An IDX file of unsigned bytes, gzipped or not; refused where its content is not what its name says."""

    def wrong(why: str) -> Problem:
        return Problem(
            f"{path} is no IDX file of {dimensions}-dimensional bytes ({why}): put the original there, or delete it to fetch it again"
        )

    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, ValueError) as error:
            raise wrong(str(error)) from None
    if data[:4] != bytes([0, 0, 8, dimensions]):
        raise wrong(f"it begins with {data[:4].hex(' ')}")
    header = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, header, 4))
    expected = int(np.prod(shape, dtype=np.int64))
    if len(data) - header != expected:
        raise wrong(f"{len(data) - header:,} bytes of data where its header says {expected:,}")
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape).copy()


def _locate(name: str, file: str, folder: Path) -> Path:
    """The file under any of its usual names, else downloaded."""
    dotted = file.replace("-idx", ".idx")
    for place in (folder, folder / name, folder / name / "raw"):
        for spelling in (file, dotted):
            for path in (place / spelling, place / f"{spelling}.gz"):
                if path.is_file():
                    return path
    address, checksums = IDX_SOURCES[name]
    target = folder / name / f"{file}.gz"
    wanted = ", ".join(f"{f}[.gz]" for f in checksums)
    advice = f"put {wanted} into {(folder / name).absolute()}, or say data_dir=FOLDER"
    fetch(f"{address}/{file}.gz", target, checksums[file], advice)
    return target


def cifar10(split: Split, data_dir: str) -> Tensors:
    """Images [n, 3, 32, 32] as uint8 and labels of CIFAR-10, from its binary version."""
    folder = _locate_cifar10(local_data(data_dir))
    records = np.concatenate([_read_cifar10(folder / name) for name in CIFAR10_FILES[split]])
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    return Tensors(torch.from_numpy(images), torch.from_numpy(records[:, 0].astype(np.int64)))


def _read_cifar10(path: Path) -> np.ndarray:
    """Records of a label and the red, green and blue plane."""
    size, fix = path.stat().st_size, "put the original there, or delete it to have it unpacked again"
    if size == 0 or size % CIFAR10_RECORD:
        raise Problem(f"{path} is no file of CIFAR-10: its {size:,} bytes are no whole records of {CIFAR10_RECORD:,}; {fix}")
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, CIFAR10_RECORD)
    if (highest := records[:, 0].max()) > 9:
        raise Problem(f"{path} is no file of CIFAR-10: it has a label {highest}, which should be at most 9; {fix}")
    return records


def _locate_cifar10(folder: Path) -> Path:
    """The folder with all of its files, unpacked or even fetched if need be."""
    homes = (folder, folder / "cifar10")
    wanted = [name for names in CIFAR10_FILES.values() for name in names]
    for place in (folder, *(h / CIFAR10_FOLDER for h in homes), folder / "cifar10"):
        if all((place / name).is_file() for name in wanted):
            return place
    archive = next((h / CIFAR10_ARCHIVE for h in homes if (h / CIFAR10_ARCHIVE).is_file()), None)
    bring = f"put {CIFAR10_ARCHIVE} (or its *.bin files) into {(folder / 'cifar10').absolute()}, or say data_dir=FOLDER"
    if archive is None:
        for home in homes:
            for pickled in ("cifar-10-python.tar.gz", "cifar-10-batches-py", "data_batch_1"):
                if (home / pickled).exists():
                    raise Problem(
                        f"{home / pickled} is CIFAR-10's Python version: it is pickle, which can run code when read, and is refused;"
                        f" the binary version has the same images: {bring}"
                    )
        archive = folder / "cifar10" / CIFAR10_ARCHIVE
        fetch(CIFAR10_ADDRESS, archive, CIFAR10_SHA256, bring)
    return _unpack(archive, wanted, archive.parent / CIFAR10_FOLDER)


def _unpack(archive: Path, wanted: list[str], target: Path) -> Path:
    """Take the wanted files out of an archive, once for all processes; a file is there whole or not at all."""
    try:
        with open(archive.with_name(f".{archive.name}.lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if all((target / name).is_file() for name in wanted):
                return target
            with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpack-") as temporary, tarfile.open(archive) as tar:
                for member in tar:
                    name = PurePosixPath(member.name).name
                    if member.isfile() and name in wanted:
                        tar.extract(member.replace(name=name, deep=False), temporary, filter="data")
                missing = [name for name in wanted if not Path(temporary, name).is_file()]
                if missing:
                    raise Problem(f"{archive} lacks {', '.join(missing)}: put the original there, or delete it to fetch it again")
                target.mkdir(exist_ok=True)
                for name in wanted:
                    Path(temporary, name).replace(target / name)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Problem(f"{archive} is damaged ({error}): put the original there, or delete it to fetch it again") from None
    except OSError as error:
        raise Problem(
            f"{archive} could not be unpacked to {target} ({error.strerror or error}): unpack it yourself", Outcome.DATA
        ) from None
    return target


def fetch(address: str, target: Path, sha256: str, advice: str) -> None:
    """Download once, whoever asks: locked between processes, resumed where it broke off, checked by its SHA-256."""
    if os.environ.get("DRIVETRAIN_OFFLINE", "0") not in ("", "0"):
        raise Problem(f"{target.name} is missing and DRIVETRAIN_OFFLINE=1 forbids to fetch it: {advice}")
    try:
        _check_scheme(address)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(f".{target.name}.lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not target.exists():
                _download(address, target, sha256)
    except urllib.error.URLError as error:
        raise Problem(f"{target.name} could not be fetched from {address} ({error.reason}): {advice}", Outcome.DATA) from None
    except OSError as error:
        raise Problem(f"{target.name} could not be fetched from {address} ({error.strerror or error}): {advice}", Outcome.DATA) from None


def _download(address: str, target: Path, sha256: str) -> None:
    part = target.with_name(f".{target.name}.part")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.build_opener(_SecureRedirects).open(request, timeout=30) as reply:
        resumed = reply.status == 206
        total = int(reply.headers.get("Content-Length") or 0) + (have if resumed else 0)
        with open(part, "ab" if resumed else "wb") as file:
            shown = time.monotonic()
            while block := reply.read(1 << 18):
                file.write(block)
                if time.monotonic() - shown > 1:
                    shown = time.monotonic()
                    share = f" of {total / 1e6:.1f}" if total else ""
                    print(f"fetching {target.name}: {file.tell() / 1e6:.1f}{share} MB", file=sys.stderr, flush=True)
    if part.stat().st_size < total:
        raise urllib.error.URLError(
            f"the connection broke off after {part.stat().st_size:,} of {total:,} bytes; a repetition goes on there"
        )
    with open(part, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        part.unlink()
        raise Problem(
            f"{address} gave another file than the known one (SHA-256 {found}, expected {sha256}); nothing was kept", Outcome.DATA
        )
    part.replace(target)


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Follows a server's redirection only to another encrypted address."""

    def redirect_request(self, request: Any, reply: Any, code: Any, message: Any, headers: Any, address: str) -> Any:
        _check_scheme(address)
        return super().redirect_request(request, reply, code, message, headers, address)


def _check_scheme(address: str) -> None:
    if urllib.parse.urlsplit(address).scheme not in SCHEMES:
        raise urllib.error.URLError(f"{address} is not encrypted: only https addresses are fetched")
