"""`image`: build the image of runs in containers."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from drivetrain.cli.flags import Parser
from drivetrain.outcomes import Problem
from drivetrain.terminal import one_line, show

if TYPE_CHECKING:
    from drivetrain.targets.consent import Consent
    from drivetrain.targets.gcp.builds import Builder

TEXT = """\
build: build the image in which the target docker trains (--on docker), from this version of drivetrain.
compose: print a compose file for trainings without the target. list: show the images that were built last."""


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain image", TEXT)
    parser.add_argument("action", choices=["build", "compose", "list"], help="what to do")
    parser.add_argument("--gpu", action="store_true", help="torch for NVIDIA GPUs (default: for CPUs)")
    parser.add_argument("--base", metavar="IMAGE", help="the image to build on (default python:3.12-slim); if it has torch, that is kept")
    parser.add_argument("--tag", default="", metavar="NAME", help="the image's name (default drivetrain:cpu or drivetrain:gpu)")
    parser.add_argument("--push", metavar="REF", help="push it to a registry; runs then use this name")
    parser.add_argument("--build-arg", action="append", default=[], type=build_argument, metavar="NAME=VALUE",
                        help="an ARG of the Dockerfile, such as EXTRAS=rl, TORCH_BACKEND=cu130 or PIP_ARGS=...")  # fmt: skip
    parser.add_argument(
        "--cloud-build", action="store_true", help="build with Google Cloud Build, which costs money, and keep it at --push"
    )
    parser.add_argument("--on", metavar="TARGET", help="with --cloud-build: the target of kind gcp whose account builds")
    parser.add_argument("--yes", action="store_true", help="do not ask whether Cloud Build may cost money")
    parser.add_argument("--engine", choices=["docker", "podman"], help="the container engine (default: the one that is there)")
    parser.add_argument("--dry-run", action="store_true", help="show the files and commands, and stop")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show the engine's output")
    return parser


def build_argument(text: str) -> tuple[str, str]:
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", text):
        raise argparse.ArgumentTypeError(f"{text[:80]}: write NAME=VALUE")
    name, _, value = text.partition("=")
    return name, value


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)
    return {"build": _build, "compose": _compose, "list": _list}[args.action](args)


def _build(args: argparse.Namespace) -> int:
    from drivetrain.targets.image import build as image

    if args.on and not args.cloud_build:
        raise Problem("--on is for --cloud-build: add it, or leave out --on")
    build = image.ImageBuild(
        variant="gpu" if args.gpu else "cpu", base=args.base or image.BASE, tag=args.tag, push=args.push,
        arguments=dict(args.build_arg), engine=args.engine,
    )  # fmt: skip
    builder = None
    if args.cloud_build:
        image.check_cloud_build(build)
        image.check_build(build)
        builder = _builder(args.on, str(build.push))
    if args.dry_run:
        show(image.render_build(build, builder).text())
        return 0

    def progress(line: str) -> None:
        if not args.quiet:
            show(one_line(line))

    if builder is None:
        built = image.build_image(build, progress)
    else:
        built = image.cloud_build(build, builder, _consent(args.yes), progress)
    show(f"image     {built.tag}   {built.digest or 'without a digest'}   next: drivetrain train digits --on docker")
    return 0


def _builder(target: str | None, push: str) -> Builder:
    from drivetrain.targets.config import find_target
    from drivetrain.targets.gcp.builds import find_builder

    return find_builder(find_target(target) if target else None, push, show)


def _consent(is_agreed: bool) -> Consent:
    """Shows what a build costs, and returns the user's consent."""
    from drivetrain.targets.consent import ask_consent
    from drivetrain.targets.gcp.builds import build_cost

    return ask_consent("build with Cloud Build", build_cost(), show, input if sys.stdin.isatty() else None, is_agreed)


def _compose(args: argparse.Namespace) -> int:
    from drivetrain.targets.image.build import compose_text

    print(compose_text(), end="")
    return 0


def _list(args: argparse.Namespace) -> int:
    import time

    from drivetrain.targets.image.record import read_images

    images = read_images()
    for variant, image in images.items():
        show(
            f"{variant}   {image.tag}   {image.digest}   {time.strftime('%Y-%m-%d %H:%M', time.localtime(image.built))}   from {image.base}"
        )
    if not images:
        show("no image was built yet: drivetrain image build")
    return 0
