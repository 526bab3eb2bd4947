"""Runs in a bucket: starts the mirror process (`drivetrain.buckets.mirror`) beside a training, and ends it after its last pass.

Neither this process nor a worker speaks to the bucket while the run trains, so that a slow store delays no step.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from drivetrain.buckets.fetch import copy_run
from drivetrain.buckets.layout import STATE, folder_of, read_link, stages_in
from drivetrain.buckets.mirror_settings import MirrorSettings, lease_seconds, patience_seconds, wait_seconds
from drivetrain.buckets.models import upload_model
from drivetrain.buckets.store import Store
from drivetrain.buckets.url import BucketUrl, parse
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import Run
from drivetrain.supervise import JobEnd
from drivetrain.watch.screen import Screen, format_size

NOT_FOR_MIRROR = {"DRIVETRAIN_TOKEN", "DRIVETRAIN_TOKEN_FILE"}
MAX_RESTART_PAUSE_SECONDS = 60.0
OLD_MIRROR_SECONDS = 10.0


@contextlib.contextmanager
def mirrored(request: Request, screen: Screen) -> Iterator[None]:
    """Copies the run from its bucket, and then to it, as long as the block runs. Does nothing if the run has no bucket."""
    if request.bucket is None:
        yield
        return
    url = parse(request.bucket, "--run-dir")
    folder = folder_of(request.bucket)  # of a recipe with stages, the folder of all of them
    with _only_command(folder):
        mirror = _MirrorProcess(url, folder, screen)
        try:
            mirror.start()
            screen.line("bucket", f"{url}   the run's folder here: {folder}")
            try:
                yield
            finally:
                mirror.finish()
        finally:
            _remove_if_empty(folder)  # the start was refused


def resume_request(request: Request, screen: Screen) -> Request:
    """Returns the request for a run that `resume` names by its address, after it was copied to its folder here."""
    url = parse(request.target, "resume")
    folder = folder_of(str(url))
    with mirrored(replace(request, bucket=str(url)), screen):
        if not stages_in(folder):
            raise Problem(f"there is no run at {url}")
    return replace(request, target=str(folder))


def with_bucket_of(run: Run | None, request: Request) -> Request:
    """Returns the request with the bucket that a run of this machine belongs to, if it has one."""
    if run is None or request.bucket is not None:
        return request
    for folder in (run.path, run.path.parent):
        url = str(read_link(folder).get("url", ""))
        if url and folder_of(url).resolve() == folder.resolve():  # and no copy of the folder under another name
            return replace(request, bucket=url)
    return request


def copy_to_bucket(run: Run, screen: Screen) -> bool:
    """Copies what is missing of a run to its bucket; returns False if it has none."""
    request = with_bucket_of(run, Request(target=run.name))
    with mirrored(request, screen):
        return request.bucket is not None


def copy_from_bucket(address: str) -> Run:
    """Copies a run from its bucket to its folder here, without the right to write there. Its stages are in that folder."""
    url = parse(address, "RUN")
    folder = folder_of(str(url))
    try:
        with _only_command(folder):
            copy_run(Store(url), folder, lambda _: None)
    finally:
        _remove_if_empty(folder)
    return Run(folder)


def upload_finished(run: Run, address: str, screen: Screen) -> None:
    """Uploads the model of a finished run."""
    url = parse(address, "URL")
    for copy in upload_model(run, url, patience_seconds()):
        screen.line("upload", copy)


def with_upload_of(run: Run, request: Request) -> Request:
    """Returns the request with the address to which an unfinished run is to upload its model, if it has one."""
    if request.upload is not None or run.is_finished:
        return request
    upload = run.read().get("upload")
    return replace(request, upload=upload) if isinstance(upload, str) else request


def upload_after(run: Run, request: Request, ended: JobEnd, screen: Screen) -> None:
    """Uploads the model if --upload asked for it; of several machines the leader does. A failure is shown, and changes nothing of the run's outcome."""
    if request.upload is None or ended.outcome is not Outcome.OK or ended.is_member:
        return
    try:
        upload_finished(run, request.upload, screen)
    except (Problem, OSError) as problem:
        screen.notice(f"the model was not uploaded: {problem}\nrepeat it with: drivetrain upload {run.name} {request.upload}")


def _remove_if_empty(folder: Path) -> None:
    """Removes the folder of a run that has not begun."""
    if not stages_in(folder):
        shutil.rmtree(folder / STATE, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _only_command(folder: Path) -> Iterator[None]:
    """Lets one command at a time use the folder, and ends the mirror of a command that was killed."""
    try:
        (folder / STATE).mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / STATE / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise Problem(f"cannot write the run directory {folder}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise Problem(f"{folder} is being trained by another command here: wait for it, or stop it") from None
    try:
        _end_old_mirror(folder / STATE / "mirror.lock")
        yield
    finally:
        os.close(handle)


def _end_old_mirror(path: Path) -> None:
    """Ends the mirror that makes the last pass of a command that was killed: the new one goes on with it."""
    with open(path, "a+b") as file:
        deadline = time.monotonic() + OLD_MIRROR_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                file.seek(0)
                pid = file.read(20).strip()
            if time.monotonic() > deadline:
                raise Problem(f"{path} is held by another process: wait for it") from None
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(pid), 9)
            time.sleep(0.05)


class _MirrorProcess:
    """The mirror, which is started again if it is lost."""

    def __init__(self, url: BucketUrl, folder: Path, screen: Screen) -> None:
        self.url, self.folder, self.screen = url, folder, screen
        self._process: subprocess.Popen[str] | None = None
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._finishing = threading.Event()
        self._guard = threading.Lock()

    def start(self) -> None:
        """Returns when the run was copied here; raises Problem if it cannot be."""
        self._spawn(is_restart=False)
        while True:
            message = self._messages.get()
            if message is None:
                raise Problem(f"{self.url}: the process that copies the run ended before it began", Outcome.INFRA)
            if "problem" in message:
                raise Problem(message["problem"], Outcome(message["outcome"]))
            if "ready" in message:
                break
            self._show(message)
        threading.Thread(target=self._watch, daemon=True).start()

    def _spawn(self, is_restart: bool) -> None:
        settings = MirrorSettings(
            self.url.scheme, self.url.path, str(self.folder.absolute()), lease_seconds(), patience_seconds(),
            wait_seconds=wait_seconds(), is_restart=is_restart,
        )  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_MIRROR}
        with open(self.folder / STATE / "mirror.lock", "a+b") as lock:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "drivetrain.buckets.mirror"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True, pass_fds=[lock.fileno()],
            )  # fmt: skip
            fcntl.flock(lock, fcntl.LOCK_EX)  # the mirror inherits it: it is free when both have ended
            lock.truncate(0)
            lock.write(str(self._process.pid).encode())
        self._order(json.dumps(settings.to_json()))
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with contextlib.suppress(ValueError):
                self._messages.put(json.loads(line))
        self._messages.put(None)

    def _order(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _watch(self) -> None:
        """Shows what the mirror reports, and starts another one if it is lost."""
        pause = 1.0
        while True:
            message = self._messages.get()
            if message is None and not self._finishing.wait(pause):
                pause = min(2 * pause, MAX_RESTART_PAUSE_SECONDS)
                with self._guard:
                    if not self._finishing.is_set():
                        self._spawn(is_restart=True)
                        continue
            if self._finishing.is_set():
                self._messages.put(message)  # for `finish`
                return
            self._show(message or {})

    def _show(self, message: dict[str, Any]) -> None:
        if "notice" in message:
            self.screen.notice(message["notice"])

    def finish(self) -> None:
        """Waits for the last pass. What it could not copy is shown with the command that repeats it; it never fails the run."""
        with self._guard:
            self._finishing.set()
        self._messages.put({})  # wakes `_watch`
        self._order("finish")
        try:
            done = self._wait_for_end()
            if done is None:  # the mirror was lost: once more
                self._spawn(is_restart=True)
                self._order("finish")
                done = self._wait_for_end()
        except (KeyboardInterrupt, Problem):  # a signal; the mirror ends when it has copied all
            self.screen.notice(f"the last files are copied to {self.url} in the background")
            return
        done = done or {"missing": ["all that changed since then"], "problem": "the process that copies the run was lost"}
        if done["missing"] or done["problem"]:
            names = done["missing"]
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines = [
                done["problem"],
                f"missing there: {shown}" if names else "",
                f"copy it with: drivetrain upload {Run(self.folder).name}",
            ]
            self.screen.notice("\n".join(filter(None, lines)))

    def _wait_for_end(self) -> dict[str, Any] | None:
        """Returns the mirror's last message; None if it was lost."""
        while (message := self._messages.get()) is not None:
            if "done" in message:
                return message
            if "problem" in message:
                return {"missing": ["the end of the run"], "problem": message["problem"]}
            if "progress" in message:
                self.screen.line("bucket", f"{format_size(message['progress'])} of {format_size(message['total'])} copied to {self.url}")
            self._show(message)
        return None
