"""`predict`: print what a run's model predicts for an input."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

from drivetrain.cli.flags import Parser, add_common
from drivetrain.outcomes import Problem
from drivetrain.settings import coerce, nearest
from drivetrain.terminal import printable

TEXT = """\
Give an input to a run's model and print its prediction as it comes: a language model continues the text.
Options after the input are the task's own, as NAME=VALUE or --NAME VALUE (for lora: tokens=200 temperature=0). The
input may have its name, too (for cxr: --image x.jpg --question "..."). A finished run's final weights are taken,
else its last good checkpoint's."""


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain predict", TEXT)
    parser.add_argument("target", metavar="RUN", help="a run's name or folder")
    parser.add_argument("input", metavar="INPUT", nargs="?", help="the input; - reads it from standard input")
    parser.add_argument("options", metavar="NAME=VALUE", nargs="*", help="options of the task's own")
    add_common(parser)
    return parser


def run(verb: str, words: list[str]) -> int:
    own_parser = parser(verb)
    flags, others = _task_flags(words, own_parser)
    args = own_parser.parse(others)
    if args.input is None and not flags:
        own_parser.error("give its input: drivetrain predict RUN INPUT")

    from drivetrain import runs
    from drivetrain.launch.trained import load_trained, user_code
    from drivetrain.watch.screen import Screen

    run_dir = runs.find(args.target)
    task, model = load_trained(run_dir, Screen(sys.stderr, args.quiet))
    given, options = _input_and_options(task.predict, args.input, args.options, flags)
    text = _read_standard_input() if given == "-" else given
    with user_code(run_dir):
        pieces = task.predict(model, text, **options)
        if not isinstance(pieces, Iterable):
            raise Problem(f"{type(task).__name__}.predict gave a {type(pieces).__name__}: yield pieces of text")
        for piece in pieces:
            print(printable(str(piece)), end="", flush=True)
    print()
    return 0


def _read_standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise Problem("the standard input is not UTF-8 text") from None


def _task_flags(words: list[str], own: Parser) -> tuple[dict[str, str], list[str]]:
    """Splits the words into the task's own flags, --NAME VALUE or --NAME=VALUE, and all others."""
    known = {flag for action in own.actions for flag in action.option_strings}
    flags: dict[str, str] = {}
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if word == "--":
            return flags, [*others, word, *rest]
        if not flag.startswith("--") or flag in known:
            others.append(word)
            continue
        following = value if equals else next(rest, None)
        if following is None:
            raise Problem(f"{flag} needs a value: {flag} VALUE")
        flags[flag[2:].replace("-", "_")] = following
    return flags, others


def _input_and_options(
    predict: Callable[..., Any], first: str | None, words: list[str], flags: dict[str, str]
) -> tuple[str, dict[str, Any]]:
    """Returns the input, which a flag with the name of the parameter may give, and the options."""
    input_name = next(iter(list(inspect.signature(predict).parameters)[1:]), "")
    named_input = flags.pop(input_name, None)
    if named_input is not None:
        words = [first, *words] if first is not None else words
    given = first if named_input is None else named_input
    options = _read_options(predict, [*words, *(f"{name}={value}" for name, value in flags.items())])
    if given is None:
        raise Problem(f"predict needs an input, too: give its input, drivetrain predict RUN INPUT or --{input_name} INPUT")
    return given, options


def _read_options(predict: Callable[..., Any], words: list[str]) -> dict[str, Any]:
    """Converts NAME=VALUE words to the types that the task's `predict` declares."""
    try:
        types = get_type_hints(predict)
    except (NameError, TypeError):  # it has names that only type checkers import: all options stay text
        types = {}
    parameters = inspect.signature(predict).parameters
    names = [name for name, parameter in parameters.items() if parameter.default is not parameter.empty]
    options = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in names:
            raise Problem(f"predict has no option {word!r}{nearest(name, names)} (of this task: {', '.join(names) or 'none'})")
        try:
            options[name] = coerce(types.get(name, str), value)
        except ValueError as error:
            raise Problem(f"{word} does not fit: {name} is {error}") from None
    return options
