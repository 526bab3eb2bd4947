"""One-line faults: wrong comparisons, lost terms, skipped checks, each with the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change of one line of the source that a user, or a contract, would notice."""

    name: str
    file: str
    """Below src/drivetrain."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    breaks: str
    """What is wrong for a user."""
    tests: tuple[str, ...]
    """Node ids of pytest, one of which must fail."""


DATA = [
    Fault(
        "order-of-every-epoch-alike", "engine/data/feed.py",
        "permutation(self.length, self.seed, epoch, RandomStream.ORDER)", "permutation(self.length, self.seed, 0, RandomStream.ORDER)",
        "every epoch shows the samples in the same order",
        ("tests/engine/test_data.py::test_a_feed_shuffles_each_epoch_differently",),
    ),
    Fault(
        "augmentation-of-every-epoch-alike", "engine/data/keyed_random.py",
        "return key(self.seed, self._epoch, self.stream, call)", "return key(self.seed, self.stream, call)",
        "a sample is augmented in the same way in every epoch",
        ("tests/engine/test_data.py::test_a_sample_is_augmented_differently_in_each_epoch",),
    ),
    Fault(
        "dropout-of-every-micro-batch-alike", "engine/step.py",
        "seed = key(self.number, position, after=self._seed)", "seed = key(self.number, after=self._seed)",
        "all micro-batches of a step, on all ranks, draw the same dropout masks",
        ("tests/engine/test_resume.py::test_each_micro_batch_draws_dropout_of_its_own",),
    ),
]  # fmt: skip

STEP = [
    Fault(
        "partial-micro-batch-counts-in-full", "engine/objective.py",
        "objective = value if num_real == global_size else value * (num_real / global_size)", "objective = value",
        "accumulation multiplies the gradient",
        ("tests/engine/test_invariance.py::test_accumulation_pinned_instead_of_micro_batch",),
    ),
    Fault(
        "dummy-micro-batch-counts", "engine/objective.py",
        "factor = 1 if num_real else 0", "factor = 1",
        "a rank without samples adds the tokens of a sample that another rank has",
        ("tests/engine/test_invariance.py::test_all_world_sizes_and_micro_batches_give_the_same_metrics[TokenMean]",),
    ),
    Fault(
        "limit-never-reset", "engine/objective.py",
        "            self._limit_passed.zero_()", "            pass",
        "once a collection passed its limit (PPO's kl_stop), nothing is learned from any later one",
        ("tests/rl/test_ppo.py::test_kl_stop_ends_the_learning_from_a_collection",),
    ),
    Fault(
        "norm-before-scaling", "engine/strategies/base.py",
        "norm = self.gradient_norm() if factor is None else self.gradient_norm() * factor", "norm = self.gradient_norm()",
        "with a loss over tokens, or fp16, the clip compares another norm than the gradient's",
        ("tests/engine/test_invariance.py::test_a_clipped_step_is_as_long_as_the_clip_says",),
    ),
    Fault(
        "clip-lost-beside-a-factor", "engine/strategies/base.py",
        "factor = clip_factor if factor is None else factor * clip_factor", "factor = clip_factor if factor is None else factor",
        "with a loss over tokens, or fp16, gradients are not clipped",
        ("tests/engine/test_invariance.py::test_a_clipped_step_is_as_long_as_the_clip_says",),
    ),
]  # fmt: skip

OPTIMIZER = [
    Fault(
        "warm-up-from-zero", "engine/numerics/optim.py",
        "return (step + 1) / warmup", "return step / warmup",
        "the first step changes nothing",
        ("tests/engine/test_optim.py::test_a_schedule_warms_up_to_its_peak_then_decays_to_zero",),
    ),
    Fault(
        "decay-jumps-after-warm-up", "engine/numerics/optim.py",
        "done_share = (step - warmup) / max(1, steps - warmup)", "done_share = step / max(1, steps)",
        "the learning rate never reaches its peak",
        ("tests/engine/test_optim.py::test_a_schedule_warms_up_to_its_peak_then_decays_to_zero",),
    ),
    Fault(
        "weight-decay-ignored", "engine/numerics/optim.py",
        '"weight_decay": task.weight_decay', '"weight_decay": 0.0',
        "the setting weight_decay changes nothing",
        ("tests/engine/test_optim.py::test_weight_decay_is_a_setting_of_every_optimizer",),
    ),
    Fault(
        "fp16-good-steps-not-reset", "engine/numerics/precision.py",
        "self.good_steps.add_(1.0).mul_(1.0 - overflow)", "self.good_steps.add_(1.0)",
        "the loss scale grows soon after an overflow, and overflows again",
        ("tests/engine/test_precision.py::test_the_loss_scale_doubles_after_2000_good_steps_in_a_row",),
    ),
]  # fmt: skip

STATE = [
    Fault(
        "hash-not-compared", "engine/state/checkpoint.py",
        'if sha256 != expected["sha256"]:', 'if not sha256:',
        "a flipped bit in a checkpoint is trained on",
        ("tests/engine/test_checkpoint.py::test_any_flipped_byte_is_noticed",),
    ),
    Fault(
        "manifest-not-synced", "engine/state/checkpoint.py",
        "            os.fsync(file.fileno())", "            pass",
        "after a power cut a published checkpoint has no manifest",
        ("tests/engine/test_checkpoint.py::test_all_is_on_the_disk_before_a_checkpoint_gets_its_name",),
    ),
    Fault(
        "shards-not-synced", "engine/state/shards.py",
        "sync_files=True", "sync_files=False",
        "after a power cut a published checkpoint has empty files",
        ("tests/engine/test_checkpoint.py::test_all_is_on_the_disk_before_a_checkpoint_gets_its_name",),
    ),
    Fault(
        "index-may-point-outside", "engine/state/shards.py",
        "if os.sep in storage.relative_path:", "if storage.relative_path.startswith(os.sep):",
        "a run directory of somebody else makes drivetrain read files beside it",
        ("tests/engine/test_checkpoint.py::test_an_index_that_points_outside_is_refused",),
    ),
    Fault(
        "patience-starts-over-at-resume", "engine/state/best.py",
        '"waited": self._num_worse}', '"waited": 0}',
        "a run that is restarted often never runs out of patience",
        ("tests/test_patience.py::test_a_resumed_run_has_the_patience_that_was_left",),
    ),
    Fault(
        "rows-after-the-checkpoint", "engine/saving.py",
        "        setup.observer.flush()", "        pass",
        "after a kill rows are missing that the checkpoint says were logged",
        ("tests/engine/test_resume.py::test_rows_are_on_the_disk_before_their_checkpoint_is_written",),
    ),
]  # fmt: skip

LOG = [
    Fault(
        "stop-request-forgotten", "engine/cadence.py",
        "self._stop_waits |= requests.stop", "self._stop_waits = requests.stop",
        "SIGTERM within an epoch of PPO is ignored",
        ("tests/engine/test_cadence.py::test_requests_of_any_rank_take_effect_and_a_stop_is_not_forgotten",),
    ),
    Fault(
        "clock-not-reset", "engine/cadence.py",
        "        self._last_seconds = self._clock()", "        pass",
        "with save_every=10min every step after ten minutes is saved",
        ("tests/engine/test_cadence.py::test_a_period_in_seconds_is_checked_after_every_step",),
    ),
    Fault(
        "rows-out-of-order", "engine/log/ring.py",
        "torch.cat([self.tensor[first:], self.tensor[: last + 1]])", "torch.cat([self.tensor[: last + 1], self.tensor[first:]])",
        "every 256 steps losses are logged at the wrong steps",
        ("tests/engine/test_rows.py::test_rows_come_in_order_beyond_the_end_of_the_ring",),
    ),
]  # fmt: skip

PROCESSES = [
    Fault(
        "half-precision-gradients-not-summed", "engine/strategies/replicate.py",
        "for flat in self._flat_gradients]:", "for flat in self._flat_gradients[-1:]]:",
        "parameters in bf16 drift apart between ranks",
        ("tests/engine/test_distributed.py::test_gradients_of_used_and_unused_parameters_are_summed",),
    ),
    Fault(
        "fsdp-averages", "engine/strategies/sharded.py",
        "module.set_gradient_divide_factor(1.0)", "module.set_gradient_divide_factor(float(group.size))",
        "under fsdp gradients are smaller the more GPUs there are",
        ("tests/engine/test_strategies.py::test_every_strategy_gives_one_curve[2-strategy=fsdp micro_batch=2]",),
    ),
    Fault(
        "deepspeed-averages", "engine/strategies/zero.py",
        "scale = self.group.size * (1.0 if factor is None else float(factor))", "scale = 1.0 if factor is None else float(factor)",
        "under DeepSpeed gradients are smaller the more GPUs there are",
        ("tests/engine/test_strategies.py::test_every_strategy_gives_one_curve[2-strategy=deepspeed zero_stage=1 micro_batch=4]",),
    ),
    Fault(
        "any-class-from-the-wire", "engine/group/wire.py",
        "        if name not in CHECKPOINT_CLASSES:", "        if not name:",
        "a stranger on the network runs code in a worker",
        ("tests/engine/test_wire.py::test_malformed_bytes_are_refused",),
    ),
    Fault(
        "request-read-twice", "engine/group/requests.py",
        "self._ignore_before[slot] = step + self.lag_steps + 1", "self._ignore_before[slot] = step + self.lag_steps",
        "on GPUs one request to save makes two checkpoints",
        ("tests/engine/test_stop_requests.py::test_on_a_gpu_one_request_takes_effect_once",),
    ),
]  # fmt: skip

FAULT_HANDLING = [
    Fault(
        "buffers-not-put-back", "engine/faults/out_of_memory.py",
        "                owner[name] = original  # a forward pass", "                pass  # a forward pass",
        "after memory ran out the model has another buffer than before the step",
        ("tests/engine/test_oom.py::test_buffers_are_restored_after_any_change",),
    ),
    Fault(
        "unequal-halves-averaged", "engine/faults/dependence.py",
        "(value * self.num_first + second_value * num_second) / self.num_samples", "(value + second_value) / 2",
        "a correct loss is said to depend on the plan",
        ("tests/engine/test_dependence.py::test_nothing_else_is_reported[Plain]",),
    ),
    Fault(
        "norm-may-be-nan", "engine/log/slots.py",
        "return [NORM, *(self.total_slots[name] for name in self.parts)]", "return [*(self.total_slots[name] for name in self.parts)]",
        "a run whose gradients are not numbers goes on until its loss is none",
        ("tests/engine/test_precision.py::test_a_gradient_that_is_nan_is_noticed_at_its_step_without_a_save",),
    ),
    Fault(
        "spoilt-weights-saved", "engine/saving.py",
        "if not self.execution.strategy.weights_are_finite():", "if False:",
        "an update that overflowed is saved, and good checkpoints are deleted for it",
        ("tests/engine/test_precision.py::test_weights_that_an_update_made_infinite_are_not_saved",),
    ),
    Fault(
        "suspended-machine-hangs", "supervise/hang_detector.py",
        "            self._resumed_at = now", "            pass",
        "after a suspended machine wakes up, its workers are killed as hung",
        ("tests/test_deaths.py::test_time_in_which_the_supervisor_was_suspended_is_not_held_against_a_rank",),
    ),
    Fault(
        "restarts-without-end", "supervise/restarts.py",
        "1 if step > self._last_step else", "1 if step >= self._last_step else",
        "a run that always dies at one step is restarted for ever",
        ("tests/test_deaths.py::test_only_restarts_without_a_new_checkpoint_are_counted",),
    ),
    Fault(
        "verdict-without-one-moment", "supervise/verdicts.py",
        "at_one_moment = has_all and max(node.first_time for node in latest) <= min(node.last_time for node in latest)", "at_one_moment = has_all",
        "ranks of several machines are called hung though each only waited for a while",
        ("tests/test_machines.py::test_all_ranks_must_have_waited_at_the_same_time",),
    ),
    Fault(
        "consequence-named-as-cause", "supervise/ending.py",
        "and min(orders_of_deaths) < order", "and min(orders_of_deaths) > order",
        "of a worker that was killed the user hears an error of another one's",
        ("tests/test_deaths.py::test_the_cause_is_named_not_the_errors_that_follow_from_it",),
    ),
]  # fmt: skip

LAUNCH = [
    Fault(
        "any-proof-is-right", "launch/rendezvous/handshake.py",
        "hmac.compare_digest(proof.encode(), _digest(token, purpose, member_nonce, leader_nonce).encode())", "len(proof) == 64",
        "whoever reaches the port joins the run",
        ("tests/launch/rendezvous/test_security.py::test_without_the_token_nobody_joins_or_learns_anything",),
    ),
    Fault(
        "nonce-of-the-member-reused", "launch/rendezvous/handshake.py",
        "    member_nonce = _read_nonce(_read_line(peer, deadline))\n    own_nonce = secrets.token_hex(32)",
        "    member_nonce = _read_nonce(_read_line(peer, deadline))\n    own_nonce = member_nonce",
        "an eavesdropper joins by sending again what it has recorded",
        ("tests/launch/rendezvous/test_security.py::test_the_leader_draws_a_new_nonce_for_every_connection",),
    ),
    Fault(
        "messages-not-numbered", "launch/rendezvous/link.py",
        'hmac.new(key, number.to_bytes(8, "big") + text, "sha256")', 'hmac.new(key, text, "sha256")',
        "somebody on the network repeats or leaves out a message",
        ("tests/launch/rendezvous/test_security.py::test_a_repeated_message_is_refused",),
    ),
    Fault(
        "token-file-for-all-to-read", "launch/rendezvous/token.py",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600", "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644",
        "other users of the machine read the token",
        ("tests/launch/rendezvous/test_security.py::test_only_its_owner_may_read_the_token_file",),
    ),
    Fault(
        "token-of-a-group-accepted", "launch/rendezvous/token.py",
        "stat.S_IMODE(status.st_mode) & 0o077", "stat.S_IMODE(status.st_mode) & 0o007",
        "a token that the user's group can read is used",
        ("tests/launch/rendezvous/test_security.py::test_only_its_owner_may_read_the_token_file",),
    ),
]  # fmt: skip

PLAN = [
    Fault(
        "offload-counted-once-a-process", "plan/predict_memory.py",
        "return offloaded[candidate.offload] // candidate.world_size", "return offloaded[candidate.offload]",
        "offload is refused for lack of RAM that it does not need",
        ("tests/plan/test_search.py::test_offloaded_state_is_divided_over_the_processes",),
    ),
    Fault(
        "all-reduce-sends-half", "plan/predict_time.py",
        "return 2 * share * profile.trained_bytes / link", "return share * profile.trained_bytes / link",
        "ddp is predicted faster than it is, and chosen where fsdp wins",
        ("tests/plan/test_search.py::test_one_all_reduce_sends_almost_twice_the_gradients",),
    ),
    Fault(
        "far-point-corrects", "plan/fit.py",
        "(ratios[0][1] if not below else ratios[-1][1])", "(ratios[-1][1] if not below else ratios[0][1])",
        "a micro-batch beyond the measured ones is said to fit, and does not",
        ("tests/plan/test_search.py::test_between_measured_points_the_correction_is_interpolated_and_beyond_them_it_is_that_of_the_nearest",),
    ),
    Fault(
        "host-memory-ignored", "plan/rating.py",
        "return self.needed_bytes <= self.usable_bytes and self.host_bytes <= self.usable_host_bytes",
        "return self.needed_bytes <= self.usable_bytes",
        "a plan offloads more than the machine's RAM",
        ("tests/plan/test_search.py::test_a_candidate_that_needs_more_of_the_hosts_memory_than_there_is_does_not_fit",),
    ),
    Fault(
        "slower-candidate-wins", "plan/search.py",
        "return later.samples_per_second > min_speedup(best.candidate, later.candidate) * best.samples_per_second",
        "return later.samples_per_second > best.samples_per_second",
        "a model that fits each GPU is sharded for a gain that no prediction can see",
        ("tests/plan/test_search.py::test_what_fits_unsharded_is_sharded_for_a_large_gain_only",),
    ),
    Fault(
        "accumulation-rounded-down", "plan/choose.py",
        "    accumulation = -(-share // micro_batch)", "    accumulation = share // micro_batch",
        "the plan says fewer micro-batches than a step takes",
        ("tests/plan/test_search.py::test_a_micro_batch_that_does_not_divide_the_share_takes_one_more",),
    ),
]  # fmt: skip

FILES = [
    Fault(
        "lock-of-a-deleted-directory", "runs/locks.py",
        "            if os.fstat(handle).st_nlink:", "            if handle:",
        "a run that is deleted while it starts is trained twice",
        ("tests/test_runs.py::test_a_lock_is_never_of_a_directory_that_was_deleted_meanwhile",),
    ),
    Fault(
        "run-json-not-synced", "runs/files.py",
        "            os.fsync(file.fileno())", "            pass",
        "after a power cut run.json is empty",
        ("tests/test_runs.py::test_a_file_is_on_the_disk_before_it_replaces_the_old_one",),
    ),
    Fault(
        "row-of-the-checkpoint-cut", "runs/files.py",
        'row["step"] <= step:', 'row["step"] < step:',
        "after a resume the row of the checkpoint's step is missing",
        ("tests/test_runs.py::test_a_resume_deletes_the_rows_it_will_repeat",),
    ),
    Fault(
        "environment-wins", "recipe.py",
        '"environment": from_environment, "command line": from_command_line}',
        '"command line": from_command_line, "environment": from_environment}',
        "epochs=5 on the command line is ignored where DRIVETRAIN_EPOCHS is set",
        ("tests/test_cli.py::test_precedence_and_origins",),
    ),
    Fault(
        "range-without-its-end", "settings.py",
        "not mark.low <= number <= mark.high:", "not mark.low <= number < mark.high:",
        "the largest allowed value of a setting is refused",
        ("tests/test_settings.py::test_text_becomes_a_value_of_the_type",),
    ),
    Fault(
        "hours-are-minutes", "settings.py",
        '"h": 3600', '"h": 60',
        "save_every=4h saves every four minutes",
        ("tests/test_settings.py::test_lengths_in_seconds",),
    ),
    Fault(
        "unknown-fields-ignored", "strict.py",
        "if unknown := sorted(str(key) for key in value if key not in known):", "if unknown := []:",
        "a misspelt field of a plan or message is dropped without a word",
        ("tests/test_strict.py::test_values_that_do_not_fit_are_refused",),
    ),
    Fault(
        "any-job-will-do", "processes/job.py",
        "    if not isinstance(job, job_class):", "    if not isinstance(job, Job):",
        "a worker starts on a job of another purpose",
        ("tests/test_jobs.py::test_a_whole_job_of_another_purpose_is_refused",),
    ),
]  # fmt: skip

FAULTS = [*DATA, *STEP, *OPTIMIZER, *STATE, *LOG, *PROCESSES, *FAULT_HANDLING, *LAUNCH, *PLAN, *FILES]
