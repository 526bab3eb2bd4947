"""The training loop: build, restore, step, log, evaluate, save; readable in one sitting.

At a step's end: log, evaluate, then save. Rows up to step N are on disk before checkpoint N is published,
and which steps are logged, evaluated and saved follows from the step's number alone, so a resumed run
writes what an uninterrupted one would have.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from drivetrain.data import EpochStepper, Source, StepperContext
from drivetrain.engine.cadence import Agreement, Every, SupportsBool
from drivetrain.engine.data.feed import Feed, OrderedFeed
from drivetrain.engine.data.make_feed import eval_feed, train_feed
from drivetrain.engine.data.source_feed import SourceFeed
from drivetrain.engine.evaluate import Evaluation, Left, Replay, evaluate
from drivetrain.engine.fast.graphs import Graphs, capture_graph, watch_host_syncs
from drivetrain.engine.fast.pace import Pace
from drivetrain.engine.fast.threads import Threads
from drivetrain.engine.faults.dependence import check_dependence
from drivetrain.engine.faults.out_of_memory import Short, new_start, shrink, shrink_evaluation, undoable
from drivetrain.engine.group import Group
from drivetrain.engine.log.figures import FIGURES, TAIL, Figures
from drivetrain.engine.log.ledger import HALF, Ledger
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.log.rows import Rows
from drivetrain.engine.measure.memory import peak_memory
from drivetrain.engine.numerics.metrics import read_remarks
from drivetrain.engine.numerics.optim import LearningRates, make_optimizer, make_schedule
from drivetrain.engine.numerics.precision import Precision
from drivetrain.engine.setup import build_model, prepare
from drivetrain.engine.state import saved
from drivetrain.engine.state import tensors as state
from drivetrain.engine.state.best import Best
from drivetrain.engine.state.checkpoint import CheckpointWriter, Damaged, folder_name, verify
from drivetrain.engine.step import Step
from drivetrain.engine.strategies import make_strategy
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.recipe import check_agreement
from drivetrain.runs import Run
from drivetrain.task import Task, overrides


@dataclass(frozen=True)
class Result:
    outcome: Outcome
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Of a finished training: the evaluation of its final weights, which are of `facts["weights_step"]`."""
    facts: dict[str, Any] = field(default_factory=dict)


class Training:
    """One training in this process: everything a step needs, and the state that is saved."""

    def __init__(self, task: Task, plan: Plan, run: Run, group: Group, observer: Observer, stop: SupportsBool) -> None:
        self.task, self.plan, self.run, self.group, self.observer, self.stop = task, plan, run, group, observer, stop
        prepare(plan, group)
        self.threads = Threads(plan, group)
        self.precision = Precision(plan.precision, group.device)
        self.model: nn.Module = build_model(task, plan, run, group, observer)
        data, test = task.train_data(), task.eval_data()
        self.feed: Feed = train_feed(task, data, plan, group)
        self.feed.notice, self.feed.moment = observer.notice, observer.moment
        self.test: OrderedFeed | None = None if test is None else eval_feed(task, test, plan, group)
        check_agreement(task.settings())
        for feed in (self.feed, self.test):
            if feed is not None:
                feed.records_signature = group.is_main
        if task.best and test is None:
            raise Problem(f"best={task.best} needs an evaluation, but the task has no eval_data()")
        self.source: Source | None = data if isinstance(data, Source) else None
        state.model_tensors(self.model)  # what cannot be saved is said now, not at the first save
        parameters = list(self.model.parameters())
        self._sizes = {
            "parameters": state.count_parameters(parameters),
            "trainable": state.count_parameters(parameters, lambda p: p.requires_grad),
        }
        make = partial(make_optimizer, task, self.model, group.device, captured=not plan.is_sharded)
        self.strategy = make_strategy(self.model, make, task, plan, group, TAIL, run.path)
        self.optimizer = self.strategy.optimizer
        per_epoch = self.feed.steps_per_epoch
        self.total = int(task.steps or task.epochs * per_epoch)
        self.rates = LearningRates(
            self.optimizer, make_schedule(task, self.total, per_epoch), self.total, group, on_device=not plan.is_sharded
        )
        self.step = Step(task, self.model, self.feed, self.strategy, self.rates, self.precision, group)
        self.tail = TAIL
        self.step.undoable, self.step.stop = undoable(plan, self.model), stop
        self.step.moment = observer.moment if observer.watches else None
        self.writer: CheckpointWriter | None = None
        if group.is_main or self.strategy.checkpoint_group is not None:
            self.writer = CheckpointWriter(run, task.keep, observer.moment, observer.notice, self.strategy.checkpoint_group, group.is_main)
        self.log, self.evaluate_every, self.save_every = (Every(s, per_epoch) for s in (task.log_every, task.eval_every, task.save_every))
        self.compiled_from = plan.first_compiled_step(0, None)
        self.done = self._kept = 0
        """Steps taken, and those that are saved."""
        self.looks_closely = False
        """Whether it is found out what depends on the plan, even where this plan takes whole batches."""
        self.stepper: EpochStepper | None = None
        self._sought = False
        self.figures: dict[str, Any] | None = None
        """The checkpoint's, before a step has shown them."""
        self.evaluating = False
        self._replay: Replay | None = None
        self.best = Best(task.best, task.patience)
        self.metrics: dict[str, float] = {}
        self._begun, self.before = time.monotonic(), 0.0
        self.rows = Rows(self.step, observer, self.elapsed)

    # --- the loop ---

    def run_to_end(self, stop_after: int | None = None) -> Result:
        saved.restore(self)
        try:
            return self._train(stop_after)
        except torch.OutOfMemoryError as error:
            raise new_start(self, error) from None

    def set_pace(self) -> None:
        """Find out how steps run best, from the next one on."""
        self.pace = self.step.pace = Pace(self.step, self.plan, self.group, self.total, self.observer, self.compiled_from)

    def _train(self, stop_after: int | None) -> Result:
        self.set_pace()
        self.observer.started(self._facts())
        self.observer.moment("start")
        agreement = Agreement(self.group)
        per_epoch = self.feed.steps_per_epoch
        # What falls due inside the epoch of a source waits for its end, where its state is whole.
        stopping = save_late = evaluate_late = False
        ticking = self.group.is_main and self.group.device.type == "cpu"
        clocked = self.save_every.steps is None or self.evaluate_every.steps is None
        if self.task.eval_first and self.test is not None and self.done == 0:
            try:
                self._say_before(self.test)
            except Left:
                return self._stopped()
        self.feed.open(self.done)
        self.model.train()
        if self.done == 0:
            check_dependence(self.step, self.plan, self.run, self.observer, self.looks_closely)
        if self.rows.held(self.done) is not None and not self._evaluate_again():
            return self._stopped()
        self._kept = self.done
        self.rows.end_pause()
        while self.done < self.total and not self.best.out_of_patience:
            if self._may_stop():
                return self._stop_here()
            at_once = False  # whether the task's own learner takes the whole epoch
            if self.done % per_epoch == 0:
                self.observer.moment("epoch")
                self._rest()
                at_once = self._find_stepper() and self.done + per_epoch <= self.total
                if self.source is None:
                    self.feed.begin_epoch(self.done // per_epoch, self.model)
                elif not (at_once and self.stepper is not None and self.stepper.collects):
                    self.observer.moment("collect")
                    with self.precision.forward():
                        self.strategy.call_unevenly(self.feed.begin_epoch, self.done // per_epoch, self.model)
                    self._look_again()
            if not (at_once or clocked or save_late or evaluate_late or stop_after):
                self._take_quiet_steps(ticking)
                if self._may_stop():
                    return self._stop_here()
            self.observer.moment("step")
            if self.stop or clocked or stop_after is not None:
                self._ask(stop_after)
            first, coming = self.done + 1, self.done + (per_epoch if at_once else 1)
            last = coming == self.total
            resumable = self.source is None or coming % per_epoch == 0
            evaluate_late |= self.evaluate_every.due_in(first, coming)
            evaluating = self.test is not None and (last or (evaluate_late and resumable))
            logging = last or evaluating or self.log.due(coming) or (self.group.is_main and self.log.overdue())
            if at_once:
                self._take_epoch()
            else:
                with self.threads.measure_products() if self.done == 0 else nullcontext():
                    self._take(self.done, with_norm=logging)
                if self.done == 0 and self.threads.reason and self.group.is_main:
                    self.observer.planned({"reasons": {"threads": self.threads.reason}, "sentence": ""})
            self.done = coming
            ledger = self.step.ledger
            assert ledger is not None
            asked_stop, asked_save, asked_evaluation = agreement.read(self.done, self.strategy.piggyback, self.step.requests)
            evaluate_late = (evaluate_late or asked_evaluation) and not evaluating
            saving = last or self.save_every.due_in(first, coming) or asked_save or save_late
            stopping |= asked_stop
            if not (logging or saving or stopping or ledger.full or (ticking and self.rows.tick_due())):
                continue
            ledger.fetch()
            bad = self.rows.take_in(ledger, self.done, logging, wait=evaluating or saving or stopping)
            if bad is not None:
                raise self._not_a_number(bad)
            if evaluating:
                try:
                    saving |= self._evaluate(self.stop if resumable else False)
                except Left:
                    return self._stopped_evaluating()
                last |= self.best.out_of_patience
                saving |= last
            self.rows.emit()
            save_late = saving and not resumable
            if (saving or stopping) and resumable:
                self._save(wait=last)
            if stopping and resumable and not last:
                return self._stopped()
        return self._finish()

    def _find_stepper(self) -> bool:
        """Whether the task takes whole epochs by itself: all but the first, which shows what its figures are."""
        known = self.step.figures or (Figures.from_json(self.figures) if self.figures else None)
        if self._sought or known is None:
            return self.stepper is not None
        self._sought = True
        rates, feed = self.rates.device_table(), self.feed
        alone = (
            self.strategy.is_one_piece and self.group.device.type == "cuda" and self.step.loss_scale is None and self.plan.capture != "off"
        )
        if not alone or rates is None or not isinstance(feed, SourceFeed) or feed.steps_per_epoch > HALF:
            return False
        ledger = self.step.ledger or Ledger(known.used, self.group.device)
        context = StepperContext(
            self.group.device,
            self.optimizer,
            rates,
            ledger.ring,
            FIGURES,
            feed.random_keys,
            capture_graph,
            watch_host_syncs,
            self.observer.notice,
        )
        self.stepper = feed.source.stepper(self.model, context)
        if self.stepper is not None:  # it may have moved the model's tensors
            self.step.know(known, ledger)
            feed.forget_graphs()
            if self.step.graphs is not None:
                self.step.graphs.clear()
            self._replay = None
        return self.stepper is not None

    def _take_epoch(self) -> None:
        """An epoch's steps by the task's own learner; their figures are in the ledger as if the engine had taken them."""
        assert self.stepper is not None and self.step.ledger is not None and isinstance(self.feed, SourceFeed)
        per_epoch = self.feed.steps_per_epoch
        samples = None if self.stepper.collects else self.feed.collected_batch()
        self.stepper(self.done // per_epoch, self.done, samples)
        for step in range(self.done, self.done + per_epoch):
            if step + 1 < self.done + per_epoch and self.log.due(step + 1):
                self.rows.begin(step + 1)
            self.step.ledger.note(step)

    def _take_quiet_steps(self, ticking: bool) -> None:
        """The fast path of one process: steps after which nothing is due, up to the next one that has something."""
        per_epoch = self.feed.steps_per_epoch
        epoch_end = self.done - self.done % per_epoch + per_epoch
        due = min(self.total, epoch_end, *(every.next(self.done) for every in (self.log, self.evaluate_every, self.save_every)))
        take, ledger, stop, moment = self._take, self.step.ledger, self.stop, self.observer.moment
        if ledger is None or self.group.size > 1:
            return  # before the first step; and others may ask for something at every step
        for number in range(self.done, due - 1):
            if stop or ledger.full or (ticking and self.rows.tick_due()):
                return
            moment("step")
            take(number, with_norm=False)
            self.done = number + 1

    def _take(self, number: int, with_norm: bool) -> None:
        """Take a step; where memory runs out on any rank, all take it again with smaller micro-batches."""
        while True:
            try:
                self.step(number, with_norm)
                return
            except Short as short:
                ranks, possible = short.ranks, short.undoable
            shrink(self, ranks, possible)  # out of the except clause, whose traceback holds the memory

    def _ask(self, stop_after: int | None) -> None:
        """Note this rank's wishes; they reach every rank with the gradients of the coming step."""
        asked = self.step.requests
        asked[0] = bool(self.stop) or (stop_after is not None and self.done + 1 >= stop_after)
        asked[1] = self.group.is_main and self.save_every.overdue()
        asked[2] = self.group.is_main and self.evaluate_every.overdue()

    def _may_stop(self) -> bool:
        """Whether it was asked to stop, and can do so at once: a process that is alone need not ask others."""
        return bool(self.stop) and self.group.size == 1 and (self.source is None or self.done % self.feed.steps_per_epoch == 0)

    def _stop_here(self) -> Result:
        """Between two steps."""
        if self.done > self._kept:
            assert self.step.ledger is not None
            self.step.ledger.fetch()
            bad = self.rows.take_in(self.step.ledger, self.done, logging=False, wait=True)
            if bad is not None:
                raise self._not_a_number(bad)
            self.rows.emit()
            self._save(wait=False)
        return self._stopped()

    def _stopped_evaluating(self) -> Result:
        """Save what was trained; the evaluation is done, and its row written, when the run goes on."""
        self.rows.emit(before=self.done)
        self._save(wait=False)
        return self._stopped()

    def _evaluate_again(self) -> bool:
        """The evaluation in which the run was stopped; false if it is stopped there again."""
        try:
            self._evaluate(self.stop)
        except Left:
            return False
        self.rows.emit()
        self._save(wait=self.done == self.total)
        return True

    def _stopped(self) -> Result:
        if self.writer is not None:
            self.writer.wait()
            if self.writer.failure:
                raise Problem(f"stopped, but step {self.done:,} could not be saved: {self.writer.failure}", Outcome.INFRA)
        self.feed.close()
        return Result(Outcome.PREEMPTED, self.done, self.metrics)

    # --- figures ---

    def _not_a_number(self, step: int) -> Problem:
        if self.writer is not None:
            self.writer.wait()
        good = self.run.checkpoint_steps()
        where = f"the last good checkpoint is step {good[-1]:,}" if good else "no checkpoint was written before"
        if self.group.is_main:
            self.run.log_event("nan", step=step + 1)
        if self.source is not None and (fault := self.source.fault()):
            return Problem(f"{fault}.\nSo the loss is not a number from step {step + 1:,} on; {where}", Outcome.NAN)
        return Problem(
            f"the loss or its gradient is not a number at step {step + 1:,} (epoch {step // self.feed.steps_per_epoch + 1});"
            f" {where}.\nTry a lower learning_rate, clip=1, a warmup, or precision=fp32;"
            f" drivetrain resume {self.run.name} --find-nan names the module it comes from",
            Outcome.NAN,
        )

    def _say_before(self, test: OrderedFeed) -> None:
        """What the model can before it has learned anything here."""
        self.observer.moment("evaluate")
        metrics = self.evaluation(self.stop).metrics
        if self.group.is_main:
            figures = "   ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self.observer.notice(f"before the first step: {figures}   ({test.length:,} samples)")
            self.run.log_event("before", metrics=metrics)
        self._remark()

    def _remark(self) -> None:
        """Let the task say what the model makes; where that is sharded, all ranks ask it together."""
        if not overrides(self.task, "remarks") or not (self.group.is_main or self.plan.is_sharded):
            return
        with torch.no_grad(), self.precision.forward():
            remarks = read_remarks(self.strategy.call(self.task.remarks, self.model))
        for remark in remarks if self.group.is_main else ():
            self.observer.notice(remark)
            self.run.log_event("remark", step=self.done, text=remark)
        self._look_again()

    def _evaluate(self, stop: SupportsBool) -> bool:
        """Evaluate, add the metrics to this step's row; whether it is the best so far."""
        self.observer.moment("evaluate")
        result = self.evaluation(stop)
        self.metrics = result.metrics
        self.rows.add(self.done, result.metrics)
        better = self.best.update(result.metrics, self.done)
        if self.group.is_main and self.best.out_of_patience and self.done < self.total:
            best = "" if self.best.step is None else f" than {self.best.value:.4g} of step {self.best.step:,}"
            self.observer.notice(f"{self.task.patience} evaluations without a better {self.best.name}{best}: the run ends here (patience)")
            self.run.log_event("settled", step=self.done, best=self.best.step)
        self._remark()
        self.rows.end_pause()
        return better

    def evaluation(self, stop: SupportsBool = False) -> Evaluation:
        """Raises Left where a rank was asked to stop."""
        assert self.test is not None
        self._rest()
        self.strategy.broadcast_buffers()
        if self._replay is None and self.step.graphs is not None:  # its own: a failure there shall not touch training's
            graphs = Graphs(self.group.device, self.observer.notice)
            self._replay = Replay(graphs, self.pace.marked)
        self.evaluating = True
        while (result := self._try_to_evaluate(self.test, stop)) is None:
            pass
        self.evaluating = False
        self._look_again()
        return result

    def _try_to_evaluate(self, test: OrderedFeed, stop: SupportsBool) -> Evaluation | None:
        """None where memory ran out on any rank; all will then take fewer samples at a time."""
        try:
            step = self.step
            return evaluate(
                self.task, self.model, test, self.precision, self.group, self.strategy.call, self._replay, step.moment, step.undoable, stop
            )
        except Short as short:
            ranks = short.ranks
        shrink_evaluation(self, ranks)
        return None

    def _rest(self) -> None:
        """Before anything else than steps uses the model, or takes time."""
        self.step.rest()
        self.pace.rest()

    def _look_again(self) -> None:
        """Other code had its turn: what was captured may no longer hold."""
        if self.pace.look_again():
            self._replay = None

    def elapsed(self) -> float:
        return round(self.before + time.monotonic() - self._begun, 3)

    # --- state ---

    def _save(self, wait: bool) -> None:
        self.observer.moment("saving")
        self.observer.flush()
        if not self.strategy.weights_are_finite():
            raise self._not_a_number(self.done - 1)  # the loss was finite, but the update was not
        self.rows.sum_epoch()
        tensors, extra = saved.gather(self)
        if self.writer is not None:
            self.writer.save(self.done, tensors, extra, self.best.step)
            if wait:
                self.writer.wait()
                if self.writer.failure:
                    raise Problem(
                        f"training is done, but its last checkpoint could not be saved: {self.writer.failure}."
                        f"\nMake room, then: drivetrain resume {self.run.name}",
                        Outcome.INFRA,
                    )
        self.rows.end_pause()
        self._kept = self.done

    def damage(self, text: str) -> None:
        self.run.log_event("damaged-checkpoint", detail=text)
        self.observer.notice(text)

    # --- the ends ---

    def _facts(self) -> dict[str, Any]:
        return self._sizes | {
            "processes": self.group.size,
            "backend": self.plan.backend,
            "precision": self.plan.precision,
            "accumulation": self.plan.accumulation,
            "device": str(self.group.device),
            "step": self.done,
            "steps": self.total,
            "steps_per_epoch": self.feed.steps_per_epoch,
            "epochs": -(-self.total // self.feed.steps_per_epoch),
            "test_samples": self.test.length if self.test else 0,
        }

    def _finish(self) -> Result:
        """Final weights (the best ones, where `best` was asked for); repeatable, should it be interrupted."""
        self.observer.moment("finish")
        self.feed.close()
        self.strategy.broadcast_buffers()
        self.observer.flush()
        self.rows.sum_epoch()
        facts = self._facts() | {"time": self.elapsed(), "peak_memory_bytes": peak_memory(self.group.device), "train": self.rows.means()}
        facts |= {"weights_step": self.done, "best": self.best.name if self.best.step == self.done else ""}
        tensors, aliases = self.strategy.model_tensors()
        if self.group.is_main:
            if self.best.step is not None and self.best.step != self.done:
                try:
                    best = verify(self.run.checkpoints / folder_name(self.best.step))
                    tensors = state.with_prefix(best.tensors(), "model")
                    self.metrics = best.extra["metrics"]
                    facts |= {"weights_step": best.step, "best": self.best.name, "train": best.extra["train"]}
                except Damaged as damage:
                    self.damage(f"the best checkpoint (step {self.best.step:,}) cannot be used, so the last weights are kept: {damage}")
            try:
                state.write_weights(self.run.model_path, tensors, aliases)
                told = {"run": self.run.name, "steps": self.done, "processes": self.group.size, "precision": self.plan.precision}
                told["weights_step"] = facts["weights_step"]
                self.task.model_files(tensors, self.run.model_path.parent, told | {"metrics": self.metrics, "seconds": facts["time"]})
            except Exception as error:  # safetensors has its own error for a full disk
                raise Problem(
                    f"training is done, but the weights could not be written: {error}.\nThen: drivetrain resume {self.run.name}",
                    Outcome.INFRA,
                ) from None
        return Result(Outcome.OK, self.done, self.metrics, facts)
