"""Injects 200 faults into runs on one to four processes and prints the time that each fault costs.

python benchmarks/chaos.py --json benchmarks/results/chaos-cpu.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from drivetrain.hardware import cpu_cores

NUM_PROCESSES = (1, 2, 3, 4)  # each gets an equal share of the faults


def run(procs: int, faults: int, steps: int, seed: int) -> dict[str, Any]:
    """Returns the report of one chaos run of the built-in digits, whether it passed or not."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["chaos", "digits", "--procs", str(procs), "--faults", str(faults), "--steps", str(steps), "--seed", str(seed)]
        started = time.monotonic()
        process = subprocess.run([sys.executable, "-m", "drivetrain", *arguments, "--keep", folder], capture_output=True, text=True)
        report = Path(folder) / "report.json"
        if not report.exists():
            raise SystemExit(f"{procs} processes: no report\n{process.stdout}\n{process.stderr}")
        return json.loads(report.read_text()) | {"passed": process.returncode == 0, "wall": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="faults of all runs together (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    faults_per_run = args.faults // len(NUM_PROCESSES)
    reports = []
    for procs in NUM_PROCESSES:
        report = run(procs, faults_per_run, 4 * faults_per_run, args.seed + procs)
        reports.append(report)
        details = {name: value for name, value in report.items() if name != "seconds"}
        result = "passed" if report["passed"] else f"FAILED {json.dumps(details)}"
        print(f"{procs} processes: {report['struck']} faults in {report['wall']:.0f} s: {result}", flush=True)
    kinds = sorted({kind for report in reports for kind in report["seconds"]})
    seconds_of_kind = {kind: sorted(s for report in reports for s in report["seconds"].get(kind, [])) for kind in kinds}
    with_two_processes = reports[NUM_PROCESSES.index(2)]["seconds"]
    print("\nseconds from the fault to the first step after the restart\n")
    print(f"{'fault':<10}{'times':>6}{'median':>8}{'worst':>8}{'2 processes: median':>22}{'worst':>8}")
    for kind, seconds in seconds_of_kind.items():
        line = f"{kind:<10}{len(seconds):>6}{statistics.median(seconds):>8.2f}{max(seconds):>8.2f}"
        if two := with_two_processes.get(kind):
            line += f"{statistics.median(two):>22.2f}{max(two):>8.2f}"
        print(line)
    if args.json:
        facts = {
            "date": datetime.now(UTC).date().isoformat(), "cores": cpu_cores(), "torch": torch.__version__,
            "python": platform.python_version(), "command": f"python benchmarks/chaos.py --faults {args.faults} --seed {args.seed}",
            "rows": reports,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(not all(report["passed"] for report in reports))


if __name__ == "__main__":
    main()
