"""The command line. Parsing imports neither torch nor the module of another verb."""

from __future__ import annotations

import importlib
import os
import sys

from drivetrain import __version__
from drivetrain.outcomes import Outcome, Problem
from drivetrain.terminal import printable

# verb -> (module, help). The module defines parser(verb) and run(verb, words).
VERBS = {
    "train": ("train", "train a task: a built-in, your file.py, or a recipe"),
    "resume": ("train", "continue a run that was interrupted"),
    "eval": ("evaluate", "evaluate a run's model on its evaluation data"),
    "predict": ("predict", "a run's prediction for an input: a language model continues a text"),
    "export": ("export", "a run's model as ONNX and safetensors, checked against torch"),
    "tune": ("tune", "search a task's settings: trials are ordinary runs, bad ones are stopped early"),
    "play": ("play", "watch a run's agents in the browser, or play against them"),
    "status": ("status", "how a run is doing"),
    "logs": ("logs", "what a run's processes printed"),
    "stop": ("stop", "stop a run: it saves and ends, here or on its target"),
    "pull": ("pull", "copy a run from its target to this machine"),
    "upload": ("upload", "copy a finished run's model, or what is missing of a run, to a bucket"),
    "targets": ("targets", "where runs can execute (--on), and whether each can be reached"),
    "up": ("up", "make a target's machines, such as those of gcp; shows the price and asks"),
    "down": ("up", "remove what drivetrain keeps on a target, and the machines that it made"),
    "image": ("image", "build the image of runs in containers (--on docker)"),
    "doctor": ("doctor", "check a target: what is wrong, and the fix"),
    "runs": ("runs", "list runs; rm and prune make room"),
    "plan": ("plan", "how a task would run here, or on a machine you only describe, and why"),
    "data": ("data", "make and check the data of tasks: generated chest X-rays, and the report before a training"),
    "hardware": ("hardware", "what this machine has, or one you only describe"),
    "verify-resume": ("verify_resume", "prove that a task resumes to the last bit"),
    "chaos": ("chaos", "break a training on purpose, in every way, and prove that nothing was lost"),
    "completion": ("completion", "print a shell's completion script"),
}

HELP = """\
usage: drivetrain VERB ...        (drivetrain VERB --help tells more)

{verbs}

  drivetrain train digits                        a first run: a few seconds on any machine
  drivetrain train my_task.py hidden=512         your own task, a setting changed
  drivetrain train my_task.py --procs 4          four processes on this machine
  drivetrain train my_task.py --help             the settings of that task
  drivetrain train my_task.py --on box           the same on another machine (drivetrain targets --help)
  drivetrain resume digits-001                   continue where it stopped
"""


def main(argv: list[str] | None = None) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads must not occupy cores
    code = run_command(list(sys.argv[1:] if argv is None else argv))
    if "torch" in sys.modules:  # a launcher's worker: destroying its process group may abort or hang
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_command(words: list[str]) -> int:
    """Runs one command and returns its exit code; an error for the user is printed, not raised."""
    # DeepSpeed's launcher adds --local_rank=N to every command; the variable LOCAL_RANK has the same value.
    words = [word for word in words if not word.startswith(("--local_rank=", "--local-rank="))]
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except Problem as problem:
        print(f"drivetrain: {printable(problem)}", file=sys.stderr)
        return problem.outcome.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output closed it, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        verbs = "\n".join(f"  {verb:<15}{text}" for verb, (_, text) in VERBS.items())
        print(HELP.format(verbs=verbs), end="")
        return Outcome.OK.code if words else Outcome.USAGE.code
    if words[0] in ("-V", "--version"):
        print(f"drivetrain {__version__}")
        return 0
    verb, *rest = words
    if verb not in VERBS:
        from drivetrain.settings import nearest

        raise Problem(f"there is no verb {verb!r}{nearest(verb, VERBS)} (drivetrain --help lists them)")
    module = importlib.import_module(f"drivetrain.cli.{VERBS[verb][0]}")
    return int(module.run(verb, rest))
