"""From a recipe and a machine to a plan: what is predicted, what is measured, and what is remembered of both."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from drivetrain import __version__
from drivetrain.hardware import Hardware
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.plan.choose import choose
from drivetrain.plan.environment import allowed_variables
from drivetrain.plan.fit import Point, worth_measuring
from drivetrain.plan.predict import Machine, step_seconds
from drivetrain.plan.profile import FORMAT, REAL_LIMIT, Profile
from drivetrain.plan.search import Search
from drivetrain.plan.table import table
from drivetrain.recipe import MAY_CHANGE, Recipe
from drivetrain.watch.screen import Screen

SHARE, LEAST = 0.05, 3.0  # of a run's time, and seconds, that planning at `train` may take
PROBES = 15.0  # seconds that measuring takes at the least: a process with CUDA, and the task's data
# Seconds after which a task's own code is taken to hang: that one thread of it has worked (on a busy machine these take their time),
WORK_LIMIT, WALL_LIMIT = 300.0, 3600.0  # and that it has been waited for at the most.
# Settings that change neither shapes nor work.
ALIKE = {*MAY_CHANGE, "seed", "learning_rate", "weight_decay", "clip", "warmup", "decay", "start", "global_batch", "deterministic"}

Planner = Literal["auto", "table", "off"]


@dataclass(frozen=True)
class Place:
    """Where a plan is for."""

    hardware: Hardware
    device: str
    world_size: int
    local_procs: int
    nodes: int
    gpu: str = ""
    """The GPU that steps are measured on, as CUDA_VISIBLE_DEVICES names it."""


def plan_for(
    recipe: Recipe, place: Place, screen: Screen, planner: Planner = "auto", measure: bool | None = False, fresh: bool = False,
    look: bool = True,
) -> Plan:  # fmt: skip
    """The plan; `measure` None measures where the run is long enough for it. Without `look`, what is remembered of the task counts, and
    no process looks at it."""
    # The user's own values win, reach every worker, and are recorded; a launcher sets its own for its workers.
    own = {} if place.hardware.described or "RANK" in os.environ else allowed_variables(os.environ)
    threads = own.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0 and "threads" not in recipe.pins:
        recipe = replace(recipe, pins=recipe.pins | {"threads": int(threads)})
    plan = _plan(recipe, place, screen, planner, measure, fresh, look)
    hidden = ("PYTORCH_CUDA_ALLOC_CONF",) if "PYTORCH_ALLOC_CONF" in own else ()  # two names of one thing
    return replace(plan, env={k: v for k, v in plan.env.items() if k not in hidden} | own)


def _plan(recipe: Recipe, place: Place, screen: Screen, planner: Planner, measure: bool | None, fresh: bool, look: bool) -> Plan:
    where: dict[str, Any] = {
        "device": place.device, "world_size": place.world_size, "local_procs": place.local_procs, "nodes": place.nodes, "pins": recipe.pins,
    }  # fmt: skip
    if planner == "table":
        return table(recipe.settings, place.hardware, **where, deepspeed_installed=find_spec("deepspeed") is not None)
    plain = choose(recipe.settings, place.hardware, **where)
    if planner == "off" or (not look and _profile_memory(recipe, plain).read() is None):
        return plain
    begun = time.monotonic()
    machine = Machine.of(place.hardware, place.device, place.local_procs)
    hurry = Hurry(recipe, machine, place.world_size) if measure is None else None
    profile = profile_of(recipe, plain, screen, fresh, hurry)
    if profile is None or not profile.parameters:
        why = "that would take longer than it gains; the next plan knows" if profile is None else profile.traced
        return replace(plain, reasons=plain.reasons | {"predicted": f"not predicted: {why}"})
    if profile.plain is None:
        bounded = choose(recipe.settings, place.hardware, **where, profile=profile)
        why = f"could not be traced: {profile.traced}; bounded by its sizes: activations come on top of the parameters, gradients and optimizer state that were counted"
        return replace(bounded, reasons=bounded.reasons | {"predicted": why})
    known = remembered(recipe, plain, place, fresh)
    plan = choose(recipe.settings, place.hardware, **where, profile=profile, points=known.points)
    if measure is False or not look or plan.strategy not in ("single", "ddp"):
        return plan
    limit = None if measure else SHARE * total_seconds(recipe, profile, plan) - (time.monotonic() - begun)
    if known.as_good_as(limit) or (limit is not None and limit < PROBES):
        return plan
    points = measured(recipe, plan, place, machine, profile, screen, limit)
    return choose(recipe.settings, place.hardware, **where, profile=profile, points=points) if points else plan


def total_steps(recipe: Recipe, samples: int, global_batch: int) -> int:
    return int(recipe.settings["steps"] or recipe.settings["epochs"] * -(-samples // global_batch))


def total_seconds(recipe: Recipe, profile: Profile, plan: Plan) -> float:
    return total_steps(recipe, profile.samples, plan.global_batch) * float(plan.predicted["step_seconds"])


# --- profiles and measurements ------------------------------------------------------------------


def profile_of(recipe: Recipe, plan: Plan, screen: Screen, fresh: bool = False, hurry: Hurry | None = None) -> Profile | None:
    """What the task asks of any machine: remembered, or found by a child process. In a hurry None, if that takes too
    long; the child then goes on beside the training, and the next plan finds what it found."""
    memory = _profile_memory(recipe, plan)
    known = None if fresh else memory.read()
    if known is not None:
        return Profile.from_json(known)
    screen.busy("looking at the task's memory and work ...")
    sizes: dict[str, Any] = {}
    crash = ""
    for with_values in (False, True):
        job = {"mode": "survey", "plan": plan.to_json(), "with_values": with_values}
        child = _Child(job, recipe, {"CUDA_VISIBLE_DEVICES": ""})  # shapes suffice
        if not _ended(child, hurry):
            child.leave_to(memory.write)
            return None
        sizes = child.first() or sizes
        if (known := child.found()) is not None:
            memory.write(known)
            return Profile.from_json(known)
        crash = crash or f"the process that looked at it {child.death()}"
        if child.was_killed or sizes.get("parameters", 0) > REAL_LIMIT:
            break
    return Profile.of_sizes(sizes, crash)


def _profile_memory(recipe: Recipe, plan: Plan) -> _Remembered:
    return _Remembered("profile", recipe, {"precision": plan.precision, "format": FORMAT})


def _ended(child: _Child, hurry: Hurry | None) -> bool:
    """Wait for a child to end; False, in a hurry, if that takes too long."""
    begun = time.monotonic()
    while not child.wait(0.05):
        waited = time.monotonic() - begun
        if waited > WALL_LIMIT or (waited > WORK_LIMIT and child.work_seconds() > WORK_LIMIT):
            child.stop()
            raise Problem(f"the task's model, data or loss took longer than {waited:.0f} s to look at: --planner off leaves it out")
        if hurry is not None and waited > LEAST and waited > hurry.patience(child.first()):
            return False
    return True


@dataclass(frozen=True)
class Hurry:
    """How long a training waits for its plan."""

    recipe: Recipe
    machine: Machine
    world_size: int

    def patience(self, first: dict[str, Any] | None) -> float:
        """Seconds: a share of the run's time, of which the parameters tell the least it can be; without end where the
        model's state alone takes half of a device."""
        if first is None:
            return LEAST
        if first["parameter_bytes"] + first["trained_bytes"] + first["optimizer_bytes"] > 0.5 * self.machine.usable_bytes:
            return WALL_LIMIT
        steps = total_steps(self.recipe, first["samples"], self.recipe.settings["global_batch"])
        flops = 6.0 * first["trained"] * steps * self.recipe.settings["global_batch"] / self.world_size
        return float(SHARE * flops / (0.5e12 * max(self.machine.card.fp32, self.machine.card.bf16)))


@dataclass(frozen=True)
class Measured:
    """What was measured before, within so many seconds; None: all that was wanted."""

    points: list[Point]
    limit: float | None

    def as_good_as(self, limit: float | None) -> bool:
        """Whether another try, within `limit`, would hardly find more."""
        return self.limit is None or (limit is not None and limit < 2 * self.limit)


def remembered(recipe: Recipe, plan: Plan, place: Place, fresh: bool = False) -> Measured:
    found = None if fresh or place.hardware.described else _points_memory(recipe, plan, place.hardware).read()
    return Measured([Point(**p) for p in found["points"]], found["limit"]) if found else Measured([], 0.0)


def measured(
    recipe: Recipe, plan: Plan, place: Place, machine: Machine, profile: Profile, screen: Screen, limit: float | None
) -> list[Point]:
    """Measure a few micro-batches in a child process, so that running out of memory costs nothing."""
    search = Search(profile, machine, plan.global_batch, place.world_size, place.nodes)
    way = search.ways({}, deepspeed=False)[0]
    fitting = [s for s in sorted(search.micro_batches({})) if search.rate(way, s).fits]
    sizes = worth_measuring(fitting, plan.micro_batch)
    predicted = [(s, step_seconds(profile, replace(way, micro_batch=s, accumulation=1), machine)["work"]) for s in {*fitting, *sizes}]
    screen.busy(f"measuring steps with micro-batches of {', '.join(map(str, sizes))} ...")
    environment = {"CUDA_VISIBLE_DEVICES": place.gpu} if place.gpu else {}
    job = {"mode": "probe", "plan": plan.to_json(), "micro_batches": sizes, "predicted": predicted}
    child = _Child(job, recipe, environment)
    ended = child.wait(limit)
    if not ended:
        child.stop()
    found = child.found()
    if ended and found is None:
        screen.notice(f"nothing was measured: the process that took steps {child.death()}")
    found = found or []
    _points_memory(recipe, plan, place.hardware).write({"points": found, "limit": None if ended else limit})
    return [Point(**p) for p in found]


def _points_memory(recipe: Recipe, plan: Plan, hardware: Hardware) -> _Remembered:
    gpu = min(hardware.gpus, key=lambda g: g.memory_bytes).name if hardware.gpus else f"CPU with {hardware.cpu_cores} cores"
    return _Remembered("measured", recipe, {"precision": plan.precision, "gpu": gpu, "capture": plan.capture, "batch": plan.global_batch})


class _Child:
    """A process that looks at the task; what it finds comes in a file."""

    def __init__(self, job: dict[str, Any], recipe: Recipe, environment: dict[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="drivetrain-")
        self._last_words = ""
        base = Path(self.folder.name)
        file, self.out, self.log = base / "job.json", base / "found.json", base / "log"
        common = {"task": asdict(recipe.task), "settings": recipe.settings, "folder": os.getcwd(), "run": str(base)}
        file.write_text(json.dumps(common | job))
        command = [sys.executable, "-P", "-m", "drivetrain.processes.survey", str(file), str(self.out), str(os.getpid())]
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, env=kept | environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait(self, seconds: float | None) -> bool:
        """Whether it has ended."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def first(self) -> dict[str, Any] | None:
        """What it knows before it has ended: the model's parameters."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self.out.with_name("first.json").read_text())  # type: ignore[no-any-return]
        return None

    def work_seconds(self) -> float:
        """CPU seconds of its busiest thread: those that its work has taken, however busy the machine is."""
        import psutil

        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(self.process.pid)
            threads = [t for p in (process, *process.children(recursive=True)) for t in p.threads()]
            return float(max((t.user_time + t.system_time for t in threads), default=0.0))
        return 0.0

    @property
    def was_killed(self) -> bool:
        """Whether someone else ended it, as the system does where memory runs out."""
        return self.process.returncode == -signal.SIGKILL

    def death(self) -> str:
        """How it ended without an answer."""
        code = self.process.returncode
        if code < 0:
            return f"died of {signal.Signals(-code).name}"
        return f"exited with code {code}" + (f" ({self._last_words})" if self._last_words else "")

    def found(self) -> Any:
        """What it found; None where it ended before it found anything."""
        if not self.out.is_file():
            self._last_words = next(reversed(self.log.read_text(errors="replace").strip().splitlines()), "")[:200]
            self.folder.cleanup()
            return None
        told = json.loads(self.out.read_text())
        self.folder.cleanup()
        if told["outcome"] != Outcome.OK:
            raise Problem(told["message"], Outcome(told["outcome"]))
        return told["found"]

    def leave_to(self, write: Callable[[Any], None]) -> None:
        """Let it end by itself, and remember what it found."""

        def wait() -> None:
            with contextlib.suppress(Problem, OSError):  # the training will say what is wrong
                self.wait(WALL_LIMIT)
                if (found := self.found()) is not None:
                    write(found)

        threading.Thread(target=wait, daemon=True).start()


class _Remembered:
    """A file of the user's cache, by all that it depends on."""

    def __init__(self, kind: str, recipe: Recipe, more: dict[str, Any]) -> None:
        settings = {k: v for k, v in recipe.settings.items() if k not in ALIKE}
        words = [kind, recipe.task.class_name, recipe.task.digest(), settings, _files(settings), more, __version__, _torch_version()]
        key = hashlib.sha256(json.dumps(words, sort_keys=True, default=str).encode()).hexdigest()[:24]
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.path = Path(base) / "drivetrain" / "plans" / f"{kind}-{key}.json"

    def read(self) -> Any:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self.path.read_text())
        return None

    def write(self, value: Any) -> None:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds, no more
            self.path.parent.mkdir(parents=True, exist_ok=True)
            hidden = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            hidden.write_text(json.dumps(value))
            hidden.replace(self.path)


def _files(settings: dict[str, Any]) -> list[Any]:
    """When the files and folders that settings name were last changed; of a folder two levels, where data sets have their classes."""
    found = []
    for value in settings.values():
        if isinstance(value, str) and value:
            with contextlib.suppress(OSError, ValueError):
                top = Path(value).expanduser()
                below = [top, *top.glob("*/"), *top.glob("*/*/")] if top.is_dir() else [top]
                found += [[str(path), path.stat().st_mtime_ns, path.stat().st_size] for path in sorted(below)]
    return found


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def parts_text(parts: dict[str, float], scale: float, digits: int) -> str:
    shown: Sequence[tuple[str, float]] = [(name, value / scale) for name, value in parts.items() if value / scale >= 0.5 * 10**-digits]
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in shown)
