"""`play`: watch a run's agents in the browser, or play against them."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.cli.flags import Parser, add_common, folder_flag, whole_number
from drivetrain.outcomes import Problem

if TYPE_CHECKING:
    from drivetrain.play import ExportedAgent
    from drivetrain.runs import Run
    from drivetrain.watch.screen import Screen

TEXT = """\
Watch agents play in the browser, by the very rules they were trained with, or take over a snake yourself. RUN is
a run that learned by playing (it is exported where that is still to be done), or snake or cartpole, which come
with the package; several can be chosen from on the page. Episode N is episode N of drivetrain eval."""


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain play", TEXT)
    parser.add_argument("targets", metavar="RUN", nargs="*", help="runs' names or folders, snake, cartpole (default: those two)")
    parser.add_argument("--out", type=folder_flag("--out"), metavar="DIR", help="write a static site for any web server, and serve nothing")
    parser.add_argument("--port", type=whole_number(0, 65535), default=0, metavar="N", help="the port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--no-open", action="store_true", help="print the address and open no browser")
    add_common(parser)
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)

    from drivetrain import play
    from drivetrain.watch.screen import Screen, format_size

    screen = Screen(quiet=args.quiet)
    agents = [_find_agent(target, screen) for target in dict.fromkeys(args.targets)] or play.shipped_agents()
    for agent in agents:
        play.check(agent)
    files = play.site(agents)
    if args.out:
        num_bytes = play.write_site(files, Path(args.out))
        screen.line("play", f"{args.out}: {len(files)} files, {format_size(num_bytes)}; any web server can serve it, from any path")
        return 0
    with play.server(files, args.port) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        screen.line("play", f"{address}   {', '.join(agent.name for agent in agents)}   (Ctrl-C ends it)")
        if not args.no_open and _has_screen():
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            screen.line("", "ended")
    return 0


def _find_agent(target: str, screen: Screen) -> ExportedAgent:
    """Returns the export of a run, which is made if it is missing or old; or an agent that comes with the package."""
    from drivetrain import play, runs

    shipped = {agent.name: agent for agent in play.shipped_agents()}
    try:
        run_dir = runs.find(target)
    except Problem:
        if target in shipped:
            return shipped[target]
        raise
    agent = play.ExportedAgent(run_dir.name, run_dir.path / ("model" if run_dir.is_finished else "export"))
    if not (agent.folder / runs.EXPORT_CARD).is_file() or not play.is_current(agent, run_dir):
        screen.busy("making graphs ...")
        _export(run_dir, agent, screen)
    return agent


def _export(run_dir: Run, agent: ExportedAgent, screen: Screen) -> None:
    from drivetrain import play
    from drivetrain.export import export
    from drivetrain.launch.trained import load_trained, user_code

    task, model = load_trained(run_dir, screen)
    with user_code(run_dir):
        if not play.is_playable(task.exports(model) or {}):
            raise play.not_playable(run_dir.name, type(task).__name__)
        export(task, model, run_dir, agent.folder)


def _has_screen() -> bool:
    """Whether a graphical browser can open; one in the terminal would take over the terminal."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
