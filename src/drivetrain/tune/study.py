"""The study: which parameters were tried and how it went, in Optuna's journal. Asked for N sets, told N values."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.outcomes import Problem
from drivetrain.tune.space import Dimension, Space

if TYPE_CHECKING:
    import optuna

JOURNAL = "study.journal"
NAME = "tune"  # of the study in its journal
SAMPLERS = ("tpe", "random")
PRUNERS = ("median", "hyperband", "none")


def need_optuna() -> None:
    """Import Optuna, or name the extra that has it."""
    try:
        import optuna
    except ImportError:
        raise Problem("tune needs Optuna: pip install 'drivetrain[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Proposal:
    """One set of parameters, to be trained."""

    number: int
    params: dict[str, Any]
    reported: int = 0
    """Evaluations that the study knows already."""


@dataclass(frozen=True)
class Tried:
    """What the study knows of a trial."""

    number: int
    state: str
    """running, finished, pruned or failed"""
    params: dict[str, Any]
    value: float | None
    facts: dict[str, Any] = field(default_factory=dict)
    """step (of the best evaluation), steps (taken), message (why it failed)"""


class Study:
    """Optuna's study in a folder that this process alone uses."""

    def __init__(self, folder: Path, space: Space, direction: str, sampler: str, seed: int, prune: str, trials: int) -> None:
        need_optuna()
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        self.space, self.direction, self.sampler, self.seed = space, direction, sampler, seed
        file = folder.resolve() / JOURNAL
        _mend(file)
        lock = JournalFileOpenLock(str(file))
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(file), lock))
        if NAME not in optuna.get_all_study_names(storage):
            optuna.create_study(storage=storage, study_name=NAME, direction="maximize" if direction == "max" else "minimize")
        self._study = optuna.load_study(study_name=NAME, storage=storage, pruner=_pruner(prune, trials))
        self._trials: dict[int, optuna.Trial] = {}

    # --- ask and tell ---

    def ask(self, count: int = 1) -> list[Proposal]:
        """New sets of parameters."""
        distributions = {name: _distribution(dimension) for name, dimension in self.space.items()}
        asked = []
        for _ in range(count):
            # Seeded by the trial's number: a study that was interrupted proposes what an unbroken one would.
            self._study.sampler = _sampler(self.sampler, self.seed, len(self._study.get_trials(deepcopy=False)))
            trial = self._study.ask(distributions)
            asked.append(self._proposal(trial))
        return asked

    def unfinished(self) -> list[Proposal]:
        """The trials that were running when the study was last left, with the parameters they had."""
        from optuna.trial import Trial, TrialState

        found = []
        for frozen in self._study.get_trials(states=(TrialState.RUNNING,)):
            self._study.sampler = _sampler(self.sampler, self.seed, frozen.number)
            trial = Trial(self._study, frozen._trial_id)
            for name, dimension in self.space.items():  # all are known, unless the end came while it was asked for
                trial._suggest(name, _distribution(dimension))
            found.append(self._proposal(trial, len(frozen.intermediate_values)))
        return found

    def report(self, number: int, evaluation: int, value: float) -> bool:
        """Tell how a trial's evaluation (1, 2, ...) went; whether the trial is not worth going on with."""
        self.note(number, evaluation, value)
        return self._trials[number].should_prune()

    def note(self, number: int, evaluation: int, value: float) -> None:
        """The same of a trial that is not stopped early."""
        self._trials[number].report(value, evaluation)

    def finish(self, number: int, value: float, **facts: Any) -> None:
        self._tell(number, facts, value)

    def prune(self, number: int, **facts: Any) -> None:
        from optuna.trial import TrialState

        self._tell(number, facts, state=TrialState.PRUNED)

    def fail(self, number: int, message: str, **facts: Any) -> None:
        from optuna.trial import TrialState

        self._tell(number, facts | {"message": message}, state=TrialState.FAIL)

    def _tell(self, number: int, facts: dict[str, Any], value: float | None = None, state: optuna.trial.TrialState | None = None) -> None:
        trial = self._trials.pop(number)
        for name, fact in facts.items():
            trial.set_user_attr(name, fact)
        self._study.tell(trial, value, state=state)

    def _proposal(self, trial: optuna.Trial, reported: int = 0) -> Proposal:
        self._trials[trial.number] = trial
        params = {name: dimension.setting.coerce(trial.params[name]) for name, dimension in self.space.items()}
        return Proposal(trial.number, params, reported)

    # --- what is known ---

    def tried(self) -> list[Tried]:
        words = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
        return [
            Tried(t.number, words.get(t.state.name, "running"), dict(t.params), t.values[0] if t.values else None, dict(t.user_attrs))
            for t in self._study.get_trials(deepcopy=False)
        ]

    def best(self) -> Tried | None:
        """The best of the finished trials, the earliest where several are equal."""
        finished = [t for t in self.tried() if t.state == "finished" and t.value is not None]
        sign = -1 if self.direction == "max" else 1
        return min(finished, key=lambda t: (sign * (t.value or 0.0), t.number), default=None)

    def importances(self) -> dict[str, float]:
        """Each parameter's share in the spread of the values (PED-ANOVA); empty where too few trials have finished."""
        import warnings

        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        finished = [t.value for t in self.tried() if t.state == "finished"]
        if len(finished) < 4 or len(set(finished)) < 2:
            return {}
        with warnings.catch_warnings(), contextlib.suppress(ValueError, RuntimeError):
            warnings.simplefilter("ignore")
            return get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator())
        return {}


def _distribution(dimension: Dimension) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _sampler(kind: str, seed: int, number: int) -> optuna.samplers.BaseSampler:
    import numpy as np
    import optuna

    mixed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    return optuna.samplers.TPESampler(seed=mixed) if kind == "tpe" else optuna.samplers.RandomSampler(seed=mixed)


def _pruner(kind: str, trials: int) -> optuna.pruners.BasePruner:
    import optuna

    if kind == "hyperband":
        return optuna.pruners.HyperbandPruner()
    if kind == "median":  # the first fifth of the trials, at most five, is what the others are compared with
        return optuna.pruners.MedianPruner(n_startup_trials=max(1, min(5, trials // 5)))
    return optuna.pruners.NopPruner()


def _mend(file: Path) -> None:
    """Remove what a killed writer left: its lock, and half a line that the next one would be written onto."""
    file.with_name(file.name + ".lock").unlink(missing_ok=True)
    if file.is_file() and (data := file.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(file, data.rfind(b"\n") + 1)
