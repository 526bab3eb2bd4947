"""`exec` of the stand-in kubelet over SPDY 3.1, as kubectl before 1.31 asks for it: a stream for each of error, stdin, stdout and stderr."""

from __future__ import annotations

import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler
from typing import IO

from tests.system.kubelet_container import Container
from tests.system.kubelet_exec import run_command

PROTOCOL = "v4.channel.k8s.io"
SYN_STREAM, SYN_REPLY, RESET, PING, GO_AWAY, WINDOW = 1, 2, 3, 6, 7, 9
FINISHED = 1
MAX_DATA = 32768


def dictionary() -> bytes:
    """Returns the dictionary of the headers' compression, from the specification of SPDY 3."""
    words = (
        "options", "head", "post", "put", "delete", "trace", "accept", "accept-charset", "accept-encoding", "accept-language", "accept-ranges", "age", "allow",
        "authorization", "cache-control", "connection", "content-base", "content-encoding", "content-language", "content-length", "content-location", "content-md5",
        "content-range", "content-type", "date", "etag", "expect", "expires", "from", "host", "if-match", "if-modified-since", "if-none-match", "if-range",
        "if-unmodified-since", "last-modified", "location", "max-forwards", "pragma", "proxy-authenticate", "proxy-authorization", "range", "referer", "retry-after",
        "server", "te", "trailer", "transfer-encoding", "upgrade", "user-agent", "vary", "via", "warning", "www-authenticate", "method", "get", "status", "200 OK",
        "version", "HTTP/1.1", "url", "public", "set-cookie", "keep-alive", "origin",
    )  # fmt: skip
    text = (
        "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Authoritative Information204 No Content301 Moved Permanently"
        "400 Bad Request401 Unauthorized403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug "
        "Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,"
        "text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
    )
    return b"".join(struct.pack(">I", len(word)) + word.encode() for word in words) + text.encode()


class Connection:
    """The server's end: reads frames until the client closes the connection."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader, self._writer, self._lock = reader, writer, threading.Lock()
        self._inflate = zlib.decompressobj(zdict=dictionary())
        self._deflate = zlib.compressobj(zdict=dictionary())
        self.streams: dict[str, int] = {}
        self.changed = threading.Condition()
        self.stdin: IO[bytes] | None = None

    def read_frames(self) -> None:
        try:
            while len(head := self._reader.read(8)) == 8:
                first, second = struct.unpack(">II", head)
                body = self._reader.read(second & 0xFFFFFF)
                if first & 0x80000000:
                    self._control(first & 0xFFFF, body)
                else:
                    self._data(first, body, bool(second >> 24 & FINISHED))
        except OSError:
            pass  # the client has gone

    def _control(self, kind: int, body: bytes) -> None:
        if kind == PING:
            self._write(struct.pack(">II", 0x80030000 | PING, 4) + body)
        elif kind == SYN_STREAM:
            (stream,) = struct.unpack(">I", body[:4])
            headers = self._headers(self._inflate.decompress(body[10:]))
            no_headers = self._deflate.compress(struct.pack(">I", 0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
            self._write(struct.pack(">III", 0x80030000 | SYN_REPLY, 4 + len(no_headers), stream) + no_headers)
            with self.changed:
                self.streams[headers["streamtype"]] = stream
                self.changed.notify_all()

    @staticmethod
    def _headers(block: bytes) -> dict[str, str]:
        words, place = [], 4
        while place < len(block):
            (size,) = struct.unpack_from(">I", block, place)
            words.append(block[place + 4 : place + 4 + size].decode())
            place += 4 + size
        return {name.lower(): value for name, value in zip(words[::2], words[1::2], strict=True)}

    def _data(self, stream: int, body: bytes, is_finished: bool) -> None:
        if self.stdin is None or stream != self.streams.get("stdin"):
            return
        try:
            self.stdin.write(body)
            self.stdin.flush()
            if is_finished:
                self.stdin.close()
                self.stdin = None
        except OSError:
            self.stdin = None  # the command has ended
        if body:
            self._write(struct.pack(">IIII", 0x80030000 | WINDOW, 8, stream, len(body)))

    def send(self, name: str, data: bytes, is_finished: bool = False) -> None:
        stream = self.streams[name]
        for start in range(0, len(data), MAX_DATA):
            part = data[start : start + MAX_DATA]
            self._write(struct.pack(">II", stream, len(part)) + part)
        if is_finished:
            self._write(struct.pack(">II", stream, FINISHED << 24))

    def _write(self, frame: bytes) -> None:
        with self._lock:
            self._writer.write(frame)
            self._writer.flush()


def serve_spdy(handler: BaseHTTPRequestHandler, container: Container, query: dict[str, list[str]]) -> None:
    handler.send_response(101, "Switching Protocols")
    for name, value in {"Upgrade": "SPDY/3.1", "Connection": "Upgrade", "X-Stream-Protocol-Version": PROTOCOL}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.flush()
    connection = Connection(handler.rfile, handler.wfile)
    process = container.exec(query["command"])
    wanted = {"error"} | {
        stream for stream, name in (("stdin", "input"), ("stdout", "output"), ("stderr", "error")) if query.get(name) in (["1"], ["true"])
    }
    assert process.stdin is not None
    if "stdin" in wanted:
        connection.stdin = process.stdin
    else:
        process.stdin.close()
    reader = threading.Thread(target=connection.read_frames, daemon=True)
    reader.start()
    with connection.changed:
        connection.changed.wait_for(lambda: wanted <= set(connection.streams), 30)
    status = run_command(process, lambda data: connection.send("stdout", data), lambda data: connection.send("stderr", data))
    for name in wanted & {"stdout", "stderr"}:
        connection.send(name, b"", True)
    connection.send("error", b"" if b'"Success"' in status else status, True)
    reader.join(10)  # the client closes the connection
