"""The study: the parameters of all trials and their results, in Optuna's journal."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.outcomes import Problem
from drivetrain.tune.space import Dimension, Space

if TYPE_CHECKING:
    import optuna

TrialState = Literal["running", "finished", "pruned", "failed"]

JOURNAL = "study.journal"
STUDY_NAME = "tune"
"""The study's name in its journal."""
SAMPLERS = ("tpe", "random")
PRUNERS = ("median", "hyperband", "none")


def need_optuna() -> None:
    """Imports Optuna; raises Problem with the name of the extra if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise Problem("tune needs Optuna: pip install 'drivetrain[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Proposal:
    """One set of parameters to train."""

    number: int
    params: dict[str, Any]
    reported: int = 0
    """The number of evaluations that the study has already."""


@dataclass(frozen=True)
class TrialRecord:
    """A trial as the study stores it."""

    number: int
    state: TrialState
    """A trial that waits to be resumed is "running" too."""
    params: dict[str, Any]
    value: float | None
    facts: dict[str, Any] = field(default_factory=dict)
    """step (of the best evaluation), steps (taken), message (why it failed)"""


class Study:
    """Optuna's study in a folder that only this process uses."""

    def __init__(self, folder: Path, space: Space, direction: str, sampler: str, seed: int, prune: str, trials: int) -> None:
        need_optuna()
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        self.space, self.direction, self.sampler, self.seed = space, direction, sampler, seed
        file = folder.resolve() / JOURNAL
        _repair(file)
        lock = JournalFileOpenLock(str(file))
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(file), lock))
        if STUDY_NAME not in optuna.get_all_study_names(storage):
            optuna.create_study(storage=storage, study_name=STUDY_NAME, direction="maximize" if direction == "max" else "minimize")
        self._study = optuna.load_study(study_name=STUDY_NAME, storage=storage, pruner=_pruner(prune, trials))
        self._trials: dict[int, optuna.Trial] = {}

    # --- proposals and results (Optuna's ask and tell) ---

    def ask(self, count: int = 1) -> list[Proposal]:
        """Proposes new sets of parameters."""
        distributions = {name: _distribution(dimension) for name, dimension in self.space.items()}
        proposals = []
        for _ in range(count):
            # Seeded by the trial's number, so that an interrupted study proposes the same as an uninterrupted one.
            self._study.sampler = _sampler(self.sampler, self.seed, len(self._study.get_trials(deepcopy=False)))
            trial = self._study.ask(distributions)
            proposals.append(self._proposal(trial))
        return proposals

    def unfinished(self) -> list[Proposal]:
        """Returns the trials that had not ended when the study was interrupted, with the parameters they had."""
        from optuna.trial import Trial, TrialState

        proposals = []
        for frozen in self._study.get_trials(states=(TrialState.RUNNING,)):
            self._study.sampler = _sampler(self.sampler, self.seed, frozen.number)
            trial = Trial(self._study, frozen._trial_id)
            for name, dimension in self.space.items():  # needed if the interruption came before all parameters were in the journal
                trial._suggest(name, _distribution(dimension))
            proposals.append(self._proposal(trial, len(frozen.intermediate_values)))
        return proposals

    def report(self, number: int, evaluation: int, value: float) -> None:
        """Stores the value of a trial's evaluation (1, 2, ...)."""
        self._trials[number].report(value, evaluation)

    def should_prune(self, number: int) -> bool:
        """Whether a trial is too bad to continue, by its evaluations so far."""
        return self._trials[number].should_prune()

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

    # --- results ---

    def trials(self) -> list[TrialRecord]:
        """Returns all trials, in the order of their numbers."""
        states: dict[str, TrialState] = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
        return [
            TrialRecord(
                t.number, states.get(t.state.name, "running"), dict(t.params), t.values[0] if t.values else None, dict(t.user_attrs)
            )
            for t in self._study.get_trials(deepcopy=False)
        ]

    def best(self) -> TrialRecord | None:
        """Returns the best finished trial, the earliest of equal ones."""
        finished = [t for t in self.trials() if t.state == "finished" and t.value is not None]
        sign = -1 if self.direction == "max" else 1
        return min(finished, key=lambda t: (sign * (t.value or 0.0), t.number), default=None)

    def importances(self) -> dict[str, float]:
        """Returns each parameter's share in the variance of the values (PED-ANOVA); empty if too few trials have finished."""
        import warnings

        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        values = [t.value for t in self.trials() if t.state == "finished"]
        if len(values) < 4 or len(set(values)) < 2:
            return {}
        with warnings.catch_warnings(), contextlib.suppress(ValueError, RuntimeError):
            warnings.simplefilter("ignore")
            return get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator())
        return {}


def _distribution(dimension: Dimension) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    if dimension.is_whole:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.is_log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)


def _sampler(kind: str, seed: int, number: int) -> optuna.samplers.BaseSampler:
    import numpy as np
    import optuna

    trial_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    return optuna.samplers.TPESampler(seed=trial_seed) if kind == "tpe" else optuna.samplers.RandomSampler(seed=trial_seed)


def _pruner(kind: str, trials: int) -> optuna.pruners.BasePruner:
    import optuna

    if kind == "hyperband":
        return optuna.pruners.HyperbandPruner()
    if kind == "median":  # the first fifth of the trials, at most five, are never pruned
        return optuna.pruners.MedianPruner(n_startup_trials=max(1, min(5, trials // 5)))
    return optuna.pruners.NopPruner()


def _repair(file: Path) -> None:
    """Removes what a killed process may leave: the journal's lock, and an incomplete last line."""
    file.with_name(file.name + ".lock").unlink(missing_ok=True)
    if file.is_file() and (data := file.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(file, data.rfind(b"\n") + 1)
