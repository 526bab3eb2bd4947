"""Pictures that `remarks` returns: PNG files in media/, and images in TensorBoard."""

from __future__ import annotations

import errno
import json
import re
import socket
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from drivetrain import Picture, Task, Tensors
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.log.pictures import PngImage
from drivetrain.engine.loop import Training
from drivetrain.outcomes import Outcome
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.watch import files
from drivetrain.watch.files import MetricsFile, PictureFiles, TensorBoard
from tests.command import run_drivetrain, run_ok
from tests.sample_tasks import HARDWARE
from tests.test_docs import BLOCK

PAGE = Path(__file__).parent.parent / "docs" / "tasks.md"
ALONE = Group(0, 1, torch.device("cpu"))
GREY = np.arange(12, dtype=np.uint8).reshape(3, 4)
COLOUR = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def pixels_of(png: bytes) -> np.ndarray[Any, Any]:
    """Decodes a PNG file of 8 bits, grey or RGB, by the specification."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    position, data, header = 8, b"", b""
    while position < len(png):
        length, kind = struct.unpack(">I4s", png[position : position + 8])
        content = png[position + 8 : position + 8 + length]
        assert struct.unpack(">I", png[position + 8 + length : position + 12 + length])[0] == zlib.crc32(kind + content)
        header, data = (content, data) if kind == b"IHDR" else (header, data + (content if kind == b"IDAT" else b""))
        position += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", header[:10])
    assert depth == 8 and colour in (0, 2)
    channels = 3 if colour else 1
    lines, before = zlib.decompress(data), [0] * (width * channels)
    rows = []
    for y in range(height):
        kind, *line = lines[y * (width * channels + 1) : (y + 1) * (width * channels + 1)]
        for x, value in enumerate(line):
            left, above = line[x - channels] if x >= channels else 0, before[x]
            corner = before[x - channels] if x >= channels else 0
            nearest = min((left, above, corner), key=lambda neighbour: abs(left + above - corner - neighbour))  # Paeth: the first of equals
            line[x] = (value + (0, left, above, (left + above) // 2, nearest)[kind]) % 256
        rows.append(line)
        before = line
    return np.array(rows, np.uint8).reshape((height, width, 3) if colour else (height, width))


class Dots(Task):
    """A linear task that returns `pictures` from `remarks`, and counts its calls."""

    pictures = ()
    num_calls = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def train_data(self) -> Tensors:
        return Tensors(torch.arange(64.0).view(16, 4) / 64, torch.zeros(16, 1))

    eval_data = train_data

    def loss(self, model: Any, batch: Any) -> Any:
        return (model(batch[0]) - batch[1]).square().mean()

    def remarks(self, model: Any) -> Any:
        self.num_calls += 1
        model(torch.zeros(1, 4))
        return self.pictures


class Recorder(Observer):
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.pictures: list[tuple[int, str]] = []
        self.num_remarks = 0

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def picture(self, step: int, image: PngImage) -> None:
        self.pictures.append((step, image.name))


def train(folder: Path, pictures: Any, group: Group = ALONE, **pins: Any) -> Recorder:
    """Trains three epochs of two steps, with an evaluation before them and after each; every rank has a recorder."""
    task = type("Dots", (Dots,), {"pictures": pictures})(epochs=3, global_batch=8, eval_first=True)
    all_pins = {"threads": 1, "workers": 0} | pins
    plan = choose(task.settings(), HARDWARE, device="cpu", world_size=group.size, local_procs=group.size, pins=all_pins)
    run, recorder = Run(folder), Recorder()
    writers = [MetricsFile(run), PictureFiles(run, recorder.notice), TensorBoard(folder / "tensorboard")] if group.is_main else []
    training = Training(task, plan, run, group, Observers([*writers, recorder]), False)
    assert training.run_to_end().outcome is Outcome.OK
    training.setup.observer.close()
    recorder.num_remarks = task.num_calls
    return recorder


def media(run: Path) -> dict[str, bytes]:
    """Returns the content of all files in media/, also of hidden ones."""
    return {path.name: path.read_bytes() for path in sorted((run / "media").iterdir())}


def images(run: Path) -> dict[str, list[tuple[int, bytes]]]:
    """Returns tag -> (step, file) of the images in TensorBoard's files."""
    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0}).Reload()
    return {tag: [(event.step, event.encoded_image_string) for event in reader.Images(tag)] for tag in reader.Tags()["images"]}


# --- commands ------------------------------------------------------------------------------------


def write_example() -> None:
    """Writes the example of the page about tasks."""
    section = PAGE.read_text().split("\n## Pictures")[1].split("\n## ")[0]
    [example] = [block["text"] for block in BLOCK.finditer(section) if block["kind"] == "python"]
    Path("filters.py").write_text(example)


def test_the_example_of_the_docs_writes_its_weights_as_pictures(folder: Path) -> None:
    write_example()
    run_ok("train", "filters.py", "--name", "filters")
    run = Path("runs/filters")
    pictures = media(run)
    assert list(pictures) == ["filters-00000022.png", "filters-00000044.png"]
    row = torch.cat(list(load_file(run / "model" / "model.safetensors")["1.weight"].view(10, 8, 8)), dim=1)
    grey = (255 * (row - row.min()) / (row.max() - row.min())).to(torch.uint8)
    assert (pixels_of(pictures["filters-00000044.png"]) == grey.numpy()).all()
    assert pictures["filters-00000022.png"] != pictures["filters-00000044.png"]
    assert images(run) == {"filters": [(22, pictures["filters-00000022.png"]), (44, pictures["filters-00000044.png"])]}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines = [event["text"] for event in events if event["event"] == "remark"]
    assert len(lines) == 2 and all(re.fullmatch(r"largest weight 0\.\d\d", line) for line in lines), "pictures are no lines of the log"


@pytest.mark.parametrize("pins", [[], ["plan.strategy=fsdp"]], ids=["ddp", "fsdp"])
def test_two_processes_write_the_same_files(pins: list[str], folder: Path) -> None:
    write_example()
    run_ok("train", "filters.py", "--name", "one")
    run_ok("train", "filters.py", "--name", "two", "--procs", "2", *pins)
    one, two = media(Path("runs/one")), media(Path("runs/two"))
    assert one.keys() == two.keys()
    for name in one:  # another order of sums may change the rounding
        assert np.abs(pixels_of(one[name]).astype(int) - pixels_of(two[name])).max() <= 1
    assert [step for step, _ in images(Path("runs/two"))["filters"]] == [22, 44]


def test_a_resumed_run_replaces_the_files_of_the_steps_that_it_repeats(folder: Path) -> None:
    """It is killed after the evaluation of step 22, and resumes from step 20."""
    write_example()
    words = ["train", "filters.py", "save_every=20"]
    run_ok(*words, "--name", "undisturbed")
    assert run_drivetrain(*words, "--name", "killed", DRIVETRAIN_FAULTS="kill@step:30").returncode == -9
    folder_of_pictures = Path("runs/killed/media")
    repeated = folder_of_pictures / "filters-00000022.png"
    before = repeated.stat().st_ino, repeated.read_bytes()
    kept = open(repeated, "rb")  # noqa: SIM115 (so that its inode is not used again)
    half_written = folder_of_pictures / f".filters-00000022.png-{socket.gethostname()}-4194304-abc"
    half_written.write_bytes(b"half")
    assert "resume  from step 20" in run_ok("resume", "killed")
    assert kept.read() == before[1], "the old file is whole for who reads it"
    kept.close()
    assert repeated.stat().st_ino != before[0]
    assert media(Path("runs/killed")) == media(Path("runs/undisturbed"))
    assert images(Path("runs/killed")) == images(Path("runs/undisturbed"))


# --- forms of pictures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "image",
    [GREY, COLOUR, COLOUR.numpy(), COLOUR.transpose(0, 1), COLOUR[:, :, 0], GREY[:1, :1], np.zeros((2, 3), np.uint8), COLOUR[::2, ::3]],
    ids=["grey", "tensor", "array", "transposed", "strided", "one pixel", "black", "part"],
)  # fmt: skip
def test_the_pixels_of_a_file_are_those_of_the_image(image: Any, tmp_path: Path) -> None:
    recorder = train(tmp_path, Picture("x", image))
    assert recorder.notices == [text for text in recorder.notices if text.startswith("before the first step")]
    pictures = media(tmp_path)
    assert list(pictures) == [f"x-{step:08d}.png" for step in (0, 2, 4, 6)]
    for content in pictures.values():
        assert np.array_equal(pixels_of(content), np.asarray(image))
    assert images(tmp_path) == {"x": [(step, pictures[f"x-{step:08d}.png"]) for step in (0, 2, 4, 6)]}


FAULTS = {
    "float": (Picture("x", torch.zeros(4, 4)), r"float32 of shape \[4, 4\] for the Picture 'x': uint8 of shape"),
    "channels first": (Picture("x", np.zeros((3, 8, 8), np.uint8)), r"uint8 of shape \[3, 8, 8\]"),
    "four channels": (Picture("x", np.zeros((8, 8, 4), np.uint8)), r"uint8 of shape \[8, 8, 4\]"),
    "one dimension": (Picture("x", np.zeros(8, np.uint8)), r"uint8 of shape \[8\]"),
    "four dimensions": (Picture("x", np.zeros((2, 8, 8, 3), np.uint8)), r"uint8 of shape \[2, 8, 8, 3\]"),
    "no pixels": (Picture("x", np.zeros((0, 8), np.uint8)), r"uint8 of shape \[0, 8\]"),
    "list": (Picture("x", [[1]]), "gave list for the Picture 'x'"),
    "none": (Picture("x", None), "gave NoneType"),
    "meta": (Picture("x", torch.zeros(2, 2, dtype=torch.uint8, device="meta")), "a Picture that cannot be encoded: "),
    "sparse": (Picture("x", torch.eye(2, dtype=torch.uint8).to_sparse()), "a Picture that cannot be encoded: "),
    "path": (Picture("../x", GREY), "with the name '../x': write letters, digits, - and _"),
    "folder": (Picture("a/b", GREY), "with the name 'a/b'"),
    "space": (Picture("a b", GREY), "with the name 'a b'"),
    "newline": (Picture("x\n", GREY), r"with the name 'x\\n'"),
    "accent": (Picture("é", GREY), "with the name 'é'"),
    "empty": (Picture("", GREY), "with the name ''"),
    "number": (Picture(3, GREY), "with the name 3"),  # type: ignore[arg-type]
    "long": (Picture("x" * 300, GREY), "with the name 'xxx"),
    "twice": (Picture("good", COLOUR), "two Pictures with the name 'good'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_picture_causes_one_notice_and_the_training_finishes(name: str, tmp_path: Path) -> None:
    picture, message = FAULTS[name]
    recorder = train(tmp_path / "run", [Picture("good", GREY), picture, "a line"])
    notices = [text for text in recorder.notices if "Picture" in text]
    assert len(notices) == 1 and re.search(message, notices[0]), recorder.notices
    assert len(notices[0]) < 300 and "\n" not in notices[0] and notices[0].endswith("the training continues without such pictures")
    assert recorder.notices.count("a line") == 4
    pictures = media(tmp_path / "run")
    assert list(pictures) == [f"good-{step:08d}.png" for step in (0, 2, 4, 6)]
    assert all(np.array_equal(pixels_of(content), GREY) for content in pictures.values())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("fault", ["full disk", "no folder"])
def test_a_picture_that_cannot_be_written_causes_one_notice(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "no folder":
        (tmp_path / "media").write_text("a file")
    else:

        def fail(path: Path, content: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files, "write_atomic", fail)
    recorder = train(tmp_path, [Picture("a", GREY), Picture("b", GREY)])
    [notice] = [text for text in recorder.notices if "cannot be written" in text]
    assert "media/a-00000000.png cannot be written: " + ("File exists" if fault == "no folder" else "No space") in notice
    assert {tag: len(events) for tag, events in images(tmp_path).items()} == {"a": 4, "b": 4}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_only_rank_0_gets_pictures(group: Group, strategy: str, tmp_path: Path) -> None:
    recorder = train(tmp_path, Picture("x", GREY), group, strategy=strategy)
    assert recorder.num_remarks == (4 if group.is_main or strategy == "fsdp" else 0)
    assert recorder.pictures == ([(step, "x") for step in (0, 2, 4, 6)] if group.is_main else [])
