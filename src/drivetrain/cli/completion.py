"""`completion`: print a script that lets a shell complete verbs, flags, choices, tasks and runs."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterator

from drivetrain.cli import VERBS
from drivetrain.cli.flags import Parser
from drivetrain.task_ref import built_in_names

SHELLS = ("bash", "zsh", "fish")

BASH = """\
_drivetrain() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} verb=${{COMP_WORDS[1]}}
    if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W {verbs} -- "$word")); return; fi
    case "$verb $previous" in
{choices}
    esac
    case $word in -*)
        case $verb in
{flags}
        esac
        return;;
    esac
    case $verb in
{arguments}
    esac
}}
complete -o default -F _drivetrain drivetrain
"""

ZSH_PREFIX = "autoload -U +X bashcompinit && bashcompinit\nshopt() { :; }\n"

RUNS = "$(ls runs 2>/dev/null)"
BASH_ARGUMENTS = {
    "RUN": f'COMPREPLY=($(compgen -W "{RUNS}" -- "$word"))',
    "TASK": """COMPREPLY=($(compgen -W "{tasks}" -- "$word") $(compgen -f -X '!*.@(py|yaml)' -- "$word"))""",
}
FISH_ARGUMENTS = {"RUN": "(ls runs 2>/dev/null)", "TASK": "{tasks} (__fish_complete_suffix .py) (__fish_complete_suffix .yaml)"}


def parser(verb: str) -> Parser:
    parser = Parser(
        "drivetrain completion", "Print a completion script: for bash, put `source <(drivetrain completion bash)` into ~/.bashrc."
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)
    script = fish_script() if args.shell == "fish" else bash_script()
    print((ZSH_PREFIX if args.shell == "zsh" else "") + script, end="")
    return 0


def verb_parsers() -> dict[str, Parser]:
    """Returns the argument parser of every verb."""
    return {verb: importlib.import_module(f"drivetrain.cli.{module}").parser(verb) for verb, (module, _) in VERBS.items()}


def bash_script() -> str:
    choices, flags, arguments = [], [], []
    for verb, parser in verb_parsers().items():
        for action in flag_actions(parser):
            if action.choices:
                pattern = "|".join(f'"{verb} {flag}"' for flag in action.option_strings)
                choices.append(f"        {pattern}) {_bash_reply(action.choices)}; return;;")
        names = [flag for action in flag_actions(parser) for flag in action.option_strings]
        flags.append(f"            {verb}) {_bash_reply(names)};;")
        for reply in _bash_arguments(parser):
            arguments.append(f"        {verb}) {reply};;")
    return BASH.format(
        verbs=shlex.quote(" ".join(VERBS)), choices="\n".join(choices), flags="\n".join(flags), arguments="\n".join(arguments)
    )


def _bash_reply(words: object) -> str:
    return f'COMPREPLY=($(compgen -W {shlex.quote(_joined(words))} -- "$word"))'


def _bash_arguments(parser: Parser) -> Iterator[str]:
    """Yields at most one reply for the positional arguments: the words of a choice, and runs or tasks."""
    words = " ".join(_joined(action.choices) for action in positional_actions(parser) if action.choices)
    kinds = [str(action.metavar) for action in positional_actions(parser) if action.metavar in BASH_ARGUMENTS]
    if kinds == ["RUN"]:
        yield f'COMPREPLY=($(compgen -W "{f"{words} {RUNS}".strip()}" -- "$word"))'
    elif kinds:
        yield BASH_ARGUMENTS[kinds[0]].format(tasks=" ".join(built_in_names()))
    elif words:
        yield _bash_reply(words.split())


def fish_script() -> str:
    lines = ["complete -c drivetrain -f", f"complete -c drivetrain -n __fish_use_subcommand -a {shlex.quote(' '.join(VERBS))}"]
    for verb, parser in verb_parsers().items():
        prefix = f'complete -c drivetrain -n "__fish_seen_subcommand_from {verb}"'
        for action in flag_actions(parser):
            names = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in action.option_strings]
            value = "" if action.nargs == 0 else " -r"
            choices = f" -a {shlex.quote(_joined(action.choices))}" if action.choices else ""
            lines.append(f"{prefix} {' '.join(names)}{value}{choices}")
        for action in positional_actions(parser):
            if action.choices:
                lines.append(f"{prefix} -a {shlex.quote(_joined(action.choices))}")
            if action.metavar in FISH_ARGUMENTS:
                lines.append(f'{prefix} -a "{FISH_ARGUMENTS[str(action.metavar)].format(tasks=" ".join(built_in_names()))}"')
    return "\n".join(lines) + "\n"


def flag_actions(parser: Parser) -> list[argparse.Action]:
    return [action for action in parser.actions if action.option_strings]


def positional_actions(parser: Parser) -> list[argparse.Action]:
    return [action for action in parser.actions if not action.option_strings]


def _joined(words: object) -> str:
    return " ".join(map(str, words)) if isinstance(words, (list, tuple)) else str(words)
