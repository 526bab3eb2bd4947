"""The sbatch script of a run, or of several runs as an array. Pure: text from settings."""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.record import JOB_VARIABLE

MAX_NAME = 64
MAX_IDLE_REQUEUES = 3
"""A preempted run that has been queued again so often in a row without a new checkpoint is given up."""
VALUE = re.compile(r"[^\s\"'`$\\;<>]+")
"""A value in an #SBATCH line: one word, without quotation marks."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What the script asks of Slurm, and what it runs."""

    name: str
    commands: Sequence[Sequence[str]]
    """One command, or one for each element of the array."""
    nodes: int = 1
    gpus: int = 0
    """GPUs of each machine."""
    cpus: int = 1
    seconds: float | None = None
    """The time limit."""
    grace: int = 120
    """Seconds before the limit at which the run is asked to save."""
    options: Mapping[str, str | None] = field(default_factory=dict)
    """partition, account, qos, constraint, mem, gres; None: not given."""
    extra: Sequence[str] = ()
    """Further options, as `--exclusive`."""
    prologue: Sequence[str] = ()
    """Shell lines before the run, such as `module load cuda`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    port: int = 29_500
    retries: int = 3
    stop_files: Sequence[str] = ()
    """A run with this file is not queued again; one for each command."""
    run_dirs: Sequence[str] = ()
    """The run's folder, for each command."""
    outputs: Sequence[str] = ()
    """Where each element of an array writes what it prints."""

    @property
    def is_array(self) -> bool:
        return len(self.commands) > 1


def script(job: SlurmJob) -> str:
    """Returns the script."""
    parts = [_head(job), *([_prologue(job)] if job.prologue or job.variables else []), _commands(job)]
    if job.nodes > 1:
        parts.append(_meeting_point(job))
    parts += [_step(job), _requeue(job)]
    return "\n\n".join(parts) + "\n"


def quoted(word: str) -> str:
    """Returns a word for the shell, which replaces only a leading ~/ by the home folder."""
    return f'"$HOME"/{shlex.quote(word[2:])}' if word.startswith("~/") else shlex.quote(word)


def job_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:MAX_NAME] or "drivetrain"


def _head(job: SlurmJob) -> str:
    lines = ["#!/bin/bash", *_options(job)]
    if job.is_array:
        lines.append(f"#SBATCH --array=0-{len(job.commands) - 1}")
    lines += [
        f"#SBATCH --signal=USR1@{_grace(job)}   # before the time limit: the run saves its state and ends ...",
        "#SBATCH --requeue             # ... and is queued again, as after the loss of a machine",
        "#SBATCH --open-mode=append",
    ]
    return "\n".join(lines)


def _options(job: SlurmJob) -> list[str]:
    """Returns the #SBATCH lines that depend on the run and the target."""
    options: dict[str, str | None] = {"job-name": job_name(job.name), "nodes": str(job.nodes), "ntasks-per-node": "1"}
    options["cpus-per-task"] = str(job.cpus)
    if job.gpus and not job.options.get("gres"):
        options["gres"] = f"gpu:{job.gpus}"
    if job.seconds is not None:
        options["time"] = slurm_time(job.seconds)
    lines = []
    for name, value in (options | {name: value for name, value in job.options.items() if value is not None}).items():
        if not VALUE.fullmatch(str(value)):
            raise Problem(f"{name}: {value!r} is no value for sbatch: write one word without quotation marks")
        lines.append(f"#SBATCH --{name}={value}")
    for option in job.extra:
        if not re.fullmatch(r"-{1,2}[A-Za-z][^\n\r\0]*", option):
            raise Problem(f"sbatch: {option!r} is no option: write it as on the command line, such as --exclusive")
        lines.append(f"#SBATCH {option}")
    return lines


def _grace(job: SlurmJob) -> int:
    """Returns the seconds before the limit at which the run is signalled: at most half of the limit, so that it makes progress."""
    return job.grace if job.seconds is None else min(job.grace, int(max(60, job.seconds) // 2))


def slurm_time(seconds: float) -> str:
    """Returns a time limit as Slurm writes it: D-HH:MM:SS or HH:MM:SS; at least a minute."""
    total = max(60, math.ceil(seconds))
    days, rest = divmod(total, 86_400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def _prologue(job: SlurmJob) -> str:
    return "\n".join([*job.prologue, *(f"export {name}={quoted(value)}" for name, value in job.variables.items())])


def _commands(job: SlurmJob) -> str:
    """Returns the lines that set `command`, `run_dir` and `stop_file`."""
    settings = [
        [f"command=({' '.join(map(quoted, command))})", f"run_dir={quoted(run_dir)}", f"stop_file={quoted(stop_file)}"]
        for command, run_dir, stop_file in zip(job.commands, job.run_dirs, job.stop_files, strict=True)
    ]
    for assignments, stop_file in zip(settings, job.stop_files, strict=True):
        assignments.append(f"export {JOB_VARIABLE}={quoted(stop_file.rpartition('/')[0])}")
    if not job.is_array:
        return "\n".join(settings[0])
    lines = ["case $SLURM_ARRAY_TASK_ID in"]
    for number, (assignments, output) in enumerate(zip(settings, job.outputs, strict=True)):
        lines += [f"{number})", *(f"    {line}" for line in (*assignments, f"exec >>{quoted(output)} 2>&1")), "    ;;"]
    return "\n".join([*lines, "esac"])


def _meeting_point(job: SlurmJob) -> str:
    return "\n".join([
        "# Each machine runs one supervisor, which starts that machine's processes. They meet at the first machine.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "address=$(scontrol show node \"$first\" --oneliner | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
        f'command+=(--rendezvous "${{address:-$first}}:{job.port}")',
    ])  # fmt: skip


def _step(job: SlurmJob) -> str:
    return 'srun --kill-on-bad-exit=0 "${command[@]}"\ncode=$?'


def _idle_requeues() -> list[str]:
    """Returns the lines that give up a run which is preempted again and again before it can save."""
    return [
        'requeues="$stop_file.requeues"   # the newest checkpoint, once for each time in a row that the job was queued again with it',
        f'if [ $code -eq {Outcome.PREEMPTED.code} ] && [ ! -e "$stop_file" ]; then',
        '    newest=$(cd -- "$run_dir" 2>/dev/null && ls -d checkpoints/step-* [0-9]*-*/checkpoints/step-* 2>/dev/null | sort -V | tail -n 1)',
        '    if [ "$(tail -n 1 "$requeues" 2>/dev/null)" != "$newest" ]; then rm -f "$requeues"; fi',
        '    echo "$newest" >>"$requeues"',
        f'    if [ "$(wc -l <"$requeues")" -gt {MAX_IDLE_REQUEUES} ]; then',
        f'        echo "drivetrain: ended with code $code: not queued again, because {MAX_IDLE_REQUEUES} times in a row it saved nothing new:'
        ' give it more time (--time-limit), or a smaller grace: in the target"',
        "        exit $code",
        "    fi",
        "fi",
    ]


def _requeue(job: SlurmJob) -> str:
    preempted, first = Outcome.PREEMPTED.code, Outcome.INFRA.code
    return "\n".join([
        f"# Exit codes from {preempted} up can be retried: {preempted} preempted, {first} machine lost, 202 hang, 203 out of memory.",
        f"if [ $code -eq {128 + signal.SIGUSR1} ]; then code={preempted}; fi   # the signal came before the run could answer it",
        'failures="$stop_file.failures"',
        *_idle_requeues(),
        'if [ ! -e "$stop_file" ]; then',
        f"    if [ $code -gt {preempted} ]; then echo $code >>\"$failures\"; fi",
        f'    if [ $code -eq {preempted} ] || {{ [ $code -gt {preempted} ] && [ "$(wc -l <"$failures")" -le {job.retries} ]; }}; then',
        '        echo "drivetrain: ended with code $code: queued again"',
        '        scontrol requeue "$SLURM_JOB_ID" && exit 0',
        "    fi",
        "fi",
        "exit $code",
    ])  # fmt: skip
