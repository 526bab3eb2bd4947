"""Folders of images decoded once: kept as memory-mapped arrays that every rank and every later run reads."""

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
from drivetrain.tasks.images import Colour, Item, Listing, decode, list_images, some, why_unreadable

FORMAT = 1
HOME = ".drivetrain-cache"
CHUNK = 1 << 24  # bytes handled at a time


@dataclass(frozen=True)
class Images:
    """A data set of decoded images: bytes [n, channels, size, size] and labels."""

    train: Tensors
    test: Tensors | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    """Of each channel of the training images, for pixels of 0 to 1; so is `std`."""
    std: tuple[float, ...]


def load(data_dir: str, size: int, colour: Colour, bad_samples: Literal["stop", "skip"]) -> Images:
    """The images of `data_dir/train` and `data_dir/test`, from the cache or decoded into it."""
    listing = list_images(local_data(data_dir))
    key = _key(listing, size, colour)
    made = _cached(listing, key, size, colour, bad_samples)
    facts = made.facts
    _check(listing, made, bad_samples)
    for text in _remarks(listing, facts):
        _say(text)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nor is it written
        parts = {split: Tensors(torch.from_numpy(made.images[split]), torch.from_numpy(made.labels[split])) for split in made.images}
    return Images(parts["train"], parts.get("test"), listing.classes, tuple(facts["mean"]), tuple(facts["std"]))


@dataclass(frozen=True)
class _Made:
    """What the cache holds, in its files' terms."""

    images: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    facts: dict[str, Any]


def _check(listing: Listing, made: _Made, bad_samples: str) -> None:
    bad = made.facts["bad"]
    if bad and bad_samples == "stop":
        raise _bad_sample(listing.folder / bad[0][0], bad[0][1])
    left = set(np.unique(made.labels["train"]).tolist())
    lost = [listing.folder / "train" / name for label, name in enumerate(listing.classes) if label not in left]
    lost += [listing.folder / split for split, labels in made.labels.items() if not len(labels)]
    if lost:
        raise Problem(f"none of the images in {lost[0]} could be read: put good ones there, or remove the folder", Outcome.DATA)


def _remarks(listing: Listing, facts: dict[str, Any]) -> Iterator[str]:
    if bad := facts["bad"]:
        names = some([f"{path} ({why})" for path, why in bad])
        yield f"{len(bad):,} {'image' if len(bad) == 1 else 'images'} could not be read and are left out: {names}"
    if "test" not in listing.splits:
        yield f"there is no {listing.folder / 'test'}: nothing is evaluated"
    elif missing := listing.without("test"):
        yield f"{listing.folder / 'test'} has no images of {some(missing)}"


def _bad_sample(path: Path, why: str) -> Problem:
    return Problem(f"{path} cannot be read ({why}): mend or remove it, or leave such files out with bad_samples=skip", Outcome.DATA)


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note    {text}", file=sys.stderr, flush=True)


# --- the cache ---------------------------------------------------------------------------------


def _key(listing: Listing, size: int, colour: str) -> str:
    """A folder's name: the settings, and a digest of every file's path, size and time of change."""
    digest = hashlib.sha256(f"{FORMAT} {size} {colour}\0".encode())
    for items in listing.splits.values():
        for item in items:
            digest.update(os.fsencode(item.path) + f"\0{item.size} {item.mtime_ns}\0".encode())
    return f"{size}-{colour}-{digest.hexdigest()[:24]}"


def _places(folder: Path) -> list[Path]:
    """Beside the images, or where that cannot be written, among the user's own caches."""
    mine = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    own = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [folder / HOME, *([own / "drivetrain" / "images" / mine] if own.is_absolute() else [])]


def _cached(listing: Listing, key: str, size: int, colour: Colour, bad_samples: str) -> _Made:
    places = _places(listing.folder)
    for place in places:
        if found := _open(place / key, listing):
            return found
    failures = []
    for place in places:
        try:
            with _lock(place, key):
                return _open(place / key, listing) or _publish(place, key, listing, size, colour, bad_samples)
        except OSError as error:
            failures.append(f"{place}: {error.strerror or error}")
    _say(f"the decoded images could not be kept on disk, so each process decodes them for itself ({'; '.join(failures)})")
    files: dict[str, BinaryIO] = {split: io.BytesIO() for split in listing.splits}
    labels, facts = _decode_all(files, listing, size, colour, bad_samples)
    images = {split: _array(file) for split, file in files.items()}
    return _Made(images, labels, facts | _statistics(images["train"]))


@contextmanager
def _lock(place: Path, key: str) -> Iterator[None]:
    """Held by one process of those that want a cache of these settings here."""
    place.mkdir(parents=True, exist_ok=True)
    with open(place / f".{key.rpartition('-')[0]}.lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _open(folder: Path, listing: Listing) -> _Made | None:
    """A cache as it was published; None where there is none, or it is not whole."""
    try:
        facts = json.loads((folder / "facts.json").read_text())
        for name, length in facts["bytes"].items():
            if (folder / name).stat().st_size != length:
                return None
        images = {s: np.load(folder / f"{s}-images.npy", mmap_mode="r", allow_pickle=False) for s in listing.splits}
        labels = {s: np.load(folder / f"{s}-labels.npy", allow_pickle=False) for s in listing.splits}
        whole = all(len(images[s]) == len(labels[s]) and images[s].dtype == np.uint8 for s in images)
        whole = whole and all(((part >= 0) & (part < len(listing.classes))).all() for part in labels.values())
        whole = whole and len(facts["mean"]) == len(facts["std"]) == images["train"].shape[1] and isinstance(facts["bad"], list)
        return _Made(images, labels, facts) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _publish(place: Path, key: str, listing: Listing, size: int, colour: Colour, bad_samples: str) -> _Made:
    """Decode into a temporary folder, rename it, and remove what it replaces."""
    temporary = place / f"{key}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write(temporary, listing, size, colour, bad_samples)
        if (place / key).exists():
            shutil.rmtree(place / key)  # a damaged one
        temporary.rename(place / key)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in place.glob(f"{key.rpartition('-')[0]}-*"):
        if old.name != key:
            shutil.rmtree(old, ignore_errors=True)  # who still reads it keeps its mapped files
    found = _open(place / key, listing)
    if found is None:
        raise OSError("what was written there does not read back")
    return found


def _write(folder: Path, listing: Listing, size: int, colour: Colour, bad_samples: str) -> None:
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for split, items in listing.splits.items():
            files[split] = stack.enter_context(open(folder / f"{split}-images.npy", "w+b"))
            _reserve(files[split], len(_header(0, 3, size)) + len(items) * size * size * (1 if colour == "grey" else 3))
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
    """Take the space now, so that a full disk is found before the work rather than after it."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
            raise


# --- decoding ----------------------------------------------------------------------------------


def _decode_all(
    files: dict[str, BinaryIO], listing: Listing, size: int, colour: Colour, bad_samples: str
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Write all images as .npy files, in the listing's order without the bad ones; gives the labels and the facts."""
    channels, coloured = (1 if colour == "grey" else 3), False
    labels: dict[str, list[int]] = {split: [] for split in files}
    bad: list[tuple[str, str]] = []
    sources = [(split, item) for split, items in listing.splits.items() for item in items]
    for file in files.values():
        file.write(_header(0, channels, size))
    for (split, item), pixels in zip(sources, _decoded(listing.folder, [i for _, i in sources], size, colour), strict=True):
        if isinstance(pixels, str):
            if bad_samples == "stop":
                raise _bad_sample(listing.folder / item.path, pixels)
            bad.append((item.path, pixels))
            continue
        coloured |= len(pixels) == 3
        files[split].write(np.broadcast_to(pixels, (channels, size, size)).tobytes())
        labels[split].append(item.label)
    for split, file in files.items():
        _finish(file, len(labels[split]), channels, size, grey=colour == "auto" and not coloured)
    facts = {"format": FORMAT, "classes": listing.classes, "bad": bad}
    return {split: np.array(part, dtype=np.int64) for split, part in labels.items()}, facts


def _decoded(folder: Path, items: list[Item], size: int, colour: Colour) -> Iterator[np.ndarray | str]:
    """Each item's pixels, or why it has none; decoded by as many threads as there are cores, a window at a time."""

    def one(item: Item) -> np.ndarray | str:
        try:
            return decode(folder / item.path, size, colour)
        except Exception as error:  # Pillow's decoders raise all kinds on hostile files
            return why_unreadable(error)

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    window, shown = 32 * threads, time.monotonic() + 1.0
    with warnings.catch_warnings(), ThreadPoolExecutor(threads, "decode") as pool:
        warnings.filterwarnings("ignore", module="PIL")
        for start in range(0, len(items), window):
            yield from pool.map(one, items[start : start + window])
            if time.monotonic() - shown > 1.0:
                shown = time.monotonic()
                print(f"decoding images: {min(start + window, len(items)):,} of {len(items):,}", file=sys.stderr, flush=True)


def _header(count: int, channels: int, size: int) -> bytes:
    """A .npy file's; numpy leaves room in it for any count."""
    out = io.BytesIO()
    npy.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": (count, channels, size, size)})
    return out.getvalue()


def _finish(file: BinaryIO, count: int, channels: int, size: int, grey: bool) -> None:
    """Put the true count into the header; of images without colour keep one channel."""
    begin, area = len(_header(count, channels, size)), size * size
    if grey:
        step = max(1, CHUNK // (channels * area))
        for first in range(0, count, step):
            file.seek(begin + first * channels * area)
            block = np.frombuffer(file.read(min(step, count - first) * channels * area), np.uint8)
            file.seek(begin + first * area)
            file.write(block.reshape(-1, channels, area)[:, 0].tobytes())
        channels = 1
    file.seek(0)
    file.write(_header(count, channels, size))
    file.truncate(begin + count * channels * area)


def _array(file: BinaryIO) -> np.ndarray:
    file.seek(0)
    return np.load(file, allow_pickle=False)  # type: ignore[no-any-return]


def _statistics(images: np.ndarray) -> dict[str, list[float]]:
    """Mean and standard deviation of each channel, exact, from counts of the 256 values."""
    counts = np.zeros((images.shape[1], 256), np.int64)
    step = max(1, CHUNK // max(1, images[:1].nbytes))
    for first in range(0, len(images), step):
        for channel, row in enumerate(counts):
            row += np.bincount(images[first : first + step, channel].reshape(-1), minlength=256)
    values = np.arange(256) / 255.0
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    mean = share @ values
    deviation = np.sqrt(np.maximum(share @ values**2 - mean**2, 0.0))
    return {"mean": mean.tolist(), "std": np.maximum(deviation, 1 / 255.0).tolist()}  # images all alike have no deviation
