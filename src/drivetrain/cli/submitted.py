"""What `train`, `resume`, `logs` and `status` do for runs on a target: submit, follow to the end, refresh."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.outcomes import EXIT_CODES, Outcome, Problem
from drivetrain.runs import is_run
from drivetrain.targets.consent import Agree, ask_consent
from drivetrain.targets.record import Record, find_recorded, read_record
from drivetrain.terminal import one_line, show

if TYPE_CHECKING:
    from drivetrain.launch.request import Request
    from drivetrain.recipe import Recipe
    from drivetrain.targets.base import Target
    from drivetrain.watch.screen import Screen


def agree_on(yes: bool, screen: Screen) -> Agree:
    """Returns how this command asks for consent to a cost. `yes`: the user has agreed already."""
    return partial(ask_consent, show=screen.put, ask=input if sys.stdin.isatty() else None, is_agreed=yes)


def train_on(name: str, recipes: Sequence[Recipe], request: Request, wait: bool, agree: Agree, screen: Screen) -> int:
    """Submits a training to a target; with `wait`, follows it and returns its exit code."""
    from drivetrain.targets import submit
    from drivetrain.targets.config import find_target

    target = find_target(name)
    if request.smoke:
        raise Problem("--smoke tries a task on this machine: leave out --on")
    if request.dry_run:
        show(dry_run_text(target, recipes, request))
        return 0
    run_name = submit.given_name(recipes, request)
    record = find_recorded(run_name) if run_name else None
    record = submit.adopt(record) if record is not None and not record.handle else record
    if record is None or not (record.handle or record.is_active or is_run(record.run.path)):  # nothing has begun
        if record is not None:
            submit.forget(record)
        submission = submit.prepare(target, recipes, request, submit.named_or_new(recipes, request))
        record = submit.submit(target, submission, agree, screen.notice)
        _report(record, screen)
        return wait_for(record, screen) if wait else 0
    record = submit.refresh_or_leave(record, screen.notice)
    offset = 0
    if record.is_active:
        screen.line("run", f"{record.run.name} is {record.phase} on {record.target} already   {next_verbs(record)}")
    elif record.facts.get("exit_code") == 0:
        screen.line("run", f"{record.run.name} is finished already (for a new run: another --name)")
        return 0
    else:
        offset = output_size(record)
        record = submit.continue_same(record, submit.prepare(target, recipes, request, record.run), target, agree, screen.notice)
        _report(record, screen)
    return wait_for(record, screen, offset) if wait else 0


def dry_run_text(target: Target, recipes: Sequence[Recipe], request: Request) -> str:
    """Returns the files and commands of a run that would be submitted. Two dry runs print the same."""
    from drivetrain.targets import submit
    from drivetrain.targets.submission import planned_project

    submission = submit.prepare(target, recipes, request, submit.planned_name(recipes, request))
    shown = target.render(replace(submission, project=planned_project()))
    text = shown.text()
    has_port = submission.request.nodes > 1
    note = f"# {planned_project()}: a new run gets random digits in place of the zeros{', and a port that follows from them' if has_port else ''}"
    return f"{text}\n{note}" if planned_project() in text else text


def resume_on(record: Record, request: Request, target_name: str | None, wait: bool, agree: Agree, screen: Screen) -> int:
    """Submits a run again: it continues from its last checkpoint."""
    from drivetrain.targets import submit

    record = submit.refresh_or_leave(record, screen.notice)
    if record.is_active:
        raise Problem(f"{record.run.name} is {record.phase} on {record.target}: drivetrain logs -f {record.run.name}, or stop it first")
    if target_name not in (None, record.target):
        raise Problem(f"{record.run.name} is on {record.target}: drivetrain resume {record.run.name} continues it there")
    offset = output_size(record)
    record = submit.resubmit(record, request.settings, request, agree, screen.notice)
    _report(record, screen)
    return wait_for(record, screen, offset) if wait else 0


def _report(record: Record, screen: Screen) -> None:
    label = record.handle.get("label") or record.target
    screen.line("run", f"{record.run.name}   {record.phase} on {label}   {next_verbs(record)}")


def next_verbs(record: Record) -> str:
    return f"next: drivetrain logs -f {record.run.name} | status | stop | pull"


def output_file(record: Record) -> Path:
    """Returns the file with what the command there prints."""
    return record.run.path / "logs" / "output.log"


def output_size(record: Record) -> int:
    return output_file(record).stat().st_size if output_file(record).is_file() else 0


def wait_for(record: Record, screen: Screen, offset: int = 0) -> int:
    """Prints what the command there prints, after the first `offset` bytes, until it has ended; returns its exit code."""
    from drivetrain.targets import submit

    output = output_file(record)
    try:
        for _ in submit.follow(record):
            offset = _print_new(output, offset)
    except KeyboardInterrupt:
        screen.line("run", f"{record.run.name} goes on on {record.target}   {next_verbs(record)}")
        raise
    _print_new(output, offset)
    return exit_code(submit.refresh(record))


def exit_code(record: Record) -> int:
    """Returns the exit code of a run that has ended."""
    code, reason = record.facts.get("exit_code"), record.facts.get("reason")
    if code is None or reason:
        print(f"drivetrain: {record.run.name}: {one_line(reason or 'it ended without an exit code')}", file=sys.stderr)
    return EXIT_CODES[Outcome.INFRA] if code is None else int(code)


def _print_new(path: Path, offset: int) -> int:
    """Prints the complete lines of a file after an offset; returns the new offset."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                show(one_line(line.decode(errors="replace")))
    except OSError:
        pass
    sys.stdout.flush()
    return offset


def refreshed(text: str) -> Record | None:
    """Returns the record of a run on a target, after asking the target; where that cannot be reached, says so and returns the old one."""
    record = find_recorded(text)
    if record is None:
        return None
    from drivetrain.targets import submit

    try:
        return submit.refresh(record)
    except Problem as problem:
        print(f"drivetrain: {one_line(problem)} (what follows is what was known before)", file=sys.stderr)
        return read_record(record.run)
