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
Options after the input are the task's own, as NAME=VALUE (for lora: tokens=200 temperature=0). A finished run's
final weights are taken, else its last good checkpoint's."""


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain predict", TEXT)
    parser.add_argument("target", metavar="RUN", help="a run's name or folder")
    parser.add_argument("input", metavar="INPUT", help="the input; - reads it from standard input")
    parser.add_argument("options", metavar="NAME=VALUE", nargs="*", help="options of the task's own")
    add_common(parser)
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)

    from drivetrain import runs
    from drivetrain.launch.trained import load_trained, user_code
    from drivetrain.watch.screen import Screen

    run_dir = runs.find(args.target)
    task, model = load_trained(run_dir, Screen(sys.stderr, args.quiet))
    text = _read_standard_input() if args.input == "-" else args.input
    options = _read_options(task.predict, args.options)
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
