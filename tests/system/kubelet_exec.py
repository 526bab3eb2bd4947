"""`exec` of the stand-in kubelet over a WebSocket: each message begins with the number of its channel."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import IO

from tests.system.kubelet_container import Container

STDIN, STDOUT, STDERR, ERROR, CLOSE = 0, 1, 2, 3, 255
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
ACCEPT_KEY = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, BINARY, CLOSING, PING, PONG = 1, 2, 8, 9, 10


class WebSocket:
    """The server's end of a connection."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader, self._writer, self._lock = reader, writer, threading.Lock()

    def receive(self) -> bytes | None:
        """Returns the next message; None at the end."""
        message = b""
        while True:
            head = self._reader.read(2)
            if len(head) < 2:
                return None
            is_last, kind, size = head[0] & 0x80, head[0] & 0x0F, head[1] & 0x7F
            if size >= 126:
                size = int.from_bytes(self._reader.read(2 if size == 126 else 8), "big")
            mask = self._reader.read(4) if head[1] & 0x80 else b"\0\0\0\0"
            data = self._reader.read(size)
            pad = (mask * (size // 4 + 1))[:size]
            data = (int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")).to_bytes(size, "big")
            if kind == CLOSING:
                return None
            if kind == PING:
                self._write(PONG, data)
            elif kind != PONG:
                message += data
                if is_last:
                    return message

    def send(self, channel: int, data: bytes) -> None:
        self._write(BINARY, bytes([channel]) + data)

    def close(self) -> None:
        self._write(CLOSING, (1000).to_bytes(2, "big"))

    def _write(self, kind: int, data: bytes) -> None:
        size = len(data)
        length = bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2, "big") if size < 1 << 16 else b"\x7f" + size.to_bytes(8, "big")
        with self._lock:
            self._writer.write(bytes([0x80 | kind]) + length + data)
            self._writer.flush()


def serve_exec(handler: BaseHTTPRequestHandler, container: Container, query: dict[str, list[str]]) -> None:
    offered = [name.strip() for name in handler.headers.get("Sec-WebSocket-Protocol", "").split(",")]
    protocol = next((name for name in PROTOCOLS if name in offered), PROTOCOLS[-1])
    digest = hashlib.sha1((handler.headers["Sec-WebSocket-Key"] + ACCEPT_KEY).encode()).digest()
    handler.send_response(101, "Switching Protocols")
    headers = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Accept": base64.b64encode(digest).decode(),
        "Sec-WebSocket-Protocol": protocol,
    }
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.flush()
    socket = WebSocket(handler.rfile, handler.wfile)
    process = container.exec(query["command"])
    assert process.stdin is not None
    if query.get("input") in (["1"], ["true"]):
        threading.Thread(target=_feed, args=(socket, process.stdin), daemon=True).start()
    else:
        process.stdin.close()
    socket.send(ERROR, run_command(process, lambda data: socket.send(STDOUT, data), lambda data: socket.send(STDERR, data)))
    socket.close()


def _feed(socket: WebSocket, stdin: IO[bytes]) -> None:
    """Writes what the client sends to the command's stdin, which ends with the client's."""
    try:
        while message := socket.receive():
            if message[0] == CLOSE and message[1:2] == bytes([STDIN]):
                break
            if message[0] == STDIN:
                stdin.write(message[1:])
                stdin.flush()
        stdin.close()
    except OSError:
        pass  # the command has ended, or closed its stdin


def run_command(process: subprocess.Popen[bytes], stdout: Callable[[bytes], None], stderr: Callable[[bytes], None]) -> bytes:
    """Passes on what a command prints until it ends; returns its status as Kubernetes writes it."""
    threads = []
    for stream, send in ((process.stdout, stdout), (process.stderr, stderr)):
        assert stream is not None
        threads.append(threading.Thread(target=_pass_on, args=(stream, send), daemon=True))
        threads[-1].start()
    code = process.wait()
    for thread in threads:
        thread.join()
    code = code if code >= 0 else 128 - code
    if code == 0:
        return json.dumps({"metadata": {}, "status": "Success"}).encode()
    details = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
    message = f"command terminated with non-zero exit code: exit status {code}"
    return json.dumps({"metadata": {}, "status": "Failure", "message": message, "reason": "NonZeroExitCode", "details": details}).encode()


def _pass_on(stream: IO[bytes], send: Callable[[bytes], None]) -> None:
    try:
        while data := stream.read1(32768):  # type: ignore[attr-defined]
            send(data)
    except OSError:
        pass  # the client has gone
