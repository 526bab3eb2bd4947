"""Counts, in a pod, how often pods of a run were started since its newest checkpoint.

The operator makes a pod again after every exit code of 128 or more, and counts nothing itself. So a run that hangs at each start would use GPUs for ever:
after `retries` further starts without a new checkpoint, the pod ends with a code that is not repeated.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from drivetrain.buckets.layout import complete_checkpoints, stage_number
from drivetrain.buckets.store import Store
from drivetrain.buckets.url import parse as parse_bucket
from drivetrain.outcomes import EXIT_CODES, Outcome, Problem
from drivetrain.targets.host.checkpoints import position_of
from drivetrain.targets.host.library import read_json, write_json
from drivetrain.targets.layout import Layout

FIRST_REPEATED_CODE = 128
FINAL_CODES = {EXIT_CODES[Outcome.INFRA]: 101, EXIT_CODES[Outcome.HANG]: 102, EXIT_CODES[Outcome.OOM]: 103}
"""Exit code of a run -> that of a pod whose run is not started again."""
VOLUME = "volume"
"""Where a run is kept, as the pod is told: this, or the address of a bucket, or "" if it is only in its pods."""
FILE = "restarts.json"
BUCKET_FOLDER = ".pods"
PATIENCE_SECONDS = 30.0


def final_code(code: int) -> int:
    """Returns the exit code with which a pod ends for good after its run has ended with `code`."""
    return code if code < FIRST_REPEATED_CODE else FINAL_CODES.get(code, FINAL_CODES[EXIT_CODES[Outcome.INFRA]])


def code_of_run(pod_code: int) -> int:
    """Returns the exit code of the run whose pod has ended with a code of `final_code`."""
    return next((code for code, final in FINAL_CODES.items() if final == pod_code), pod_code)


class Restarts(ABC):
    """The starts of one pod of a run since the run's newest checkpoint."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """How often a pod is made again without a new checkpoint."""

    @property
    @abstractmethod
    def is_known(self) -> bool:
        """Whether the number of starts outlives the pod."""

    @abstractmethod
    def read(self) -> dict[str, Any]: ...

    @abstractmethod
    def write(self, facts: dict[str, Any]) -> None: ...

    @abstractmethod
    def position(self) -> list[int]:
        """Returns the stage and step of the run's newest checkpoint."""

    def count_start(self) -> bool:
        """Counts a start; returns whether the run may be started once more."""
        if not self.is_known:
            return True
        try:
            starts = self._starts() + 1
            self.write({"position": self.position(), "starts": starts})
        except (Problem, OSError):  # the run needs the bucket itself, and says what is wrong with it
            return True
        return starts <= self.limit + 1

    def may_repeat(self) -> bool:
        """Whether the pod may be made again, after its run has failed."""
        if not self.is_known:
            return False
        try:
            return self._starts() <= self.limit
        except (Problem, OSError):
            return False

    def forget(self) -> None:
        """Starts to count again: the run was asked to stop, has finished, or ends for good."""
        if self.is_known:
            try:
                self.write({})
            except (Problem, OSError):
                return

    def _starts(self) -> int:
        facts = self.read()
        return int(facts.get("starts", 0)) if facts.get("position") == self.position() else 0


class RestartsInPod(Restarts):
    """Of a run that is lost with its pod: another pod would begin with nothing."""

    is_known = False

    def read(self) -> dict[str, Any]:
        return {}

    def write(self, facts: dict[str, Any]) -> None:
        """Nothing is kept."""

    def position(self) -> list[int]:
        return [0, 0]


class RestartsOnVolume(Restarts):
    is_known = True

    def __init__(self, limit: int, layout: Layout, rank: int) -> None:
        super().__init__(limit)
        self.file, self.run_dir = Path(layout.job(rank)) / FILE, layout.run_dir

    def read(self) -> dict[str, Any]:
        return read_json(self.file)

    def write(self, facts: dict[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, facts)

    def position(self) -> list[int]:
        return list(position_of(self.run_dir)["position"])


class RestartsInBucket(Restarts):
    is_known = True

    def __init__(self, limit: int, address: str, rank: int) -> None:
        super().__init__(limit)
        self.store, self.name = Store(parse_bucket(address, "bucket:"), PATIENCE_SECONDS), f"{BUCKET_FOLDER}/{rank}.json"

    def read(self) -> dict[str, Any]:
        try:
            value = json.loads(self.store.read(self.name) or b"{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def write(self, facts: dict[str, Any]) -> None:
        self.store.write(self.name, json.dumps(facts).encode())

    def position(self) -> list[int]:
        newest = complete_checkpoints(self.store.list())[-1:]
        return [stage_number(newest[0].stage), newest[0].step] if newest else [0, 0]


def restarts_of(storage: str, layout: Layout, rank: int, limit: int) -> Restarts:
    """Returns the count for a run that is kept in `storage`."""
    if storage == VOLUME:
        return RestartsOnVolume(limit, layout, rank)
    return RestartsInBucket(limit, storage, rank) if storage else RestartsInPod(limit)
