"""Reads and writes the objects below an address. Only this module calls fsspec.

A request that is throttled, cut or not answered is repeated after a pause, which doubles and has a random part; every other failure is a Problem.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.buckets.errors import Temporary, explain, is_missing_bucket
from drivetrain.buckets.mirror_settings import answer_seconds
from drivetrain.buckets.url import BucketUrl
from drivetrain.outcomes import Problem

T = TypeVar("T")
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.4, 20.0
CONNECT_SECONDS = 10.0
CHUNK_BYTES, NUM_STREAMS = 16 << 20, 4
"""Large files are uploaded in chunks, several at a time."""
MAX_CHUNKS = 10_000
MIN_BYTES_PER_SECOND = 200_000
"""A slower store counts as one that does not answer."""
TRIES_OF_PART = 3
"""s3fs itself repeats a part of a large file, or one of the requests of an operation, so often."""
PART = ".part-"
"""Begins the name of a file that is not yet complete, in a folder."""


class Store:
    """The objects below an address. Names are relative to it."""

    def __init__(self, url: BucketUrl, patience: float = 30.0) -> None:
        """`patience`: a request that fails for a reason that passes is repeated for so many seconds."""
        self.url, self.patience = url, patience
        try:
            self._fs = _file_system(url.scheme)
        except Exception as error:
            raise explain(error, url) from None

    def list(self, below: str = "") -> dict[str, int]:
        """Returns the names below a name, with their sizes."""
        root = self._path(below) if below else self.url.path

        def find() -> dict[str, Any]:
            self._fs.invalidate_cache()
            return dict(self._call("find", root, detail=True))

        try:
            found = self._repeat(find)
        except FileNotFoundError as error:
            self._check_bucket(error)
            return {}
        base = f"{self.url.path.strip('/')}/"
        sizes = {path.strip("/").removeprefix(base): int(info.get("size") or 0) for path, info in found.items()}
        return {name: size for name, size in sizes.items() if not name.rpartition("/")[2].startswith(PART) and not name.endswith("/")}

    def read(self, name: str) -> bytes | None:
        """Returns an object's content; None if there is none."""
        try:
            return bytes(self._repeat(lambda: self._call("cat_file", self._path(name))))
        except FileNotFoundError as error:
            self._check_bucket(error)
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small object. Readers see the old or the new content."""
        if self.url.scheme == "file":
            self._on_writing(lambda: self._replace(name, lambda part: part.write_bytes(content)))
        else:
            self._on_writing(lambda: self._call("pipe_file", self._path(name), content, size=len(content)))

    def create(self, name: str, content: bytes) -> bool:
        """Writes a small object unless there is one; returns whether it did. A repeated request may find its own first one."""
        try:
            if self.url.scheme == "file":
                self._on_writing(lambda: self._link(name, content))
            else:
                self._on_writing(lambda: self._call("pipe_file", self._path(name), content, size=len(content), mode="create"))
        except FileExistsError:
            return False
        return True

    def upload(self, file: Path, name: str) -> None:
        """Copies a file there; raises FileNotFoundError if the file has gone."""
        if not file.is_file():
            raise FileNotFoundError(file)
        if self.url.scheme == "file":
            self._on_writing(lambda: self._replace(name, lambda part: shutil.copyfile(file, part)), file)
        else:
            self._on_writing(lambda: self._put(file, self._path(name)), file)

    def download(self, name: str, file: Path) -> None:
        """Copies an object here; raises FileNotFoundError if there is none."""
        size = NUM_STREAMS * CHUNK_BYTES
        self._repeat(lambda: self._call("get_file", self._path(name), str(file), size=size, callback=_make_progress()))

    def delete(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._repeat(partial(self._call, "rm_file", self._path(name)))

    def modified(self, name: str) -> float | None:
        """Returns when an object was written, by the store's clock in seconds since the epoch; None if there is none."""

        def ask() -> float:
            self._fs.invalidate_cache()
            if not self._is_remote:
                return float(self._fs.modified(self._path(name)).timestamp())
            facts = self._call("info", self._path(name))
            return float((facts.get("LastModified") or facts["mtime"]).timestamp())  # of s3fs, of gcsfs

        with contextlib.suppress(FileNotFoundError):
            return self._repeat(ask)
        return None

    # --- private ---

    @property
    def _is_remote(self) -> bool:
        return bool(getattr(self._fs, "async_impl", False))

    def _path(self, name: str) -> str:
        return f"{self.url.path}/{name}"

    def _call(self, method: str, *arguments: Any, size: int = 0, callback: Any = None, **named: Any) -> Any:
        """Calls a method of the file system; raises TimeoutError if the store gives no sign of life.

        `size`: of what travels, in bytes. The timeouts of s3fs and gcsfs do not end a request that the store does not read.
        """
        if callback is not None:
            named["callback"] = callback
        if not self._is_remote:
            return getattr(self._fs, method)(*arguments, **named)
        begun = time.monotonic()
        max_silence = TRIES_OF_PART * answer_seconds() + min(size, NUM_STREAMS * CHUNK_BYTES) / MIN_BYTES_PER_SECOND
        future = asyncio.run_coroutine_threadsafe(getattr(self._fs, f"_{method}")(*arguments, **named), self._fs.loop)
        while True:
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                if future.done():  # the request's own
                    raise
                if time.monotonic() - max(begun, getattr(callback, "time", begun)) > max_silence:
                    future.cancel()
                    raise

    def _put(self, file: Path, path: str) -> None:
        size = file.stat().st_size
        streams = {"max_concurrency": NUM_STREAMS} if self.url.scheme == "s3" else {}
        chunk = max(CHUNK_BYTES, -(-size // MAX_CHUNKS // CHUNK_BYTES) * CHUNK_BYTES)
        named = {"chunksize": chunk} if self._is_remote else {}
        self._call("put_file", str(file), path, size=size, callback=_make_progress(), **named, **streams)

    def _on_writing(self, action: Callable[[], object], source: Path | None = None) -> None:
        try:
            self._repeat(action)
        except FileNotFoundError:
            if source is not None and not source.is_file():
                raise
            raise Problem(f"{self.url}: there is no bucket {self.url.bucket}: create it, or correct the address") from None

    def _check_bucket(self, error: FileNotFoundError) -> None:
        if is_missing_bucket(error):
            raise Problem(f"{self.url}: there is no bucket {self.url.bucket}: create it, or correct the address") from None

    def _repeat(self, action: Callable[[], T]) -> T:
        """Returns what the action returns. Objects that are there or not are left to the caller."""
        deadline, pause = time.monotonic() + self.patience, FIRST_PAUSE_SECONDS
        while True:
            try:
                return action()
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as error:
                problem = explain(error, self.url)
                if not isinstance(problem, Temporary) or time.monotonic() + pause > deadline:
                    raise problem from None
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _replace(self, name: str, write: Callable[[Path], object]) -> None:
        """In a folder: writes another file and renames it."""
        final = Path(self._path(name))
        final.parent.mkdir(parents=True, exist_ok=True)
        part = final.with_name(f"{PART}{uuid.uuid4().hex}")
        try:
            write(part)
            os.replace(part, final)
        finally:
            part.unlink(missing_ok=True)

    def _link(self, name: str, content: bytes) -> None:
        """In a folder: makes a file appear with its content, unless there is one."""
        final = Path(self._path(name))
        final.parent.mkdir(parents=True, exist_ok=True)
        part = final.with_name(f"{PART}{uuid.uuid4().hex}")
        try:
            part.write_bytes(content)
            os.link(part, final)
        finally:
            part.unlink(missing_ok=True)


def _make_progress() -> Any:
    """Returns an fsspec callback that knows the time at which it was last called."""
    from fsspec.callbacks import Callback

    class Progress(Callback):  # type: ignore[misc, unused-ignore]
        time = 0.0

        def call(self, *arguments: Any, **named: Any) -> None:
            self.time = time.monotonic()

    return Progress()


def _file_system(scheme: str) -> Any:
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True}
    if scheme == "s3":
        seconds = answer_seconds()
        once = {"connect_timeout": min(CONNECT_SECONDS, seconds), "read_timeout": seconds, "retries": {"total_max_attempts": 1}}
        options |= {"use_listings_cache": False, "config_kwargs": once}
    elif scheme == "gs":
        options |= {"use_listings_cache": False, "timeout": answer_seconds()}
    elif scheme == "memory":  # in tests; all stores of a process share it
        options = {}
    file_system = fsspec.filesystem(scheme, **options)
    if scheme == "s3":
        file_system.retries = TRIES_OF_PART
    return file_system
