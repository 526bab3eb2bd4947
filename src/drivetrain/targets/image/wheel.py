"""A wheel of this package, made from the files that run now: for images, which install the version that submits."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib import metadata

from drivetrain import __version__
from drivetrain.settings import PACKAGE
from drivetrain.targets.archive import package_files

WHEEL = "Wheel-Version: 1.0\nGenerator: drivetrain\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
ENTRY_POINTS = "[console_scripts]\ndrivetrain = drivetrain.cli:main\n"
WHEEL_DATE = (1980, 1, 1, 0, 0, 0)


def wheel_name() -> str:
    return f"{PACKAGE.name}-{__version__}-py3-none-any.whl"


def make_wheel() -> bytes:
    """Returns the wheel. The same files give the same bytes, so that an engine's cache recognises them."""
    info = f"{PACKAGE.name}-{__version__}.dist-info"
    files = package_files() | {
        f"{info}/METADATA": _metadata().encode(), f"{info}/WHEEL": WHEEL.encode(), f"{info}/entry_points.txt": ENTRY_POINTS.encode(),
    }  # fmt: skip
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in sorted(files.items()))
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as wheel:
        for path, data in sorted(files.items()):
            entry = zipfile.ZipInfo(path, WHEEL_DATE)
            entry.external_attr = 0o644 << 16
            wheel.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def _metadata() -> str:
    """Returns the installed package's metadata: its name, version and requirements."""
    installed = metadata.metadata(PACKAGE.name)
    lines = [f"Metadata-Version: 2.1\nName: {PACKAGE.name}\nVersion: {__version__}"]
    for name in ("Requires-Python", "Provides-Extra", "Requires-Dist"):
        lines += [f"{name}: {value}" for value in installed.get_all(name) or ()]
    return "\n".join(lines) + "\n"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
