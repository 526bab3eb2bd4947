"""Proves the power of the tests: plants the faults of `tests/faults/table.py`, one at a time, and says which test catches each.

    python -m tests.faults.one_line_faults [--only NAME ...] [--jobs N] [--write FILE]

A fault is planted in a temporary copy of src; the tree itself is not changed. Before, the same tests must pass in a copy without
a fault. The exit code is 1 if a test fails there, if a fault is missed, or if the text of a fault is no longer in the source.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.faults.table import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "drivetrain"
TIMEOUT_SECONDS, TIMEOUT_WITHOUT_FAULT_SECONDS = 300, 1800
SOME_TESTS_FAILED = 1  # pytest's exit code


@dataclass(frozen=True)
class Outcome:
    """What the tests said of one fault."""

    name: str
    file: str
    breaks: str
    caught_by: str
    """The test that failed; empty for a fault that was missed."""
    problem: str
    """Why there is no answer: the tests did not run, or not to their end."""
    seconds: float

    @property
    def verdict(self) -> str:
        return f"caught by {self.caught_by}" if self.caught_by else f"BROKEN: {self.problem}" if self.problem else "MISSED"


def occurrences(fault: Fault) -> int:
    """Returns how often the fault's old text occurs in its file: once, as long as the table fits the source."""
    file = PACKAGE / fault.file
    return file.read_text().count(fault.old) if file.is_file() else 0


@contextmanager
def planted(fault: Fault | None) -> Iterator[dict[str, str]]:
    """Yields the environment of tests that import a copy of the package, with the fault in it."""
    folder = Path(tempfile.mkdtemp(prefix="drivetrain-fault-"))
    try:
        shutil.copytree(PACKAGE, folder / "src" / "drivetrain", ignore=shutil.ignore_patterns("__pycache__"))
        if fault is not None:
            file = folder / "src" / "drivetrain" / fault.file
            file.write_text(file.read_text().replace(fault.old, fault.new))
        yield os.environ | {
            "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{ROOT}",
            "XDG_CACHE_HOME": str(folder / "cache"),  # what faulty code has cached is not for others
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_tests(tests: Sequence[str], environment: dict[str, str], timeout_seconds: float) -> tuple[int | None, str]:
    """Returns pytest's exit code (None: it ran out of time) and its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", *tests]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # and the processes of tests that did not end
        except ProcessLookupError:
            pass
        process.wait()


def try_fault(fault: Fault) -> Outcome:
    begin = time.monotonic()
    if (count := occurrences(fault)) != 1:
        return _outcome(fault, begin, problem=f"its text occurs {count} times in {fault.file}")
    with planted(fault) as environment:
        code, output = run_tests(fault.tests, environment, TIMEOUT_SECONDS)
    if code is None:
        return _outcome(fault, begin, problem=f"the tests did not end within {TIMEOUT_SECONDS} s")
    failed = re.search(r"^FAILED (\S+?\.py::.+?)(?: - |$)", output, re.MULTILINE)  # a broken fixture (ERROR) catches nothing
    if code == SOME_TESTS_FAILED and failed:
        return _outcome(fault, begin, caught_by=failed[1])
    return _outcome(fault, begin, problem="" if code == 0 else f"pytest ended with code {code}: {output.strip()[-2000:]}")


def _outcome(fault: Fault, begin: float, caught_by: str = "", problem: str = "") -> Outcome:
    return Outcome(fault.name, fault.file, fault.breaks, caught_by, problem, round(time.monotonic() - begin, 1))


def fail_without_fault(faults: Sequence[Fault]) -> str:
    """Returns why the tests of these faults prove nothing; empty if all pass in a copy without a fault."""
    with planted(None) as environment:
        printed = subprocess.run(
            [sys.executable, "-c", "import drivetrain; print(drivetrain.__file__)"],
            cwd=ROOT,
            env=environment,
            text=True,
            capture_output=True,
        )
        if not printed.stdout.startswith(environment["PYTHONPATH"].split(os.pathsep)[0]):
            return f"the tests would import {printed.stdout.strip() or printed.stderr}, not the copy"
        tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
        code, output = run_tests(tests, environment, TIMEOUT_WITHOUT_FAULT_SECONDS)
    return "" if code == 0 else f"the tests fail, or do not end, without a fault:\n{output}"


def write(file: Path, outcomes: Sequence[Outcome], seconds: float) -> None:
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, capture_output=True).stdout.strip()
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python -m tests.faults.one_line_faults",
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_faults": len(outcomes),
        "num_caught": sum(bool(outcome.caught_by) for outcome in outcomes),
        "seconds": round(seconds),
        "rows": [asdict(outcome) for outcome in outcomes],
    }
    file.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[fault.name for fault in FAULTS], help="faults to plant")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults that are tried at the same time")
    parser.add_argument("--write", type=Path, metavar="FILE", help="where the table is written as JSON")
    parser.add_argument("--trust-tests", action="store_true", help="do not run the tests without a fault first")
    flags = parser.parse_args()
    faults = [fault for fault in FAULTS if flags.only is None or fault.name in flags.only]
    begin = time.monotonic()
    if not flags.trust_tests and (why := fail_without_fault(faults)):
        print(why)
        return 1
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(flags.jobs) as pool:
        for outcome in pool.map(try_fault, faults):
            print(f"{outcome.name}: {outcome.verdict} ({outcome.seconds:.0f} s)", flush=True)
            outcomes.append(outcome)
    seconds = time.monotonic() - begin
    print_table(outcomes, seconds)
    if flags.write:
        write(flags.write, outcomes, seconds)
    return 0 if all(outcome.caught_by for outcome in outcomes) else 1


def print_table(outcomes: Sequence[Outcome], seconds: float) -> None:
    width = max(len(outcome.name) for outcome in outcomes)
    print()
    for outcome in outcomes:
        print(f"{outcome.name:<{width}}  {outcome.seconds:4.0f} s  {outcome.verdict.splitlines()[0]}")
    print(f"{sum(bool(outcome.caught_by) for outcome in outcomes)} of {len(outcomes)} faults caught in {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
