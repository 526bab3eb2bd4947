"""Evaluates the model of a training between its steps."""

from __future__ import annotations

import torch

from drivetrain.data import Picture
from drivetrain.engine.evaluate import Evaluation, EvaluationGraphs, Evaluator
from drivetrain.engine.execution import Execution, TrainingActivity
from drivetrain.engine.faults.out_of_memory import OutOfMemoryOnRanks
from drivetrain.engine.group.requests import SupportsBool
from drivetrain.engine.log.pictures import encode_pictures
from drivetrain.engine.log.rows import RowLog
from drivetrain.engine.numerics.metrics import read_remarks
from drivetrain.engine.setup import Setup
from drivetrain.engine.state.best import Best
from drivetrain.engine.state.resume import Progress
from drivetrain.task import overrides


class TrainingEvaluation:
    """Evaluates the model of a training. Where memory runs out on any rank, all ranks take fewer samples at a time."""

    def __init__(self, setup: Setup, execution: Execution) -> None:
        self.setup, self.execution = setup, execution
        self._graphs: EvaluationGraphs | None = None
        self._graphs_version = -1
        self._has_reported_picture = False

    def __call__(self, step: int, stop: SupportsBool = False) -> Evaluation:
        """Raises EvaluationStopped where a rank was asked to stop."""
        setup, execution = self.setup, self.execution
        assert setup.evaluation is not None
        setup.observer.reached("evaluate")
        execution.pause()
        execution.strategy.broadcast_buffers()
        execution.activity = TrainingActivity.EVALUATION
        while isinstance(result := self._try(stop), OutOfMemoryOnRanks):
            execution.shrink_evaluation(step, setup.evaluation, result)
        execution.activity = TrainingActivity.STEPS
        execution.resume()
        return result

    def _try(self, stop: SupportsBool) -> Evaluation | OutOfMemoryOnRanks:
        setup, execution = self.setup, self.execution
        assert setup.evaluation is not None
        evaluate = Evaluator(
            setup.task, setup.model, setup.evaluation, setup.precision, setup.group, execution.strategy.call, self._present_graphs(),
            execution.step.reached, execution.step.can_undo,
        )  # fmt: skip
        try:
            return evaluate(stop)
        except OutOfMemoryOnRanks as error:
            return OutOfMemoryOnRanks(error.ranks)  # without the traceback, which holds memory

    def _present_graphs(self) -> EvaluationGraphs | None:
        if self._graphs is None or self._graphs_version != self.execution.graph_version:
            graphs = self.execution.new_graphs()
            self._graphs = None if graphs is None else EvaluationGraphs(graphs, self.execution.tuner.assumed_values)
            self._graphs_version = self.execution.graph_version
        return self._graphs

    def after_step(self, progress: Progress, rows: RowLog, stop: SupportsBool) -> bool:
        """Evaluates and adds the metrics to the row of the step; returns whether they are the best so far."""
        progress.metrics = self(progress.step, stop).metrics
        rows.add(progress.step, progress.metrics)
        is_best = progress.best.update(progress.metrics, progress.step)
        self.report_patience(progress.step, progress.best)
        self.report_remarks(progress.step)
        rows.end_pause()
        return is_best

    # --- notices to the user ---

    def report_first(self) -> None:
        """Evaluates before the first step."""
        setup = self.setup
        assert setup.evaluation is not None
        metrics = self(0, setup.stop).metrics
        if setup.group.is_main:
            values = "   ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            setup.observer.notice(f"before the first step: {values}   ({setup.evaluation.length:,} samples)")
            setup.run.log_event("before", metrics=metrics)
        self.report_remarks(0)

    def report_patience(self, step: int, best: Best) -> None:
        setup = self.setup
        if setup.group.is_main and best.out_of_patience and step < setup.total_steps:
            than = "" if best.step is None else f" than {best.value:.4g} of step {best.step:,}"
            setup.observer.notice(f"{best.patience} evaluations without a better {best.name}{than}: the run ends here (patience)")
            setup.run.log_event("settled", step=step, best=best.step)

    def report_remarks(self, step: int) -> None:
        """Shows the task's remarks on the model after an evaluation; all ranks call a sharded model together."""
        setup, execution = self.setup, self.execution
        if not overrides(setup.task, "remarks") or not (setup.group.is_main or execution.plan.is_sharded):
            return
        with torch.no_grad(), setup.precision.forward():
            lines, pictures = read_remarks(execution.strategy.call(setup.task.remarks, setup.model))
        if setup.group.is_main:
            for line in lines:
                setup.observer.notice(line)
                setup.run.log_event("remark", step=step, text=line)
            self._report_pictures(step, pictures)
        execution.resume()

    def _report_pictures(self, step: int, pictures: list[Picture]) -> None:
        """Hands the pictures to the observers. The first one that cannot be encoded causes a notice; the training continues."""
        images, fault = encode_pictures(pictures)
        for image in images:
            self.setup.observer.picture(step, image)
        if fault and not self._has_reported_picture:
            self._has_reported_picture = True
            self.setup.observer.notice(f"{fault}; the training continues without such pictures")
