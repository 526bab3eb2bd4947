"""Plans from predictions: golden plans for twelve machines, and how pins, memory and hardware change a plan."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

import pytest

from drivetrain.hardware import format_need
from drivetrain.hardware.described import parse
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.candidates import Candidate
from drivetrain.plan.capacity import MachineCapacity
from drivetrain.plan.choose import choose
from drivetrain.plan.fit import Fit, Point, next_size_to_measure, sizes_to_measure
from drivetrain.plan.predict_memory import host_memory, memory_by_part
from drivetrain.plan.predict_time import operation_seconds, step_seconds
from drivetrain.plan.profile import Profile, Work, reduction_buffer_bytes
from drivetrain.plan.rating import Rater
from drivetrain.plan.reasons import why_lost
from drivetrain.plan.search import _replaces
from drivetrain.task import Task
from tests.plan.golden import FILE, MACHINES, TASKS, plan, profile, text

IN_BF16 = [words for words in MACHINES if not any(part in words for part in ("T4", "cpu", "x6GB"))]


@pytest.mark.system  # profiles models in three precisions, which takes a minute
def test_golden_plans() -> None:
    new_lines, old_lines = text().splitlines(), FILE.read_text().splitlines()
    changes = "\n".join(difflib.unified_diff(old_lines, new_lines, "golden.txt", "new", lineterm="", n=1))
    assert not changes, f"plans changed; if that is intended: python -m tests.plan.golden\n{changes}"


def test_other_hardware_gives_other_reasons() -> None:
    sentences = {plan("1.7B", words).reasons["strategy"] for words in IN_BF16}
    assert len(sentences) >= 8


def test_the_global_batch_is_kept() -> None:
    for words in IN_BF16:
        chosen = plan("cnn", words)
        share = -(-chosen.global_batch // chosen.world_size)
        assert chosen.global_batch == 1024
        assert chosen.accumulation == -(-share // chosen.micro_batch)


def test_a_model_that_does_not_fit_unsharded_is_sharded_with_the_reason() -> None:
    chosen = plan("1.7B", "4xL4-24GB")
    assert chosen.strategy == "fsdp"
    assert "ddp does not fit" in chosen.reasons["strategy"]
    assert any(rejected["choice"] == "ddp" and "needs" in rejected["why"] for rejected in chosen.rejected)


def test_state_is_offloaded_to_the_host_only_if_nothing_else_fits() -> None:
    assert plan("1.7B", "8xA100-40GB").offload == "none"
    assert plan("1.7B", "1xRTX4090-24GB").offload == "all"


def test_deepspeed_is_chosen_where_only_its_offload_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory holds the optimizer's state but not all state; the GPU holds parameters and gradients."""
    monkeypatch.setattr("drivetrain.plan.deepspeed.find_spec", lambda name: True)
    chosen = plan("1.7B", "1xRTX5090-29GB, 30GB RAM")
    assert (chosen.strategy, chosen.zero_stage, chosen.offload) == ("deepspeed", 2, "optimizer")
    assert "single does not fit" in chosen.reasons["strategy"]
    monkeypatch.setattr("drivetrain.plan.deepspeed.find_spec", lambda name: None)
    with pytest.raises(Problem, match=r"24 GiB of the host's memory can be used.\nWays out: \(1\) 32 GiB of RAM .*\(2\) a GPU with 3\d GB"):
        plan("1.7B", "1xRTX5090-29GB, 30GB RAM")


def test_a_pin_stays_and_other_choices_follow_from_it() -> None:
    chosen = plan("1.7B", "8xH100-80GB", activation_checkpointing="true", micro_batch=8)
    assert (chosen.activation_checkpointing, chosen.micro_batch, chosen.reasons["micro_batch"]) == (True, 8, "pinned")
    assert plan("1.7B", "8xH100-80GB", strategy="fsdp", zero_stage=3).zero_stage == 3


def test_a_model_that_fits_nowhere_names_the_memory_and_three_ways_out() -> None:
    with pytest.raises(Problem, match=r"fits nowhere: .* needs \d+ GiB, each .* has .*\nWays out: \(1\) a GPU with \d+ GB .*\(2\).*\(3\)"):
        plan("1.7B", "1xRTX3050-6GB", offload="none")


def test_a_pinned_micro_batch_that_does_not_fit_is_named() -> None:
    with pytest.raises(Problem, match=r"at micro-batch 64 needs \d+ GiB.*\nWays out: .*leave out plan.micro_batch=64"):
        plan("135M", "1xL4-24GB", micro_batch=64, strategy="single", activation_checkpointing="false", offload="none")


@pytest.mark.parametrize("words", ["8xH100-80GB", "1xL4-24GB"])
def test_several_machines_without_a_stated_network_can_be_planned(words: str) -> None:
    """`train --nodes 2` never states a network: it detects only this machine."""

    machine = parse(words)
    procs = len(machine.gpus)
    processes: dict[str, Any] = {"device": "cuda", "world_size": 2 * procs, "local_procs": procs, "nodes": 2}
    settings = TASKS["135M"][0](global_batch=512).settings()
    chosen = choose(settings, machine, **processes, profile=profile("135M", "bf16"))
    assert chosen.predicted["seconds_by_part"]["communication"] > 0


def test_a_strategy_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.plan.deepspeed.find_spec", lambda name: None)
    with pytest.raises(Problem, match=r"pip install 'drivetrain\[deepspeed\]'"):
        plan("135M", "4xL4-24GB", strategy="deepspeed")


def test_more_processes_than_samples_is_refused() -> None:

    with pytest.raises(Problem, match="global_batch=64 is less than one sample for each of 256 processes"):
        choose(Task().settings(), parse("32 nodes x 8xH100-80GB"), device="cuda", world_size=256, local_procs=8, nodes=32)


def test_memory_by_part_falls_as_more_is_sharded() -> None:
    known = profile("1.7B", "bf16")
    candidates = [Candidate("ddp", 1, 16, 4), Candidate("fsdp", 1, 16, 4, zero_stage=2), Candidate("fsdp", 1, 16, 4, zero_stage=3)]
    needs = [sum(memory_by_part(known, candidate).values()) for candidate in candidates]
    assert needs == sorted(needs, reverse=True)
    assert memory_by_part(known, candidates[0])["optimizer"] == 4 * memory_by_part(known, candidates[2])["optimizer"]


def test_measured_points_correct_the_prediction_between_them() -> None:
    fit = Fit.of([Point(8, True, 2_000, 0.030, 0.010), Point(32, True, 6_000, 0.090, 0.010), Point(64, fits=False)])
    assert fit is not None and fit.largest == 32

    def half_of_measured(size: int) -> float:
        return 0.5 * (0.020 + (size - 8) / 24 * 0.060)

    assert fit.work_seconds(8, half_of_measured) == pytest.approx(0.020)
    assert fit.work_seconds(16, half_of_measured) == pytest.approx(0.040)
    assert fit.peak_bytes(32, lambda size: 100.0 * size) == pytest.approx(6_000)


def test_between_measured_points_the_correction_is_interpolated_and_beyond_them_it_is_that_of_the_nearest() -> None:
    fit = Fit.of([Point(8, True, 100), Point(32, True, 300)])
    assert fit is not None
    assert [fit.peak_bytes(size, lambda size: 100.0) for size in (4, 8, 16, 32, 64)] == pytest.approx([100, 100, 200, 300, 300])


def test_one_all_reduce_sends_almost_twice_the_gradients() -> None:
    known, machine = profile("cnn", "bf16"), MachineCapacity.of(parse("8xA100-40GB"), "cuda", 8)
    seconds = step_seconds(known, Candidate("ddp", 8, 4, world_size=8), machine)["communication"]
    assert seconds * machine.link == pytest.approx(2 * 7 / 8 * known.trained_bytes), "a ring sums, then shares the sums"
    slow = replace(machine, network=machine.link / 10)
    assert step_seconds(known, Candidate("ddp", 8, 4, world_size=8, nodes=2), slow)["communication"] == pytest.approx(10 * seconds)


def test_offloaded_state_is_divided_over_the_processes() -> None:
    known = untraced(1_000_000)
    candidates = [Candidate("fsdp", 1, 1, world_size, zero_stage=3, offload="all") for world_size in (1, 4)]
    assert [host_memory(known, candidate) for candidate in candidates] == [16_000_000, 4_000_000]


def test_a_candidate_that_needs_more_of_the_hosts_memory_than_there_is_does_not_fit() -> None:
    rater = Rater(profile("cnn", "bf16"), MachineCapacity.of(parse("1xH100-80GB, 64GB RAM"), "cuda", 1), 64, 1, 1)
    offloaded = rater.rate(Candidate("fsdp", 1, 64, 1, zero_stage=3, offload="all"), 1)
    assert offloaded.fits
    assert not replace(offloaded, usable_host_bytes=offloaded.host_bytes - 1).fits
    assert not replace(offloaded, usable_bytes=offloaded.needed_bytes - 1).fits


def test_what_fits_unsharded_is_sharded_for_a_large_gain_only() -> None:
    rater = Rater(profile("cnn", "bf16"), MachineCapacity.of(parse("8xH100-80GB"), "cuda", 8), 512, 8, 1)
    plain = rater.rate(Candidate("ddp", 64, 1, 8), 64)
    sharded = rater.rate(Candidate("fsdp", 64, 1, 8, zero_stage=2), 64)
    for faster, wins in ((1.2, False), (1.3, True)):
        assert _replaces(rater, replace(sharded, seconds={"work": plain.step_seconds / faster}), plain) is wins


def test_a_micro_batch_that_does_not_divide_the_share_takes_one_more() -> None:
    settings = Task(global_batch=64).settings()
    made = choose(settings, parse("cpu, 16 cores, 64GB RAM"), device="cpu", world_size=1, local_procs=1, pins={"micro_batch": 20})
    assert (made.micro_batch, made.accumulation) == (20, 4)


def test_the_buffer_of_a_sum_over_many_rows() -> None:
    """Measured on an H200: the gradient of a bias of 4,096 numbers, from 768, 1,536 and 6,144 rows."""
    assert [reduction_buffer_bytes(4096, rows) for rows in (768, 1536, 6144)] == [0, 50_331_648, 138_412_032]
    assert reduction_buffer_bytes(0, 1e9) == 0


def test_three_sizes_around_the_best_are_measured() -> None:
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert sizes_to_measure(sizes, 128) == [8, 32, 128]
    assert sizes_to_measure(sizes, 16) == [4, 16, 64]
    assert sizes_to_measure(sizes, 1) == [1, 2, 4]
    assert sizes_to_measure([7], 7) == sizes_to_measure([], 7) == [7]


def test_a_size_between_two_is_measured_if_they_are_far_apart_or_their_errors_differ() -> None:
    sizes = [8, 12, 16, 24, 32, 48, 64, 96, 128]
    predicted = {s: s * 1e-3 for s in sizes}

    def measured(seconds: dict[int, float]) -> list[int]:
        points: list[Point] = []
        while (size := next_size_to_measure(points, [8, 32, 128], predicted)) is not None:
            points.append(Point(size, size < 200, 0, seconds[size] + 0.002, 0.002, "captured"))
        return [p.micro_batch for p in points]

    assert measured({s: 1.3 * t for s, t in predicted.items()}) == [8, 32, 128, 16, 64]
    assert measured({s: (1.4 if s < 10 else 1.0) * t for s, t in predicted.items()}) == [8, 32, 128, 16, 12, 64]
    assert next_size_to_measure([Point(8, True, 0, 0.1), Point(32, False)], [8, 32, 128], predicted) is None


# --- possible plans ---------------------------------------------------------------------------


@pytest.mark.parametrize("words", [*IN_BF16, "1xRTX3090-24GB"])
@pytest.mark.parametrize("name", TASKS)
def test_no_plan_exceeds_the_card_s_rates(name: str, words: str) -> None:
    chosen, task_profile = plan(name, words), profile(name, "bf16")
    machine = MachineCapacity.of(parse(words), "cuda", chosen.world_size // chosen.nodes)
    traced = task_profile.checkpointed if chosen.activation_checkpointing else task_profile.plain
    assert traced is not None
    samples_per_rank = chosen.micro_batch * chosen.accumulation
    seconds = chosen.predicted["seconds_by_part"]["work"]
    for unit, rate in (("flops", 1e12 * machine.card.bf16), ("bytes", 1e9 * machine.card.bandwidth)):
        total = sum(w.num_calls * (chosen.accumulation * getattr(w, unit)[0] + samples_per_rank * getattr(w, unit)[1]) for w in traced.work)
        assert total / seconds <= rate, unit


def test_an_operation_takes_at_least_its_flops_at_the_card_s_rate() -> None:
    machine = MachineCapacity.of(parse("1xRTX3090-24GB"), "cuda", 1)
    for kind in ("gemm", "conv", "grouped", "attention", "recurrent", "other", "scattered", "summed", "embedding"):
        work = Work(1, kind, "bfloat16", (71e12, 0.0), (1.0, 0.0), (1e9, 0.0), (64.0, 0.0))
        assert operation_seconds(work, 1, machine, "bf16") >= 1.0, kind


def untraced(parameters: int) -> Profile:
    sizes = {"parameters": parameters, "trained": parameters, "parameter_bytes": 4 * parameters, "trained_bytes": 4 * parameters}
    return Profile.of_sizes(sizes | {"optimizer_bytes": 8 * parameters, "precision": "fp16"}, "it looks at values")


def planned(parameters: int, words: str) -> Plan:
    machine = parse(words)
    return choose(Task().settings(), machine, device="cuda", world_size=1, local_procs=1, profile=untraced(parameters))


def test_an_untraced_task_is_planned_by_the_size_of_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.plan.deepspeed.find_spec", lambda name: None)
    chosen = planned(922_000_000, "1xT4-16GB")
    assert chosen.offload == "all", "parameters, gradients and optimizer state are 13.7 GiB"
    assert "single does not fit (its state alone needs 14 GiB of 13 GiB)" in chosen.reasons["strategy"]
    assert planned(922_000_000, "1xL4-24GB").strategy == "single"
    with pytest.raises(
        Problem, match=r"fits nowhere: the state alone of .* needs 14 GiB, 6.4 GiB of the host's.*\nWays out: .*a GPU with 17 GB"
    ):
        planned(922_000_000, "1xT4-16GB, 8GB RAM")


def test_a_cpu_needs_no_accumulation_if_the_batch_fits() -> None:
    """The plan with a profile equals the one without, which `train` uses on a CPU."""
    words = "cpu, 16 cores, 64GB RAM"
    settings = TASKS["cnn"][0](global_batch=1024).settings()
    for procs in (1, 2):
        processes: dict[str, Any] = {"device": "cpu", "world_size": procs, "local_procs": procs}
        with_profile = choose(settings, parse(words), **processes, profile=profile("cnn", "bf16"))
        without_profile = choose(settings, parse(words), **processes)
        assert (with_profile.micro_batch, with_profile.accumulation, with_profile.strategy) == (
            without_profile.micro_batch,
            1,
            without_profile.strategy,
        )
    small = parse("cpu, 16 cores, 0.2GB RAM")
    smaller_plan = choose(settings, small, device="cpu", world_size=1, local_procs=1, profile=profile("cnn", "bf16"))
    assert smaller_plan.micro_batch < 1024


def test_the_reason_of_a_rejected_candidate_has_its_relative_speed() -> None:
    rater = Rater(profile("135M", "bf16"), MachineCapacity.of(parse("8xH100-80GB"), "cuda", 8), 512, 8, 1)
    best = rater.rate(Candidate("ddp", 8, 8, 8), 8)
    sharded = Candidate("fsdp", 8, 8, 8, zero_stage=2)
    for faster, reason in (
        (1.19, "19 % faster, but a less simple plan must be 25 % faster"),
        (1.0, "as fast, but less simple"),
        (0.8, "20 % slower"),
    ):
        rating = replace(best, candidate=sharded, seconds={"work": best.step_seconds / faster})
        assert why_lost(rater, sharded, rating, best)["why"].startswith(reason)


def test_need_and_usable_memory_get_enough_digits_to_differ() -> None:
    gib = 2**30
    assert format_need(13 * gib, 14.2 * gib) == "13 GiB of 14 GiB"
    assert format_need(13.94 * gib, 14.04 * gib) == "13.9 GiB of 14.0 GiB"
    assert format_need(14.041 * gib, 14.038 * gib) == "14.041 GiB of 14.038 GiB"


def test_the_reason_of_an_assumed_network_says_how_to_state_it() -> None:
    chosen = plan("135M", "2 nodes x 8xA100-40GB")
    assert '25 Gb/s between machines are assumed; state their network after a comma: --hardware "2 nodes x 8x' in chosen.reasons["network"]
    assert "network" not in plan("135M", "2 nodes x 8xA100-40GB, 100Gb/s").reasons


def test_the_reason_for_a_model_without_convolutions_does_not_mention_them() -> None:
    assert plan("135M", "1xL4-24GB").reasons["channels_last"] == "the model has no nn.Conv2d"
    assert "convolutions" in plan("cnn", "1xL4-24GB").reasons["channels_last"]
