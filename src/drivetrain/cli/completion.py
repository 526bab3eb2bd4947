"""`completion`: scripts that let a shell complete verbs, flags, tasks and runs."""

from __future__ import annotations

from drivetrain.cli import VERBS
from drivetrain.cli.flags import Parser
from drivetrain.task_ref import BUILT_IN

FLAGS = "--help --procs --nodes --rendezvous --node-rank --gpus --device --run-dir --name --dry-run --smoke --json --quiet --verbose"
RUN_VERBS = "resume|eval|status|logs"

BASH = """\
_drivetrain() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}}
    if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{verbs}" -- "$word")); return; fi
    case $word in -*) COMPREPLY=($(compgen -W "{flags}" -- "$word")); return;; esac
    case $verb in
        {run_verbs}) COMPREPLY=($(compgen -W "$(ls runs 2>/dev/null)" -- "$word"));;
        train|tune|verify-resume) COMPREPLY=($(compgen -W "{tasks}" -- "$word") $(compgen -f -X '!*.@(py|yaml)' -- "$word"));;
        completion) COMPREPLY=($(compgen -W "bash zsh fish" -- "$word"));;
        runs) COMPREPLY=($(compgen -W "rm prune $(ls runs 2>/dev/null)" -- "$word"));;
    esac
}}
complete -o default -F _drivetrain drivetrain
"""

ZSH = "autoload -U +X bashcompinit && bashcompinit\nshopt() {{ :; }}\n" + BASH

FISH = """\
complete -c drivetrain -f
complete -c drivetrain -n __fish_use_subcommand -a "{verbs}"
complete -c drivetrain -n "__fish_seen_subcommand_from {run_words}" -a "(ls runs 2>/dev/null)"
complete -c drivetrain -n "__fish_seen_subcommand_from train tune verify-resume" -a "{tasks} (__fish_complete_suffix .py)"
complete -c drivetrain -n "__fish_seen_subcommand_from completion" -a "bash zsh fish"
"""


def run(verb: str, words: list[str]) -> int:
    parser = Parser(
        "drivetrain completion", "Print a completion script: for bash, put `source <(drivetrain completion bash)` into ~/.bashrc."
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    args = parser.parse(words)
    script = {"bash": BASH, "zsh": ZSH, "fish": FISH}[args.shell]
    names = {"verbs": " ".join(VERBS), "flags": FLAGS, "tasks": " ".join(BUILT_IN)}
    print(script.format(run_verbs=RUN_VERBS, run_words=RUN_VERBS.replace("|", " "), **names), end="")
    return 0
