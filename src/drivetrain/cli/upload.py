"""`upload`: copy a finished run's model to a bucket, or what is missing of a run to its own bucket."""

from __future__ import annotations

from drivetrain.cli.flags import Parser, add_common, bucket_address
from drivetrain.outcomes import Problem

TEXT = """\
With URL: upload a finished run's model and its card to URL/models/RUN/ and URL/models/latest/.
Without: copy what is missing of a run that was trained with --run-dir URL to that address."""


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain upload", TEXT)
    parser.add_argument("target", metavar="RUN", help="a run's name or folder")
    parser.add_argument(
        "url", nargs="?", type=bucket_address("URL"), metavar="URL", help="s3://BUCKET/PATH, gs://BUCKET/PATH or file:///FOLDER"
    )
    add_common(parser)
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)

    from drivetrain import runs
    from drivetrain.launch.bucket import copy_to_bucket, upload_finished
    from drivetrain.watch.screen import Screen

    screen, run_dir = Screen(quiet=args.quiet), runs.find(args.target)
    if args.url is not None:
        upload_finished(run_dir, args.url, screen)
    elif not copy_to_bucket(run_dir, screen):
        raise Problem(f"{run_dir.name} has no bucket: name one to upload its model (drivetrain upload {run_dir.name} s3://BUCKET/PATH)")
    return 0
