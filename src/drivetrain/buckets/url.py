"""The address of a run in a bucket."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from drivetrain.confidential import looks_secret
from drivetrain.names import PART, check_folder, check_name
from drivetrain.outcomes import Problem

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
FORMS = "s3://BUCKET/PATH/NAME, gs://BUCKET/PATH/NAME or file:///FOLDER/NAME"


@dataclass(frozen=True)
class BucketUrl:
    scheme: str
    path: str
    """The bucket and the path in it; of `file`, an absolute path."""

    @property
    def name(self) -> str:
        """The last part, which is also the name of the run on this machine."""
        return self.path.rpartition("/")[2]

    @property
    def bucket(self) -> str:
        return self.path.partition("/")[0]

    def child(self, *parts: str) -> BucketUrl:
        return replace(self, path="/".join([self.path, *parts]))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"


def is_url(text: str) -> bool:
    """Whether text is an address of another place than a folder of this machine."""
    return SCHEME.match(text) is not None


def parse(text: str, label: str) -> BucketUrl:
    """Returns the address; raises Problem for another kind of address, a name that no store takes, and keys in the address."""
    match = SCHEME.match(text)
    scheme = match[1].lower() if match else ""
    if match is None or scheme not in ("s3", "gs", "file"):
        check_folder(text, label)
        raise Problem(f"{label} {text[:80]!r} is no bucket: write {FORMS}")
    path = text[match.end() :].rstrip("/")
    if "@" in path.partition("/")[0] or "?" in path or looks_secret("", text):
        raise Problem(f"{label} {scheme}://...: keys do not belong in an address: leave them out (docs/buckets.md names the variables)")
    parts = path.split("/")
    is_plain = all(PART.fullmatch(part) for part in parts[1:]) and len(path.encode(errors="replace")) <= 800
    if scheme == "file":
        if parts[0] or not is_plain or len(parts) < 3:
            raise Problem(f"{label} {text[:80]!r}: write file:///FOLDER/NAME with plain names, such as file:///mnt/share/night-3")
        path = os.path.normpath(path)
    elif not BUCKET.fullmatch(parts[0]) or not is_plain or len(parts) < 2:
        raise Problem(f"{label} {text[:80]!r}: write {scheme}://BUCKET/PATH/NAME with plain names, such as {scheme}://team/runs/night-3")
    url = BucketUrl(scheme, path)
    check_name(url.name, label)
    return url
