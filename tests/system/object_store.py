"""A server that speaks S3 (moto's) on loopback, and a proxy before it that throttles, cuts, slows down or stalls connections."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOTO = "moto[server]==5.2.5"
ACCESS_KEY, SECRET_KEY = "AKIAPLANTEDPLANTED12", "planted+secret/key+that+no+file+may+hold"
SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: 143\r\n\r\n"
    + b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>'.ljust(
        143
    )
)


def server_program() -> Path:
    """Returns moto's server, which has a virtual environment of its own; makes that if it is missing."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "drivetrain-tests" / "moto"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        program, ready = folder / "venv" / "bin" / "moto_server", folder / MOTO
        if not ready.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder / "venv"], check=True)
            pip = [folder / "venv" / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", MOTO]
            installed = subprocess.run(pip, capture_output=True, text=True, timeout=600)
            if installed.returncode != 0:
                pytest.skip(f"{MOTO} cannot be installed: {installed.stderr.strip()[-300:]}")
            ready.touch()
    return program


class FaultProxy:
    """Passes connections on to a server. `fault`: what happens to them meanwhile.

    "": nothing; "throttle": half of the requests, at random, are answered with 503 SlowDown; "cut": connections end after `cut_after` bytes of the request;
    "slow": requests pass at `bytes_per_second`; "stall": nothing is read or answered.
    """

    def __init__(self, port: int) -> None:
        self.fault, self.cut_after, self.bytes_per_second = "", 700, 200_000
        self.num_faults, self._random = 0, random.Random(0)
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(("127.0.0.1", port)) as server:
                    proxy._pass(self.request, server)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        fault, passed = self.fault, 0
        if fault == "throttle" and self._random.random() < 0.5:
            self.num_faults += 1
            client.settimeout(0.2)
            with contextlib.suppress(OSError):
                while client.recv(1 << 16):
                    pass
            client.sendall(SLOW_DOWN)
            return
        threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 14):
                while self.fault == "stall":
                    self.num_faults += 1
                    time.sleep(0.1)
                if self.fault == "cut" and passed + len(data) > self.cut_after:
                    self.num_faults += 1
                    return
                if self.fault == "slow":
                    self.num_faults += 1
                    time.sleep(len(data) / self.bytes_per_second)
                if self.fault == "throttle":  # so that each request has a connection of its own
                    data = data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
                passed += len(data)
                server.sendall(data)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


class ObjectStore:
    """A bucket `team` behind a FaultProxy."""

    def __init__(self, port: int) -> None:
        self.server_port, self.proxy = port, FaultProxy(port)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which commands reach the bucket through the proxy."""
        return self._variables(self.proxy.port)

    @property
    def direct_environment(self) -> dict[str, str]:
        return self._variables(self.server_port)

    def _variables(self, port: int) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }  # fmt: skip

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.server_port}/{name}", method="PUT")
        request.add_header(
            "Authorization", "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"
        )
        urllib.request.urlopen(request).close()


@contextlib.contextmanager
def serving() -> Iterator[ObjectStore]:
    """Starts the server and the proxy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        server: subprocess.Popen[Any] = subprocess.Popen([server_program(), "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/").close()
                    break
                assert server.poll() is None, "the server ended"
                time.sleep(0.1)
            store = ObjectStore(port)
            store.make_bucket("team")
            yield store
            store.proxy.close()
        finally:
            server.kill()
            server.wait()
