"""Text from files, other nodes and tasks is stripped of control codes before it reaches the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from drivetrain.cli import run_command
from drivetrain.plan import Plan
from drivetrain.terminal import one_line, printable
from drivetrain.watch.screen import Screen

RED, RESET = "\x1b[31m", "\x1b[0m"
HOSTILE = {
    "a title": "\x1b]0;root shell\x07name",
    "a title that ends by ST": "\x1b]0;root shell\x1b\\name",
    "a title in one byte": "\x9d0;root shell\x9cname",
    "a clipboard": "\x1b]52;c;cm0gLXJm\x07name",
    "a wiped screen": "\x1b[2J\x1b[Hname",
    "a wiped screen in one byte": "\x9b2Jname",
    "a query that the terminal answers": "\x1b[cna\x1b[6nme",
    "a device string": "\x1bP$q\x1b\\name",
    "a character set": "\x1b(0name",
    "a reset": "\x1bcname",
    "a bell, a backspace, a null": "\x07na\x08m\x00e\x7f",
    "a sequence cut short": "name\x1b",
    "a hidden text": "\x1b[8mname",
    "a reversed direction": "\u202ename\u2066",
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("case", HOSTILE)
def test_control_codes_are_removed_and_text_stays(case: str) -> None:
    assert printable(HOSTILE[case]) == one_line(HOSTILE[case]) == "name"


def test_newlines_tabs_and_all_scripts_stay() -> None:
    text = "läuft\tgut\n日本語 🙂"
    assert printable(text) == text
    assert one_line("10 %\r 50 %\r100 %\r\n") == "100 %"
    printable("name\udcff").encode()


def test_a_workers_colours_stay_and_end_with_its_line() -> None:
    assert printable(f"{RED}hot{RESET}\x1b[2J", colours=True) == f"{RED}hot{RESET}"
    assert printable(f"{RED}hot\x1b]0;x\x07", colours=True) == f"{RED}hot{RESET}"
    assert printable("\x1b[?25lhot\x1b[>4;2m", colours=True) == "hot"


def test_a_screen_shows_only_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen(Terminal())
    for case in HOSTILE.values():
        screen.line("run", case)
        screen.put(case)
        screen.notice(case)
        screen.busy(case)
        screen.worker_output(f"{RED}{case}{RESET}")
        screen.started({"steps": 2, "epochs": 1, "parameters": 1, "trainable": 1, "processes": 1, "device": case, "precision": "fp32", "accumulation": 1, "step": 0})  # fmt: skip
        screen.row({"step": 2, "epoch": 1, "train/loss": 0.5, f"train/{case}": 0.5, "learning_rate": 1.0, "samples_per_second": 1.0, "time": 1.0})  # fmt: skip
    shown = screen.stream.getvalue()  # type: ignore[attr-defined]
    for own in ("\x1b[1m", RESET, "\r\x1b[2K", RED, "\x1b[8m", "\n"):
        shown = shown.replace(own, "")
    assert shown.isprintable() and "name" in shown and "root shell" not in shown


def test_a_quiet_screen_prints_no_worker_output() -> None:
    stream = io.StringIO()
    screen = Screen(stream, quiet=True)
    screen.worker_output("UserWarning: something")
    assert stream.getvalue() == ""


def test_control_codes_in_a_run_directory_are_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "runs" / "one"
    (run / "logs").mkdir(parents=True)
    text = "\x1b]0;x\x07\x1b[2Jname"
    ref = {"label": text, "path": text, "class_name": "X"}
    recipe = {"task": ref, "identity": {"task": text, "code": "", "settings": {}}, "settings": {}, "origin": {}, "pins": {}}
    run_info = {
        "format": 1,
        "name": "one",
        "recipe": recipe,
        "plan": Plan(device=text).to_json(),
        "hardware": {},
        "folder": ".",
        "status": "stopped",
    }
    run_info |= {"outcome": "infra", "message": text, "versions": {}}
    (run / "run.json").write_text(json.dumps(run_info | {"created": f"2025-01-01T00:00{text}"}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "epoch": 1, "train/loss": 1.0, f"eval/{text}": 1.0}) + "\n")
    (run / "events.jsonl").write_text(json.dumps({"time": 1.0, "event": text, "rank": 0, text: text}) + "\n")
    (run / "logs" / "rank-0.log").write_text(f"{RED}{text}\n")
    for words in (["status", "one"], ["runs"], ["logs", "one"], ["status", "\x1b[2Jnone"]):
        run_command(words)
        shown = "".join(capsys.readouterr())
        assert "none" in shown or "name" in shown
        assert shown.replace("\n", "").isprintable(), shown
