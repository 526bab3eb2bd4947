"""The mirror: a process beside a training that copies its run to a bucket. `python -m drivetrain.buckets.mirror`

It reads its settings as a line of JSON on stdin, and writes messages as lines of JSON to stdout: a `problem` or `ready`, then each `notice`,
at the end `progress` and `done`. A line `finish` asks for the last pass. If stdin closes without it, the training was killed: then the last
pass is made as well. It may be killed at any moment; another one goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from drivetrain.buckets.errors import explain
from drivetrain.buckets.fetch import fetch, link
from drivetrain.buckets.layout import STATE
from drivetrain.buckets.lease import Lease, Lost, Taken
from drivetrain.buckets.mirror_settings import PASS_SECONDS, MirrorSettings
from drivetrain.buckets.push import Pusher
from drivetrain.buckets.store import Store
from drivetrain.buckets.url import BucketUrl
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import write_atomic

MAX_PAUSE_SECONDS = 60.0
NOTICE_AFTER_SECONDS = 60.0
"""A bucket that cannot be written for so long is reported once."""
REQUEST_PATIENCE_SECONDS = 20.0


def send(**message: Any) -> None:
    with contextlib.suppress(OSError):  # the training was killed
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


class Mirror:
    def __init__(self, settings: MirrorSettings) -> None:
        self.settings, self.folder = settings, Path(settings.folder)
        self.url = BucketUrl(settings.scheme, settings.path)
        self.finishing = threading.Event()
        self._lost: Lost | None = None
        self._renewed_at = 0.0
        self._ended = threading.Event()
        self._failing_since: float | None = None
        self._is_reported = False

    def run(self) -> None:
        owner = link(self.folder, self.url)
        store = Store(self.url)
        self.lease = self._acquire(store, owner)
        try:
            if not self.settings.is_restart:
                fetch(store, self.folder, lambda text: send(notice=text), may_write=True)
            self.pusher = Pusher(Store(self.url, min(REQUEST_PATIENCE_SECONDS, self.settings.patience_seconds)), self.folder, self._check)
        except Problem:
            self.lease.release()
            raise
        send(ready=True)
        os.nice(10)  # from now on nobody waits for it
        threading.Thread(target=self._read_orders, daemon=True).start()
        threading.Thread(target=self._show_life, daemon=True).start()
        self._mirror()
        self._finish()

    def _acquire(self, store: Store, owner: str) -> Lease:
        deadline, is_told = time.monotonic() + self.settings.wait_seconds, False
        while True:
            self._renewed_at = _now()
            try:
                return Lease.acquire(store, owner, self.settings.lease_seconds)
            except Taken as problem:
                if time.monotonic() > deadline:
                    raise
                if not is_told:
                    send(notice=f"waiting, because {problem}")
                is_told = True
            time.sleep(PASS_SECONDS)

    def _read_orders(self) -> None:
        """Waits for `finish`, or for the end of the training."""
        sys.stdin.readline()
        self.finishing.set()

    def _show_life(self) -> None:
        """Renews the lease until the end."""
        lease = Lease(Store(self.url, self.settings.lease_seconds / 4), self.lease.owner, self.lease.number)
        while not self._ended.wait(self.settings.lease_seconds / 6) and self._lost is None:
            with contextlib.suppress(Problem):  # the copying itself reports that the bucket cannot be written
                self._renew(lease)

    def _renew(self, lease: Lease) -> None:
        asked_at = _now()
        try:
            lease.renew()
        except Lost as lost:
            self._lost = lost
            raise
        self._renewed_at = asked_at

    def _check(self) -> None:
        """Raises Lost if another machine may have taken over, such as while this one was asleep."""
        if self._lost is None and _now() - self._renewed_at > self.settings.lease_seconds / 2:
            self._renew(Lease(Store(self.url), self.lease.owner, self.lease.number))
        if self._lost is not None:
            raise self._lost

    # --- passes ---

    def _mirror(self) -> None:
        """Copies what changes until the training ends."""
        pause = PASS_SECONDS
        while not self.finishing.wait(pause) and self._lost is None:
            problem = self._pass(is_last=False)
            pause = PASS_SECONDS if problem is None else min(2 * pause, MAX_PAUSE_SECONDS)
        if self._lost is not None:
            send(notice=str(self._lost))
            self.finishing.wait()

    def _pass(self, is_last: bool) -> Problem | None:
        """Makes one pass; returns why it failed."""
        try:
            self.pusher.push(is_last)
            problem = None
        except Problem as error:
            problem = error
        except OSError as error:  # of this machine's disk
            problem = Problem(f"{error.filename}: {error.strerror}", Outcome.INFRA)
        self._report(problem)
        return problem

    def _report(self, problem: Problem | None) -> None:
        """Tells once that the bucket cannot be written, and that it can again."""
        now = time.monotonic()
        if problem is None:
            if self._is_reported:
                send(notice=f"{self.url} has all of the run again")
            self._failing_since, self._is_reported = None, False
        else:
            self._failing_since = self._failing_since or now
            is_due = problem.outcome is not Outcome.INFRA or now - self._failing_since > NOTICE_AFTER_SECONDS
            if is_due and not self._is_reported and not self.finishing.is_set():
                send(notice=f"{problem}; training goes on, and what is missing there is copied later")
                self._is_reported = True
        with contextlib.suppress(OSError):
            state = {"format": 1, "time": time.time(), "problem": str(problem or "")}
            write_atomic(self.folder / STATE / "state.json", json.dumps(state) + "\n")

    def _finish(self) -> None:
        """Makes the last pass, again while it gets further, and gives the lease back."""
        tried_since, sent_before, pause = time.monotonic(), self.pusher.sent_bytes, 0.5
        stop = threading.Event()
        threading.Thread(target=self._show_progress, args=(stop,), daemon=True).start()
        while (problem := self._pass(is_last=True)) is not None and self._lost is None:
            if self.pusher.sent_bytes > sent_before:
                tried_since, sent_before = time.monotonic(), self.pusher.sent_bytes
            if problem.outcome is not Outcome.INFRA or time.monotonic() - tried_since > self.settings.patience_seconds:
                break
            time.sleep(pause)
            pause = min(2 * pause, 10.0)
        stop.set()
        self._ended.set()
        missing = self.pusher.missing() if self._lost is None else []
        if self._lost is None:
            with contextlib.suppress(Problem):
                Lease(Store(self.url, 5.0), self.lease.owner, self.lease.number).release()
        send(done=True, missing=missing, problem=str(self._lost or problem or ""))

    def _show_progress(self, stop: threading.Event) -> None:
        begun, total, shown = self.pusher.sent_bytes, self.pusher.missing_bytes(), -1
        while not stop.wait(2.0):
            if self.pusher.sent_bytes != shown:
                shown = self.pusher.sent_bytes
                send(progress=shown - begun, total=max(total, shown - begun))


def _now() -> float:
    """Returns the seconds since the start of this machine, also those that it slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def main() -> None:
    settings = MirrorSettings(**json.loads(sys.stdin.readline()))
    try:
        Mirror(settings).run()
    except Problem as problem:
        send(problem=str(problem), outcome=str(problem.outcome))
    except Exception as error:  # no traceback: it may show what a request held
        explained = explain(error, BucketUrl(settings.scheme, settings.path))
        send(problem=str(explained), outcome=str(explained.outcome))
    sys.stdout.flush()
    os._exit(0)  # threads may wait for a store that does not answer


if __name__ == "__main__":
    main()
