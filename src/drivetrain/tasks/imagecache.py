"""A cache of decoded images: memory-mapped arrays on disk that every rank and every later run reads."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.lib import format as npy

from drivetrain.data import Tensors
from drivetrain.outcomes import Outcome, Problem
from drivetrain.tasks.datasets import local_data
from drivetrain.tasks.images import Colour, ImageFile, Listing, decode, first_names, list_images, why_unreadable

FORMAT = 1
CACHE_FOLDER = ".drivetrain-cache"
CHUNK_BYTES = 1 << 24
"""Bytes of a large file to read at a time."""


@dataclass(frozen=True)
class Images:
    """A data set of decoded images: bytes [n, channels, size, size], and labels."""

    train: Tensors
    test: Tensors | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    """Mean of each channel of the training images, for pixels of 0 to 1."""
    std: tuple[float, ...]
    """Standard deviation of each channel."""


def load(data_dir: str, size: int, colour: Colour, bad_samples: Literal["stop", "skip"]) -> Images:
    """Returns the images of `data_dir/train` and `data_dir/test` from the cache; decodes them into it if needed."""
    listing = list_images(local_data(data_dir))
    cached = _from_cache(listing, _cache_key(listing, size, colour), size, colour, bad_samples)
    facts = cached.facts
    _check(listing, cached, bad_samples)
    for text in _notices(listing, facts):
        _print_notice(text)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # no code writes to it
        splits = {split: Tensors(torch.from_numpy(cached.images[split]), torch.from_numpy(cached.labels[split])) for split in cached.images}
    return Images(splits["train"], splits.get("test"), listing.classes, tuple(facts["mean"]), tuple(facts["std"]))


@dataclass(frozen=True)
class _Cached:
    """The content of a cache folder. `images` and `labels` have one array for each split."""

    images: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    facts: dict[str, Any]
    """The content of facts.json: format, classes, bad files, mean, std, and the bytes of each file."""


def _check(listing: Listing, cached: _Cached, bad_samples: str) -> None:
    """Raises Problem for bad files if they stop the run, and for classes and splits without a readable file."""
    bad = cached.facts["bad"]
    if bad and bad_samples == "stop":
        raise _bad_sample(listing.folder / bad[0][0], bad[0][1])
    labels = set(np.unique(cached.labels["train"]).tolist())
    empty = [listing.folder / "train" / name for label, name in enumerate(listing.classes) if label not in labels]
    empty += [listing.folder / split for split, labels_of_split in cached.labels.items() if not len(labels_of_split)]
    if empty:
        raise Problem(f"none of the images in {empty[0]} could be read: replace them, or remove the folder", Outcome.DATA)


def _notices(listing: Listing, facts: dict[str, Any]) -> Iterator[str]:
    if bad := facts["bad"]:
        names = first_names([f"{path} ({reason})" for path, reason in bad])
        yield f"{len(bad):,} {'image' if len(bad) == 1 else 'images'} could not be read and are left out: {names}"
    if "test" not in listing.splits:
        yield f"there is no {listing.folder / 'test'}: nothing is evaluated"
    elif missing := listing.empty_classes("test"):
        yield f"{listing.folder / 'test'} has no images of {first_names(missing)}"


def _bad_sample(path: Path, reason: str) -> Problem:
    return Problem(f"{path} cannot be read ({reason}): repair or remove it, or leave such files out with bad_samples=skip", Outcome.DATA)


def _print_notice(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note    {text}", file=sys.stderr, flush=True)


# --- the cache ---------------------------------------------------------------------------------


def _cache_key(listing: Listing, size: int, colour: str) -> str:
    """Returns the name of a cache folder: the settings, and a hash of every file's path, size and modification time."""
    digest = hashlib.sha256(f"{FORMAT} {size} {colour}\0".encode())
    for files in listing.splits.values():
        for file in files:
            digest.update(os.fsencode(file.path) + f"\0{file.size} {file.mtime_ns}\0".encode())
    return f"{size}-{colour}-{digest.hexdigest()[:24]}"


def _cache_parents(folder: Path) -> list[Path]:
    """Returns the folders where a cache may be: in the images' folder or, if that is not writable, in the user's cache folder."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    user_caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [folder / CACHE_FOLDER, *([user_caches / "drivetrain" / "images" / name] if user_caches.is_absolute() else [])]


def _from_cache(listing: Listing, key: str, size: int, colour: Colour, bad_samples: str) -> _Cached:
    """Returns the decoded images of a listing, from a cache; if none can be written, in memory."""
    parents = _cache_parents(listing.folder)
    for parent in parents:
        if cached := _open(parent / key, listing):
            return cached
    failures = []
    for parent in parents:
        try:
            with _lock(parent, key):
                return _open(parent / key, listing) or _publish(parent, key, listing, size, colour, bad_samples)
        except OSError as error:
            failures.append(f"{parent}: {error.strerror or error}")
    _print_notice(f"the decoded images could not be kept on disk, so each process decodes them for itself ({'; '.join(failures)})")
    files: dict[str, BinaryIO] = {split: io.BytesIO() for split in listing.splits}
    labels, facts = _decode_all(files, listing, size, colour, bad_samples)
    images = {split: _read_array(file) for split, file in files.items()}
    return _Cached(images, labels, facts | _statistics(images["train"]))


@contextmanager
def _lock(parent: Path, key: str) -> Iterator[None]:
    """Locks a folder's caches with the same settings for one process."""
    parent.mkdir(parents=True, exist_ok=True)
    with open(parent / f".{key.rpartition('-')[0]}.lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _open(folder: Path, listing: Listing) -> _Cached | None:
    """Returns the content of a cache folder; None if it is missing or invalid."""
    try:
        facts = json.loads((folder / "facts.json").read_text())
        for name, length in facts["bytes"].items():
            if (folder / name).stat().st_size != length:
                return None
        images = {s: np.load(folder / f"{s}-images.npy", mmap_mode="r", allow_pickle=False) for s in listing.splits}
        labels = {s: np.load(folder / f"{s}-labels.npy", allow_pickle=False) for s in listing.splits}
        is_valid = all(len(images[s]) == len(labels[s]) and images[s].dtype == np.uint8 for s in images)
        is_valid = is_valid and all(((part >= 0) & (part < len(listing.classes))).all() for part in labels.values())
        is_valid = is_valid and len(facts["mean"]) == len(facts["std"]) == images["train"].shape[1] and isinstance(facts["bad"], list)
        return _Cached(images, labels, facts) if is_valid else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _publish(parent: Path, key: str, listing: Listing, size: int, colour: Colour, bad_samples: str) -> _Cached:
    """Decodes into a temporary folder, renames it, and removes outdated caches of the same settings."""
    temporary = parent / f"{key}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write(temporary, listing, size, colour, bad_samples)
        if (parent / key).exists():
            shutil.rmtree(parent / key)  # it is damaged
        temporary.rename(parent / key)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in parent.glob(f"{key.rpartition('-')[0]}-*"):
        if old.name != key:
            shutil.rmtree(old, ignore_errors=True)  # a process that still reads it keeps its mapped files
    cached = _open(parent / key, listing)
    if cached is None:
        raise OSError("the written files cannot be read back")
    return cached


def _write(folder: Path, listing: Listing, size: int, colour: Colour, bad_samples: str) -> None:
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for split, image_files in listing.splits.items():
            files[split] = stack.enter_context(open(folder / f"{split}-images.npy", "w+b"))
            _reserve(files[split], len(_header(0, 3, size)) + len(image_files) * size * size * (1 if colour == "grey" else 3))
        labels, facts = _decode_all(files, listing, size, colour, bad_samples)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    for split, part in labels.items():
        np.save(folder / f"{split}-labels.npy", part, allow_pickle=False)
    facts |= _statistics(np.load(folder / "train-images.npy", mmap_mode="r", allow_pickle=False))
    facts["bytes"] = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


def _reserve(file: BinaryIO, length: int) -> None:
    """Allocates the file's space now, so that a full disk is noticed before decoding."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # with these, the file system cannot allocate ahead
            raise


# --- decoding ----------------------------------------------------------------------------------


def _decode_all(
    files: dict[str, BinaryIO], listing: Listing, size: int, colour: Colour, bad_samples: str
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Writes all images as .npy files, in the listing's order without the bad ones; returns the labels and the facts."""
    channels, has_colour = (1 if colour == "grey" else 3), False
    labels: dict[str, list[int]] = {split: [] for split in files}
    bad: list[tuple[str, str]] = []
    image_files = [(split, image_file) for split, of_split in listing.splits.items() for image_file in of_split]
    decoded = _decode_in_threads(listing.folder, [image_file for _, image_file in image_files], size, colour)
    for file in files.values():
        file.write(_header(0, channels, size))
    for (split, image_file), pixels in zip(image_files, decoded, strict=True):
        if isinstance(pixels, str):
            if bad_samples == "stop":
                raise _bad_sample(listing.folder / image_file.path, pixels)
            bad.append((image_file.path, pixels))
            continue
        has_colour |= len(pixels) == 3
        files[split].write(np.broadcast_to(pixels, (channels, size, size)).tobytes())
        labels[split].append(image_file.label)
    for split, file in files.items():
        _finish_array(file, len(labels[split]), channels, size, grey=colour == "auto" and not has_colour)
    facts = {"format": FORMAT, "classes": listing.classes, "bad": bad}
    return {split: np.array(part, dtype=np.int64) for split, part in labels.items()}, facts


def _decode_in_threads(folder: Path, files: list[ImageFile], size: int, colour: Colour) -> Iterator[np.ndarray | str]:
    """Yields each file's pixels, or the reason why it cannot be read. Uses one thread per core; decodes a window of files at a time."""

    def decode_or_reason(file: ImageFile) -> np.ndarray | str:
        try:
            return decode(folder / file.path, size, colour)
        except Exception as error:  # Pillow's decoders raise exceptions of any kind on malformed files
            return why_unreadable(error)

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    window, last_shown = 32 * threads, time.monotonic() + 1.0
    with warnings.catch_warnings(), ThreadPoolExecutor(threads, "decode") as pool:
        warnings.filterwarnings("ignore", module="PIL")
        for start in range(0, len(files), window):
            yield from pool.map(decode_or_reason, files[start : start + window])
            if time.monotonic() - last_shown > 1.0:
                last_shown = time.monotonic()
                print(f"decoding images: {min(start + window, len(files)):,} of {len(files):,}", file=sys.stderr, flush=True)


def _header(count: int, channels: int, size: int) -> bytes:
    """Returns the header of a .npy file. Its length does not depend on the count, because numpy pads it."""
    out = io.BytesIO()
    npy.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": (count, channels, size, size)})
    return out.getvalue()


def _finish_array(file: BinaryIO, count: int, channels: int, size: int, grey: bool) -> None:
    """Writes the final count into the header; if `grey`, keeps only one channel."""
    begin, area = len(_header(count, channels, size)), size * size
    if grey:
        step = max(1, CHUNK_BYTES // (channels * area))
        for first in range(0, count, step):
            file.seek(begin + first * channels * area)
            block = np.frombuffer(file.read(min(step, count - first) * channels * area), np.uint8)
            file.seek(begin + first * area)
            file.write(block.reshape(-1, channels, area)[:, 0].tobytes())
        channels = 1
    file.seek(0)
    file.write(_header(count, channels, size))
    file.truncate(begin + count * channels * area)


def _read_array(file: BinaryIO) -> np.ndarray:
    file.seek(0)
    return np.load(file, allow_pickle=False)  # type: ignore[no-any-return]


def _statistics(images: np.ndarray) -> dict[str, list[float]]:
    """Returns the exact mean and standard deviation of each channel, from the counts of the 256 values."""
    counts = np.zeros((images.shape[1], 256), np.int64)
    step = max(1, CHUNK_BYTES // max(1, images[:1].nbytes))
    for first in range(0, len(images), step):
        for channel, row in enumerate(counts):
            row += np.bincount(images[first : first + step, channel].reshape(-1), minlength=256)
    values = np.arange(256) / 255.0
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    mean = share @ values
    deviation = np.sqrt(np.maximum(share @ values**2 - mean**2, 0.0))
    return {"mean": mean.tolist(), "std": np.maximum(deviation, 1 / 255.0).tolist()}  # constant images have a deviation of 0
