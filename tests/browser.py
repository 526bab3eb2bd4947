"""A real browser, controlled through web/browser.mjs, and a server for the page."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain import play


class Browser:
    def __init__(self, web: Path) -> None:
        self.process = subprocess.Popen(["node", "browser.mjs"], cwd=web, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, **command: Any) -> Any:
        """Sends a command to browser.mjs; returns its answer."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        reply = json.loads(self.process.stdout.readline())
        assert "error" not in reply, reply["error"]
        return reply["answer"]

    def wait_until(self, code: str, seconds: float = 120) -> Any:
        """Waits until JavaScript code gives a true value; returns it."""
        end = time.monotonic() + seconds
        while not (value := self(run=code)):
            assert time.monotonic() < end, f"never: {code}; the page says: {self(run='document.body.innerText')}"
            time.sleep(0.05)
        return value

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(20)


@contextlib.contextmanager
def served(files: play.Site) -> Iterator[str]:
    """Serves a site; yields its address."""
    with play.server(files) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
