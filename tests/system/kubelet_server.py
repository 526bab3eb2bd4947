"""The HTTPS server of the stand-in kubelet: `kubectl logs` and `kubectl exec` reach it through the real API server.

`exec` works as kubectl 1.31 and later ask for it, by WebSocket (v4 and v5.channel.k8s.io); the API server passes the connection on as it is.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from tests.system.kubelet_exec import serve_exec
from tests.system.kubelet_spdy import serve_spdy

if TYPE_CHECKING:
    from tests.system.kubelet import Kubelet
    from tests.system.kubelet_container import Container

POLL_SECONDS = 0.05


class KubeletServer(ThreadingHTTPServer):
    daemon_threads = True
    kubelet: Kubelet

    def __init__(self, port: int, certificate: Path, key: Path) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate, key)

    def start(self, kubelet: Kubelet) -> None:
        self.kubelet = kubelet
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request: object, client_address: object) -> None:
        """Runs in the connection's own thread."""
        with contextlib.suppress(ssl.SSLError, OSError):
            super().finish_request(self.context.wrap_socket(request, server_side=True), client_address)  # type: ignore[call-overload]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: KubeletServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        parts = url.path.strip("/").split("/")
        if len(parts) == 4 and parts[0] == "containerLogs":
            self._logs(*parts[1:], query)
        elif len(parts) == 4 and parts[0] == "exec":
            self._exec(*parts[1:], query)
        else:
            self._refuse(404, f"the stand-in kubelet has no {url.path}")

    do_POST = do_GET

    def _refuse(self, code: int, message: str) -> None:
        data = message.encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    # --- exec ---

    def _exec(self, namespace: str, name: str, container: str, query: dict[str, list[str]]) -> None:
        pod = self.server.kubelet.find(namespace, name)
        found = pod and pod.containers.get(container)
        if not found or found.has_ended:
            self._refuse(404, f'container not found ("{container}")')
            return
        self.close_connection = True
        upgrade = self.headers.get("Upgrade", "").lower()
        if upgrade == "websocket":
            serve_exec(self, found, query)
        elif upgrade == "spdy/3.1":
            serve_spdy(self, found, query)
        else:
            self._refuse(400, "exec needs a connection that is upgraded")

    # --- logs ---

    def _logs(self, namespace: str, name: str, container: str, query: dict[str, list[str]]) -> None:
        pod = self.server.kubelet.find(namespace, name)
        found = pod.log(container) if pod is not None else None
        if pod is not None and found is not None and query.get("previous") == ["true"]:
            number = pod.statuses[container]["restartCount"] - 1
            found = (pod.folder / f"{container}-{number}" / "log", found[1]) if number >= 0 else None
        if found is None:
            self._refuse(400, f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for data in log_lines(*found, query):
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")


def log_lines(path: Path, container: Container, query: dict[str, list[str]]) -> Iterator[bytes]:
    """Yields a container's lines as the query asks for them; with `follow`, until the container has ended."""
    options = {name: values[0] for name, values in query.items()}
    since = _since(options)
    remaining = int(options["limitBytes"]) if "limitBytes" in options else None
    with open(path, "rb") as file:
        if "tailLines" in options:
            lines = file.readlines()
            file.seek(sum(map(len, lines[: max(0, len(lines) - int(options["tailLines"]))])))
        while True:
            has_ended = container.has_ended or options.get("follow") != "true"
            while line := file.readline():
                if not line.endswith(b"\n"):  # the rest follows
                    file.seek(-len(line), 1)
                    break
                stamp, _, text = line.partition(b" ")
                if stamp.decode() < since:
                    continue
                data = line if options.get("timestamps") == "true" else text
                if remaining is not None:
                    data, remaining = data[:remaining], max(0, remaining - len(data))
                yield data
            if has_ended or remaining == 0:
                return
            time.sleep(POLL_SECONDS)


def _since(options: dict[str, str]) -> str:
    """Returns the time from which on lines are wanted, as it is written before each line."""
    if "sinceSeconds" in options:
        moment = datetime.fromtimestamp(time.time() - float(options["sinceSeconds"]), UTC)
        return f"{moment:%Y-%m-%dT%H:%M:%S.%f}000Z"
    if "sinceTime" in options:
        time_text = options["sinceTime"]
        return time_text if "." in time_text else time_text.replace("Z", ".000000000Z")
    return ""
