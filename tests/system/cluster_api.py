"""A small client of the Kubernetes API for the stand-ins and tests: JSON over HTTPS with a client certificate."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode, urlsplit

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
WATCH_SECONDS = 20


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, code: int, body: str) -> None:
        super().__init__(f"{code}: {body}")
        self.code = code


class Api:
    """A connection for each thread."""

    def __init__(self, server: str, certificate: str, key: str, authority: str) -> None:
        self._address = urlsplit(server)
        self._context = ssl.create_default_context(cafile=authority)
        self._context.load_cert_chain(certificate, key)
        self._local = threading.local()

    def connect(self, seconds: float = 30) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._address.hostname or "", self._address.port, timeout=seconds, context=self._context)

    def call(self, method: str, path: str, body: object = None, kind: str = "application/json", **query: object) -> Any:
        """Sends a request; returns the decoded answer. Raises ApiError if it is refused."""
        path = f"{path}?{urlencode(query)}" if query else path
        data = None if body is None else json.dumps(body).encode()
        for attempt in (1, 2):
            if not hasattr(self._local, "connection"):
                self._local.connection = self.connect()
            try:
                self._local.connection.request(method, path, data, {"Content-Type": kind, "Accept": "application/json"})
                answer = self._local.connection.getresponse()
                text = answer.read().decode()
                break
            except (http.client.HTTPException, OSError):  # the server closes idle connections
                self._local.connection.close()
                del self._local.connection
                if attempt == 2:
                    raise
        if answer.status >= 400:
            raise ApiError(answer.status, text)
        return json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path: str, **query: object) -> Any:
        return self.call("GET", path, **query)

    def find(self, path: str) -> Object | None:
        """Returns the object, or None if there is none, or the server of its kind does not answer."""
        try:
            return dict(self.get(path))
        except ApiError as error:
            if error.code not in (404, 503):
                raise
            return None

    def items(self, path: str, **query: object) -> list[Object]:
        return list(self.get(path, **query)["items"])

    def create(self, path: str, body: Object) -> Object:
        """Creates an object; returns the one that is there already, if its name is taken."""
        try:
            return dict(self.call("POST", path, body))
        except ApiError as error:
            if error.code != 409:
                raise
            return dict(self.get(f"{path}/{body['metadata']['name']}"))

    def patch(self, path: str, body: Object) -> None:
        """Merges a change into an object; an object that is gone needs no change."""
        try:
            self.call("PATCH", path, body, kind=MERGE)
        except ApiError as error:
            if error.code != 404:
                raise

    def delete(self, path: str, **query: object) -> None:
        try:
            self.call("DELETE", path, **query)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def watch(self, path: str, changed: Callable[[], None], ended: threading.Event) -> None:
        """Calls `changed` for each change of a list's objects until `ended` is set."""
        while not ended.is_set():
            connection = self.connect(WATCH_SECONDS + 10)
            try:
                version = self.get(path, limit=1)["metadata"]["resourceVersion"]
                connection.request("GET", f"{path}?watch=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={version}")
                answer = connection.getresponse()
                while not ended.is_set() and answer.readline():
                    changed()
            except (ApiError, http.client.HTTPException, OSError):
                time.sleep(0.2)  # the server starts, or has no such kind of object now
            finally:
                connection.close()


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pods_path(namespace: str, name: str = "", subresource: str = "") -> str:
    return "/".join(filter(None, (f"/api/v1/namespaces/{namespace}/pods", name, subresource)))


def record_event(api: Api, about: Object, kind: str, reason: str, message: str, source: str, warning: bool = False) -> None:
    """Writes an event, or counts it once more if it is there already."""
    metadata = about["metadata"]
    namespace = metadata.get("namespace", "default")
    name = f"{metadata['name'][:200]}.{reason.lower()}-{abs(hash((metadata.get('uid'), message))):x}"
    path = f"/api/v1/namespaces/{namespace}/events"
    known = api.find(f"{path}/{name}")
    if known is not None:
        api.patch(f"{path}/{name}", {"count": known.get("count", 1) + 1, "lastTimestamp": now()})
        return
    reference = {
        "kind": kind,
        "namespace": namespace,
        "name": metadata["name"],
        "uid": metadata.get("uid"),
        "apiVersion": about.get("apiVersion", "v1"),
    }
    event = {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": namespace}, "involvedObject": reference, "reason": reason,
        "message": message, "type": "Warning" if warning else "Normal", "source": {"component": source}, "count": 1, "firstTimestamp": now(), "lastTimestamp": now(),
    }  # fmt: skip
    api.create(path, event)
