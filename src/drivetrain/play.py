"""Agents at play in a browser: the page and what `export` wrote, served from here or written as a static site."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import re
import shutil
import urllib.parse
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.runs import EXPORT_CARD, FORMAT, Run, sha256_of

PAGE = Path(__file__).parent / "page"
SHIPPED = PAGE / "agents"
GRAPHS = ("reset", "policy", "step")
LIST = "agents.json"
KINDS = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".json": "application/json", ".svg": "image/svg+xml", ".txt": "text/plain; charset=utf-8", ".wasm": "application/wasm",
}  # fmt: skip
PACKED = ".gz"
LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)  # names of this machine in a request's Host

Site = dict[str, Path | bytes]


@dataclass(frozen=True)
class Agent:
    """Somebody who plays: a name, and the folder with its export."""

    name: str
    folder: Path


def shipped() -> list[Agent]:
    """Those that come with the package."""
    return [Agent(path.parent.name, path.parent) for path in sorted(SHIPPED.glob(f"*/{EXPORT_CARD}"))]


# --- what an export is --------------------------------------------------------------------------


def read_card(agent: Agent) -> dict[str, Any]:
    path = agent.folder / EXPORT_CARD
    try:
        card = json.loads(path.read_text())
        told = {key: dict(card[key]) for key in ("graphs", "settings", "training")} | {"sha256": dict(card.get("sha256") or {})}
        for graph in told["graphs"].values():
            graph["bytes"], Path(graph["file"]), [put["name"] + str(put["shape"][1:]) for put in (*graph["inputs"], *graph["outputs"])]
        return dict(card) | told
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Problem(f"{path} cannot be read ({type(error).__name__}): drivetrain export {agent.name} writes it anew") from None


def playable(graphs: Any) -> bool:
    return set(GRAPHS) <= set(graphs)


def unplayable(name: str, task: str) -> Problem:
    return Problem(f"{task} learns nothing that can be played: {name} has no world (drivetrain play snake shows one that has)")


def is_current(agent: Agent, run: Run) -> bool:
    """Whether what was exported is the run as it is now, with SHA-256 of its files."""
    card = read_card(agent)
    same = card["settings"] == run.read()["recipe"]["settings"] and card["training"].get("step") == run.last_row().get("step", 0)
    return bool(same and card["sha256"])


def check(agent: Agent) -> None:
    """Refuse what a browser could only fail at, and name the file."""
    card = read_card(agent)
    if not playable(card["graphs"]):
        raise unplayable(agent.name, str(card.get("task")))
    again = f"drivetrain export {agent.name} writes"
    paths = {name: agent.folder / card["graphs"][name]["file"] for name in GRAPHS}
    for path in paths.values():
        if path.parent != agent.folder or not path.is_file():
            raise Problem(f"{path} is missing: {again} it anew")
    opened = {name: _opened(path, card["graphs"][name]) for name, path in paths.items()}
    if reason := _misfit({name: graph for name, graph in opened.items() if not isinstance(graph, str)}):
        raise Problem(f"{agent.folder}: {reason}: they are of different worlds; {again} them anew")
    for name, path in paths.items():
        size, expected, broken = path.stat().st_size, card["graphs"][name]["bytes"], opened[name]
        if size != expected:
            raise Problem(f"{path} is broken: it has {size} bytes, not {expected}; {again} it anew")
        if isinstance(broken, str):
            raise Problem(f"{path} is broken: {broken}; {again} it anew")
        if sha256_of(path) != card["sha256"].get(path.name):
            raise Problem(f"{path} is broken: its SHA-256 is not the one in {EXPORT_CARD}; {again} it anew")


@dataclass(frozen=True)
class Shapes:
    """What a graph takes and gives, by name: the dimensions after the first."""

    takes: dict[str, list[Any]]
    gives: dict[str, list[Any]]


def _opened(path: Path, told: Any) -> Shapes | str:
    """The shapes in a graph's file, or what onnxruntime has against it; where that is not installed, what export.json tells."""
    try:
        import onnxruntime
    except ImportError:
        return Shapes(*({put["name"]: put["shape"][1:] for put in told[side]} for side in ("inputs", "outputs")))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        graph = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own have no common base
        return str(error).splitlines()[0].split(" : ")[-1][:100]
    return Shapes(*({put.name: list(put.shape[1:]) for put in some} for some in (graph.get_inputs(), graph.get_outputs())))


def _misfit(graphs: dict[str, Shapes]) -> str:
    """What one graph takes in another shape than the other gives it, if anything: an agent beside another grid's world."""
    flows = [(giver, "observation", "policy", "observation") for giver in ("reset", "step")] + [("policy", "action", "step", "action")]
    state = set(graphs["step"].takes) - {"action", "random", "worlds"} if "step" in graphs else set()
    flows += [(giver, f"next_{part}", "step", part) for part in sorted(state) for giver in ("reset", "step")]
    for giver, given, taker, taken in flows:
        if giver in graphs and taker in graphs:
            gives, takes = graphs[giver].gives.get(given), graphs[taker].takes.get(taken)
            if gives != takes:
                return f"{taker}.onnx takes {taken} of {_size(takes)}, {giver}.onnx gives {_size(gives)}"
    return ""


def _size(shape: list[Any] | None) -> str:
    return "no shape" if shape is None else "x".join(map(str, shape)) or "one number"


# --- the site -----------------------------------------------------------------------------------


def site(agents: list[Agent]) -> Site:
    """Every file of the site by its path: nothing else is ever served."""
    if not (PAGE / "index.html").is_file():
        raise Problem(f"{PAGE} has no page: make page builds it")
    files: Site = {}
    for path in sorted(PAGE.rglob("*")):
        if path.is_file() and SHIPPED not in path.parents:
            files[path.relative_to(PAGE).as_posix().removesuffix(PACKED)] = path
    listed: list[dict[str, str]] = []
    for number, agent in enumerate(agents):
        folder = "agents/" + (re.sub(r"[^A-Za-z0-9.-]+", "-", agent.name).strip("-.") or "agent")
        folder += f"-{number}" if any(folder == other["folder"] for other in listed) else ""
        listed.append({"name": agent.name, "folder": folder})
        graphs = read_card(agent)["graphs"]
        files |= {f"{folder}/{name}": agent.folder / name for name in (EXPORT_CARD, *(graphs[g]["file"] for g in GRAPHS))}
    files[LIST] = json.dumps({"format": FORMAT, "made_by": "drivetrain play", "agents": listed}, indent=1).encode() + b"\n"
    return files


def content(file: Path | bytes) -> bytes:
    """A file as it is before it is packed."""
    if isinstance(file, bytes):
        return file
    whole = file.read_bytes()
    return gzip.decompress(whole) if file.suffix == PACKED else whole


def write(files: Site, folder: Path) -> int:
    """A static site for any web server, in any sub-path; gives its bytes."""
    if folder.exists() and not folder.is_dir():
        raise Problem(f"--out {folder} is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not _is_site(folder):
        raise Problem(f"--out {folder} is not empty and no site that drivetrain play wrote: name another folder")
    total = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in ("assets", "agents"):
            shutil.rmtree(folder / old, ignore_errors=True)
        for name in (LIST, *(name for name in files if name != LIST)):  # first what makes it a site
            path, whole = folder / name, content(files[name])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(whole)
            total += len(whole)
    except OSError as error:
        raise Problem(f"--out {folder} cannot be written: {error.strerror or error}; name another folder") from None
    return total


def _is_site(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / LIST).read_text())["made_by"] == "drivetrain play")
    except (OSError, ValueError, KeyError, TypeError):
        return False


# --- serving it ---------------------------------------------------------------------------------


def server(files: Site, port: int = 0) -> ThreadingHTTPServer:
    """A server of these files for this machine alone; `serve_forever` begins."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, body: bool) -> None:
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or not LOCAL.fullmatch(hosts[0]):  # a name of somebody else's that leads here: their page would read ours
                self._send(403, ".txt", b"drivetrain play answers on this machine alone: open it at localhost or 127.0.0.1\n", body)
                return
            name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).removeprefix("/") or "index.html"
            file = files.get(name)
            try:
                whole, packed = b"", False
                if file is not None:
                    packed = isinstance(file, Path) and file.suffix == PACKED and "gzip" in self.headers.get("Accept-Encoding", "")
                    whole = file.read_bytes() if packed and isinstance(file, Path) else content(file)
            except OSError:
                file = None  # it was there when we began
            if file is None:
                self._send(404, ".txt", f"{name} is no file of this site\n".encode(), body)
            else:
                self._send(200, Path(name).suffix, whole, body, packed)

        def _send(self, status: int, suffix: str, whole: bytes, body: bool, packed: bool = False) -> None:
            self.send_response(status)
            kind = KINDS.get(suffix, "application/octet-stream")
            for key, value in {"Content-Type": kind, "Content-Length": str(len(whole)), "Cache-Control": "no-cache"}.items():
                self.send_header(key, value)
            self.send_header("X-Content-Type-Options", "nosniff")
            if packed:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            if body:
                with contextlib.suppress(ConnectionError):  # the browser left
                    self.wfile.write(whole)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are nobody's news."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A browser that breaks off is nobody's news either."""

    try:
        return Server(("127.0.0.1", port), Handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Problem(f"port {port} is in use: leave --port out, or name another") from None
        raise Problem(f"port {port} cannot be had: {error.strerror}") from None
    except OverflowError:
        raise Problem(f"--port {port}: a port is a number up to 65535") from None
