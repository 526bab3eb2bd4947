"""IDX and CIFAR-10 files are found in folders, checked, and downloaded once; a download is continued and verified."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import multiprocessing
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.outcomes import Outcome, Problem
from drivetrain.tasks import datasets
from drivetrain.tasks.vision.nets import SmallCNN
from tests.command import expect_error, run_ok


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, zipped: bool = True, samples: int = 120) -> None:
    """Files in MNIST's format in which each digit is a bright square at a position of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for prefix, count in (("train", samples), ("t10k", 50)):
        labels = rng.integers(0, 10, count)
        images = rng.integers(0, 60, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[label * 2 + 4 : label * 2 + 8, 6:22] = 255
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            data = idx_bytes(array)
            name = f"{prefix}-{kind}-ubyte"
            (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(data) if zipped else data)


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_trains_from_files(zipped: bool, folder: Path) -> None:
    write_mnist(Path("data/mnist") if zipped else Path("data"), zipped)
    output = run_ok("train", "mnist", "epochs=6", "global_batch=20", DRIVETRAIN_OFFLINE="1")
    assert "225,034 parameters" in output
    assert "Dataset:            mnist" in Path("runs/mnist-001/summary.txt").read_text()


def test_the_small_cnn_has_as_many_parameters_as_in_the_guide() -> None:
    assert sum(p.numel() for p in SmallCNN().parameters()) == 225_034


def test_without_a_network_the_error_names_the_files_and_their_folder(folder: Path) -> None:
    message = expect_error("train", "fashion-mnist", DRIVETRAIN_OFFLINE="1")
    assert "train-images-idx3-ubyte[.gz]" in message
    assert f"{folder}/data/fashion-mnist" in message
    assert "DRIVETRAIN_OFFLINE=1" in message


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"<html>404</html>", "begins with 3c 68 74 6d"),
        (gzip.compress(b"\x00\x00\x08\x03" + bytes(12), mtime=0)[:-6], "not an IDX file"),
        (b"\x00\x00\x08\x03\x00\x00\x00\x02\x00\x00\x00\x02\x00\x00\x00\x02" + bytes(7), "7 bytes of data where its header says 8"),
        (b"", "not an IDX file"),
    ],
)
def test_a_file_that_is_no_idx_file_is_refused(data: bytes, why: str, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(data)
    with pytest.raises(Problem, match=why) as caught:
        datasets.idx("mnist", "train", str(tmp_path))
    assert caught.value.outcome is Outcome.USAGE


class _Server(http.server.BaseHTTPRequestHandler):
    content: bytes = b""
    break_after: int | None = None
    requests: list[str | None] = []

    def do_GET(self) -> None:
        byte_range = self.headers.get("Range")
        self.requests.append(byte_range)
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/file.gz")
            self.end_headers()
            return
        start = int(byte_range.split("=")[1].rstrip("-")) if byte_range else 0
        body = self.content[start:]
        self.send_response(206 if byte_range else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.break_after is not None:
            self.wfile.write(body[: self.break_after])
            type(self).break_after = None
            return
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[_Server]]]:
    monkeypatch.setattr(datasets, "SCHEMES", ("http",))  # the test's server has no certificate

    class Server(_Server):
        content = np.random.default_rng(0).bytes(700_000)
        requests: list[str | None] = []

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listener.server_port}/file.gz", Server
    listener.shutdown()


def test_an_interrupted_download_is_continued(server: tuple[str, type[_Server]], tmp_path: Path) -> None:
    address, handler = server
    handler.break_after = 300_000
    sha256 = hashlib.sha256(handler.content).hexdigest()
    target = tmp_path / "sub" / "file.gz"
    with pytest.raises(Problem):
        datasets.fetch(address, target, sha256, "bring it")
    assert not target.exists()
    datasets.fetch(address, target, sha256, "bring it")
    assert target.read_bytes() == handler.content
    assert handler.requests[1] is not None
    assert handler.requests[1].startswith("bytes=")


def test_a_download_with_another_hash_is_deleted(server: tuple[str, type[_Server]], tmp_path: Path) -> None:
    address, _ = server
    with pytest.raises(Problem, match="the download was deleted"):
        datasets.fetch(address, tmp_path / "file.gz", "0" * 64, "bring it")
    assert not (tmp_path / "file.gz").exists()


@pytest.mark.parametrize("part", [b"", b"other bytes"])
def test_a_tampered_file_is_removed_with_a_message_of_one_line(part: bytes, server: tuple[str, type[_Server]], tmp_path: Path) -> None:
    address, handler = server
    sha256 = hashlib.sha256(handler.content).hexdigest()
    if part:
        (tmp_path / ".file.gz.part").write_bytes(part)
    else:
        handler.content = handler.content[:-1] + b"!"
    with pytest.raises(Problem, match="SHA-256") as error:
        datasets.fetch(address, tmp_path / "file.gz", sha256, "bring it")
    assert len(str(error.value).splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == [".file.gz.lock"]


def test_only_encrypted_urls_are_downloaded(server: tuple[str, type[_Server]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, handler = server
    with pytest.raises(Problem, match=r"ftp://127.0.0.1/file.gz is not encrypted"):
        datasets.fetch(address.replace("file.gz", "moved"), tmp_path / "file.gz", "0" * 64, "bring it")
    monkeypatch.undo()
    with pytest.raises(Problem, match=r"not encrypted: only https addresses are allowed.*bring it"):
        datasets.fetch(address, tmp_path / "file.gz", "0" * 64, "bring it")
    assert len(handler.requests) == 1
    sources = [datasets.CIFAR10_URL, *(address for address, _ in datasets.IDX_SOURCES.values())]
    assert all(source.startswith("https://") for source in sources)
    hashes = [datasets.CIFAR10_SHA256, *(sha256 for _, files in datasets.IDX_SOURCES.values() for sha256 in files.values())]
    assert [len(sha256) for sha256 in hashes] == [64] * 9


@pytest.mark.parametrize("load", [lambda where: datasets.idx("mnist", "train", where), lambda where: datasets.cifar10("train", where)])
def test_data_in_a_bucket_is_refused(load: Any, folder: Path) -> None:
    with pytest.raises(Problem, match="data_dir s3://bucket/x: s3 addresses are not supported"):
        load("s3://bucket/x")
    assert not list(folder.iterdir())


def _fetch(address: str, target: Path, sha256: str) -> None:
    datasets.fetch(address, target, sha256, "bring it")


def test_processes_that_need_a_file_download_it_once(server: tuple[str, type[_Server]], tmp_path: Path) -> None:
    address, handler = server
    sha256 = hashlib.sha256(handler.content).hexdigest()
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_fetch, args=(address, tmp_path / "file.gz", sha256)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [c.exitcode for c in children] == [0, 0, 0, 0]
    assert len(handler.requests) == 1


def test_an_unreachable_server_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"could not be fetched.*bring it"):
        datasets.fetch("https://127.0.0.1:9/file.gz", tmp_path / "file.gz", "0" * 64, "bring it")


# --- CIFAR-10 ----------------------------------------------------------------------------------


def cifar_files(records: int = 20) -> dict[str, bytes]:
    """Short files in CIFAR-10's binary format. Every pixel of image i has red i, the number of the file as green, and blue 7."""
    files = {}
    for number, name in enumerate([*datasets.CIFAR10_FILES["train"], *datasets.CIFAR10_FILES["test"]]):
        rows = [bytes([i % 10]) + bytes([i]) * 1024 + bytes([number]) * 1024 + bytes([7]) * 1024 for i in range(records)]
        files[name] = b"".join(rows)
    return files


def write_cifar(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in cifar_files().items():
        (folder / name).write_bytes(data)


def write_archive(path: Path, files: dict[str, bytes], zipped: str = "w:gz") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, zipped) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def assert_cifar(folder: Path) -> None:
    x, y = datasets.cifar10("train", str(folder))[:]
    assert (x.shape, x.dtype, y.dtype) == ((100, 3, 32, 32), torch.uint8, torch.int64)
    assert [int(v) for v in x[47, :, 5, 6]] == [7, 2, 7]
    assert int(y[47]) == 7
    assert int(datasets.cifar10("test", str(folder))[:][0][3, 1, 0, 0]) == 5


@pytest.mark.parametrize("subfolder", [".", "cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_cifar_files_are_found(subfolder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_OFFLINE", "1")
    write_cifar(tmp_path / subfolder)
    assert_cifar(tmp_path)


@pytest.mark.parametrize("subfolder", [".", "cifar10"])
def test_the_cifar_archive_is_unpacked(subfolder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_OFFLINE", "1")
    files = {f"cifar-10-batches-bin/{name}": data for name, data in cifar_files().items()}
    write_archive(
        tmp_path / subfolder / datasets.CIFAR10_ARCHIVE, files | {"../escaped.txt": b"x", "cifar-10-batches-bin/readme.html": b"x"}
    )
    assert_cifar(tmp_path)
    unpacked = tmp_path / subfolder / "cifar-10-batches-bin"
    assert sorted(p.name for p in unpacked.iterdir()) == sorted(cifar_files())
    assert not (tmp_path.parent / "escaped.txt").exists()
    (tmp_path / subfolder / datasets.CIFAR10_ARCHIVE).unlink()
    assert_cifar(tmp_path)


def test_cifar_is_downloaded(server: tuple[str, type[_Server]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, handler = server
    write_archive(tmp_path / "published.tar.gz", cifar_files())
    handler.content = (tmp_path / "published.tar.gz").read_bytes()
    monkeypatch.setattr(datasets, "CIFAR10_URL", address)
    monkeypatch.setattr(datasets, "CIFAR10_SHA256", hashlib.sha256(handler.content).hexdigest())
    assert_cifar(tmp_path / "data")
    assert len(handler.requests) == 1


@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar10/cifar-10-python.tar.gz", "cifar-10-batches-py/data_batch_1"])
def test_pickled_cifar_is_refused(name: str, folder: Path) -> None:
    path = Path("data", name)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"cos\nsystem\n(S'touch harmed'\ntR.")
    message = expect_error("train", "cifar10", DRIVETRAIN_OFFLINE="1")
    assert "pickle" in message
    assert "cifar-10-binary.tar.gz" in message
    assert f"{folder}/data/cifar10" in message
    assert not Path("harmed").exists()


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("data_batch_3.bin", bytes(3073 * 2 - 1), "data_batch_3.bin is no file of CIFAR-10: its 6,145 bytes"),
        ("data_batch_5.bin", b"", "data_batch_5.bin is no file of CIFAR-10: its 0 bytes"),
        ("data_batch_1.bin", bytes([10]) + bytes(3072), "data_batch_1.bin is no file of CIFAR-10: it has a label 10"),
    ],
)
def test_a_malformed_cifar_file_is_refused(name: str, data: bytes, why: str, tmp_path: Path) -> None:
    write_cifar(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(Problem, match=why):
        datasets.cifar10("train", str(tmp_path))


@pytest.mark.parametrize(("harm", "why"), [("cut", "is damaged"), ("short", r"lacks data_batch_4\.bin"), ("html", "is damaged")])
def test_a_damaged_archive_is_refused(harm: str, why: str, tmp_path: Path) -> None:
    archive = tmp_path / datasets.CIFAR10_ARCHIVE
    files = cifar_files()
    write_archive(archive, {n: d for n, d in files.items() if harm != "short" or "_4" not in n})
    if harm != "short":
        archive.write_bytes(archive.read_bytes()[:900] if harm == "cut" else b"<html>404</html>")
    with pytest.raises(Problem, match=why):
        datasets.cifar10("train", str(tmp_path))
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == [archive.name]


def test_cifar_trains_from_files(folder: Path) -> None:
    write_cifar(Path("data/cifar10"))
    output = run_ok("train", "cifar10", "net=cnn", "steps=2", "global_batch=10", DRIVETRAIN_OFFLINE="1")
    assert "step 2/2" in output
    assert "Channels:           3" in Path("runs/cifar10-001/summary.txt").read_text()
