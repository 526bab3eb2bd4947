"""No strategy changes the mathematics, and each strategy can resume from the checkpoints of all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.engine.fast.blocks import describe_blocks, repeated_blocks
from drivetrain.engine.fast.compiled import Compiled
from drivetrain.engine.group import Group
from drivetrain.engine.strategies.recompute import recompute_blocks
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.choose import choose
from drivetrain.plan.deepspeed import configuration
from tests.deep_tasks import LENGTH, Net, Towers, Transformer, train
from tests.engine.test_invariance import assert_same_metrics
from tests.processes import on_ranks
from tests.sample_tasks import HARDWARE, Plain, rows, weights

FSDP, FSDP2 = {"strategy": "fsdp"}, {"strategy": "fsdp", "zero_stage": 2}
ZERO1, ZERO2, ZERO3 = ({"strategy": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3))
ZERO3["deepspeed_config"] = str(Path(__file__).with_name("parted.json"))  # by default, DeepSpeed does not shard such small parameters
RECOMPUTE = {"activation_checkpointing": True}
SGD = {"optim": "sgd", "clip": 0.1, "learning_rate": 0.2}  # AdamW would hide a wrong scale of the gradient
ADAM = {"optim": "adamw", "learning_rate": 0.02, "clip": 0.5}


def label(value: Any) -> str:
    """Returns the id of a test case: its pins or settings."""
    if not isinstance(value, dict):
        return str(value)
    return " ".join(f"{k}={v}" for k, v in value.items() if k != "deepspeed_config")


def run(name: str, folder: Path, world: int, pins: dict[str, Any], stop: int | None = None, **settings: Any) -> list[dict[str, Any]]:
    return list(on_ranks(world, train, name, str(folder), settings, pins, stop)[0])


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that gives the metrics without sharding; it trains each task with the same settings only once."""
    trained: dict[str, list[dict[str, Any]]] = {}

    def curve(name: str, world: int = 1, **settings: Any) -> list[dict[str, Any]]:
        key = f"{name} {world} {settings}"
        if key not in trained:
            trained[key] = run(name, tmp_path_factory.mktemp("alone"), world, {}, **settings)
        return trained[key]

    return curve


# --- the same mathematics ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "pins"),
    [
        (2, FSDP | {"micro_batch": 2}),
        (2, FSDP2 | {"micro_batch": 4} | RECOMPUTE),
        (2, ZERO1 | {"micro_batch": 4}),
        (2, ZERO2 | {"micro_batch": 2} | RECOMPUTE),
        (2, ZERO3 | {"micro_batch": 4} | RECOMPUTE),
        pytest.param(4, {}, marks=pytest.mark.system),
        (4, FSDP | RECOMPUTE),
        pytest.param(4, FSDP2 | {"micro_batch": 2}, marks=pytest.mark.system),
        (1, FSDP),
        (1, ZERO2),
    ],
    ids=label,
)
def test_every_strategy_gives_one_curve(world: int, pins: dict[str, Any], curves: Any, tmp_path: Path) -> None:
    """Loss, gradient norm and evaluation of a transformer are the same, with tied embeddings, a loss over tokens, clipping
    and accumulation."""
    reference = curves("Transformer")
    assert reference[-1]["train/loss"] < 0.8 * reference[0]["train/loss"]
    assert sum(r["grad_norm"] > 0.5 for r in reference) >= 4, "some gradients must be clipped, or the test proves nothing"
    assert_same_metrics(reference, run("Transformer", tmp_path, world, pins), 1e-5)


@pytest.mark.parametrize("pins", [FSDP | RECOMPUTE, RECOMPUTE | {"micro_batch": 3}], ids=label)
def test_blocks_of_several_towers_are_sharded_and_checkpointed(pins: dict[str, Any], curves: Any, tmp_path: Path) -> None:
    """An image encoder beside a text encoder, neither of which holds most of the parameters."""
    assert_same_metrics(curves("TwoTowers"), run("TwoTowers", tmp_path, 2, pins), 1e-5)


def test_blocks_of_all_towers_are_found() -> None:
    towers = Towers()
    blocks = repeated_blocks(towers)
    assert blocks == [*towers.images[1], *towers.texts]
    assert describe_blocks(blocks) == "5 ConvBlock and 4 Block blocks"
    total = sum(p.numel() for p in towers.parameters())
    for tower in (towers.images[1], towers.texts):
        assert sum(p.numel() for p in tower.parameters()) < total / 2, "else the blocks of one tower would be enough"
    heads = nn.ModuleDict({"blocks": towers.texts, "small": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))})
    assert repeated_blocks(heads) == [*towers.texts], "a list with few parameters is no tower"
    assert not repeated_blocks(nn.Sequential(towers.texts, nn.Linear(300, 300))), "most of the model is something else"


def test_blocks_of_all_towers_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    towers, calls = Towers(), []

    def compiler(forward: Any, **options: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(forward.__self__)
            return forward(*args)

        return call

    monkeypatch.setattr(torch, "compile", compiler)
    compiled = Compiled(towers.forward, towers, "full batch", deterministic=False, custom_passes=False)
    assert compiled.description == "its 5 ConvBlock and 4 Block blocks"
    inputs = torch.rand(2, 3, 8, 8), torch.zeros(2, LENGTH, dtype=torch.long)
    output = compiled("full batch", *inputs)
    assert set(calls) == {*towers.images[1], *towers.texts}
    calls.clear()
    assert torch.equal(compiled("partial batch", *inputs), output) and not calls


@pytest.mark.parametrize("pins", [{}, FSDP | {"micro_batch": 3}, ZERO2], ids=label)
def test_half_precision_stays_within_its_rounding_error(pins: dict[str, Any], curves: Any, tmp_path: Path) -> None:
    assert_same_metrics(curves("Transformer", precision="bf16"), run("Transformer", tmp_path, 2, pins, precision="bf16"), 8e-3)


@pytest.mark.system
@pytest.mark.parametrize("pins", [FSDP, ZERO2], ids=label)
def test_under_fp16_all_strategies_scale_the_loss_and_skip_steps_alike(pins: dict[str, Any], tmp_path: Path) -> None:
    """The loss is too large for fp16: the first steps overflow on some rank, and every rank skips them."""
    settings = ADAM | {"precision": "fp16", "spike": 3000.0}
    reference = run("Exploding", tmp_path / "ddp", 2, {}, **settings)
    assert reference[-1]["skipped_steps"] > 0
    metrics = run("Exploding", tmp_path / "sharded", 2, pins, **settings)
    for key in ("skipped_steps", "loss_scale"):
        assert [r[key] for r in metrics] == [r[key] for r in reference]
    assert metrics[-1]["train/loss"] == pytest.approx(reference[-1]["train/loss"], rel=1e-2)


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "settings", "pins"),
    [
        ("UnusualModel", {}, FSDP),  # an LSTM, frozen, unused and tied parameters, a sparse embedding
        ("UnusualModel", {}, ZERO3),
        ("LossParts", {}, ZERO2),
        ("TwoPartLoss", {}, FSDP),
        ("OwnOptimizer", {"kind": "rmsprop"}, FSDP),
        ("OwnOptimizer", {"kind": "count"}, FSDP),
        ("OwnOptimizer", {"kind": "count"}, ZERO3),
    ],
    ids=label,
)
def test_models_losses_and_optimizers_of_all_kinds(
    name: str, settings: dict[str, Any], pins: dict[str, Any], curves: Any, tmp_path: Path
) -> None:
    assert_same_metrics(curves(name, **SGD, **settings), run(name, tmp_path, 2, pins | {"micro_batch": 3}, **SGD, **settings), 1e-4)


@pytest.mark.system
@pytest.mark.parametrize("pins", [FSDP], ids=label)
def test_batchnorm_is_as_in_ddp(pins: dict[str, Any], curves: Any, tmp_path: Path) -> None:
    assert_same_metrics(curves("BatchNormBlocks", world=2, **SGD), run("BatchNormBlocks", tmp_path, 2, pins | RECOMPUTE, **SGD), 1e-4)


@pytest.mark.system
def test_scalar_parameters_float64_and_sources_under_fsdp(curves: Any, tmp_path: Path) -> None:
    assert_same_metrics(curves("Transformer", scalar=True), run("Transformer", tmp_path / "a", 2, FSDP, scalar=True), 1e-5)
    assert_same_metrics(curves("Float64", **SGD), run("Float64", tmp_path / "b", 2, FSDP, **SGD), 1e-5)
    assert_same_metrics(curves("RandomWalkTask", **SGD), run("RandomWalkTask", tmp_path / "c", 2, FSDP, **SGD), 1e-5)


@pytest.mark.system
@pytest.mark.parametrize("pins", [FSDP | {"offload": "all"}, ZERO3 | {"offload": "all"}], ids=label)
def test_offload_changes_no_result(pins: dict[str, Any], curves: Any, tmp_path: Path) -> None:
    assert_same_metrics(curves("Transformer", **ADAM), run("Transformer", tmp_path, 2, pins | {"micro_batch": 3}, **ADAM), 2e-5)


# --- activation checkpointing ------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings"), [("Transformer", {"dropout": 0.2}), ("BatchNormBlocks", {})])
def test_recomputed_blocks_change_no_bit(name: str, settings: dict[str, Any], curves: Any, tmp_path: Path) -> None:
    """Dropout masks and BatchNorm statistics stay the same."""
    assert run(name, tmp_path, 1, RECOMPUTE, **settings) == curves(name, **settings)


def test_a_recomputed_block_saves_only_its_inputs() -> None:
    torch.manual_seed(0)
    sizes: list[int] = []

    def saved_numbers(net: nn.Module) -> int:
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
            net.logits(torch.randint(23, (8, 7))).sum()  # type: ignore[operator]
        return sum(sizes)

    net = Net(6, 0.0, False)
    before = saved_numbers(net)
    recompute_blocks(net, Notices(), True)
    assert saved_numbers(net) < before / 3
    assert {type(b).__name__ for b in net.blocks} == {"RecomputedBlock"}
    assert list(net.state_dict()) == list(Net(6, 0.0, False).state_dict())


class Notices:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


def test_activation_checkpointing_without_blocks_gives_a_notice() -> None:
    notices = Notices()
    recompute_blocks(Plain().model(), notices, True)  # type: ignore[arg-type]
    assert notices.texts == ["activation checkpointing is left out: this model has no repeated blocks"]


# --- resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pins", [FSDP, ZERO2], ids=label)
def test_a_resumed_run_is_bit_equal(pins: dict[str, Any], tmp_path: Path) -> None:
    settings = ADAM | {"dropout": 0.2, "eval_every": 3}
    run("Transformer", tmp_path / "uninterrupted", 2, pins | {"micro_batch": 3}, **settings)
    for stop in (2, None):
        run("Transformer", tmp_path / "resumed", 2, pins | {"micro_batch": 3}, stop, **settings)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")


@pytest.mark.system
@pytest.mark.parametrize("pins", [FSDP], ids=label)
def test_another_number_of_processes_keeps_the_curve(pins: dict[str, Any], curves: Any, tmp_path: Path) -> None:
    for world, stop in ((2, 2), (1, 5), (3, None)):
        run("Transformer", tmp_path, world, pins, stop, **ADAM)
    assert_same_metrics(curves("Transformer", **ADAM), rows(tmp_path), 5e-5)


@pytest.mark.system
def test_any_strategy_resumes_from_any_other(curves: Any, tmp_path: Path) -> None:
    for pins, stop in (({}, 1), (FSDP, 2), (ZERO3, 4), (FSDP, None)):
        run("Transformer", tmp_path, 2, pins, stop, **ADAM)
    assert_same_metrics(curves("Transformer", **ADAM), rows(tmp_path), 5e-5)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "resumed"] == [1, 2, 4]


def _train_without_shared_folder(folder: str, stop: int | None, group: Group) -> list[dict[str, Any]]:
    """Trains as on two machines, of which only the first has the run's folder: rank 0 writes and reads all files."""
    from unittest.mock import patch

    folder_of_rank = folder if group.is_main else f"{folder}-of-rank-{group.rank}"
    with patch.object(Group, "shares_folder", lambda *_: False):
        return train("Transformer", folder_of_rank, ADAM, FSDP, stop, group)


@pytest.mark.system
def test_processes_that_do_not_share_a_folder(curves: Any, tmp_path: Path) -> None:
    for stop in (3, None):
        on_ranks(2, _train_without_shared_folder, str(tmp_path / "run"), stop)
    assert_same_metrics(curves("Transformer", **ADAM), rows(tmp_path / "run"), 5e-5)
    assert not (tmp_path / "run-of-rank-1" / "checkpoints").exists()


@pytest.mark.world_size(2)
def test_the_ranks_find_out_whether_they_share_a_folder(group: Group, tmp_path: Path) -> None:
    assert group.shares_folder(tmp_path / "new")
    assert not group.shares_folder(tmp_path / str(group.rank))
    assert list((tmp_path / "new").iterdir()) == []


def test_a_checkpoint_with_one_damaged_file_is_not_used(tmp_path: Path) -> None:
    """The checkpoint before it is used, and the run gives the same result."""
    settings = ADAM | {"save_every": 2, "keep": 5}
    run("Transformer", tmp_path / "uninterrupted", 2, FSDP, **settings)
    run("Transformer", tmp_path / "damaged", 2, FSDP, 4, **settings)
    file_names = sorted(p.name for p in (tmp_path / "damaged/checkpoints/step-00000004").glob("*.distcp"))
    assert file_names == ["__0_0.distcp", "__1_0.distcp"], "each rank writes a file of its own"
    file = tmp_path / "damaged/checkpoints/step-00000004/__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])
    run("Transformer", tmp_path / "damaged", 2, FSDP, **settings)
    assert rows(tmp_path / "damaged") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "damaged") == weights(tmp_path / "uninterrupted")
    assert '"resumed", "rank": 0, "step": 2' in (tmp_path / "damaged/events.jsonl").read_text()


# --- memory of a rank -------------------------------------------------------------------------


def _num_values(folder: str, pins: dict[str, Any], group: Group) -> dict[str, int]:
    """Returns how many values of the model and of the optimizer's state this rank has after a step."""
    from drivetrain.engine.state.tensors import local_tensor
    from tests import sample_tasks

    job = sample_tasks.training("Transformer", folder, group, ADAM, pins)
    job.execution.step(0)
    state = [v for s in job.execution.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    return {
        "model": sum(local_tensor(p).numel() for p in job.setup.model.parameters()),
        "optimizer": sum(local_tensor(v).numel() for v in state),
    }


@pytest.mark.parametrize(("pins", "shards"), [(FSDP, (2, 2)), (FSDP2, (2, 2)), (ZERO1, (1, 2)), (ZERO3, (1000, 2))], ids=label)
def test_a_rank_has_only_its_shard(pins: dict[str, Any], shards: tuple[int, int], tmp_path: Path) -> None:
    size = sum(p.numel() for p in Transformer().model().parameters())
    model_shards, optimizer_shards = shards
    for num_values in on_ranks(2, _num_values, str(tmp_path), pins):
        assert num_values["model"] <= size / model_shards + 200
        assert size / optimizer_shards - 400 < num_values["optimizer"] / 2 <= size / optimizer_shards + 400


# --- plans -------------------------------------------------------------------------------------


def plan(pins: dict[str, Any], **settings: Any) -> Plan:
    return choose(Transformer(**settings).settings(), HARDWARE, device="cpu", world_size=2, local_procs=2, pins=pins)


def test_steps_run_eager_and_the_plan_says_why() -> None:
    chosen = plan(FSDP)
    assert (chosen.capture, chosen.compile, chosen.reasons["compile"]) == ("off", "off", "parameters come and go under fsdp")
    with pytest.raises(Problem, match=r"plan\.compile=on does not go with plan\.strategy=deepspeed"):
        plan(ZERO2 | {"compile": "on"})


def test_the_plan_overrides_the_users_deepspeed_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    config = {"zero_optimization": {"stage": "auto", "reduce_bucket_size": 1000}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}
    file.write_text(json.dumps(config))
    pins = ZERO2 | {"deepspeed_config": str(file), "micro_batch": 3}
    run("Transformer", tmp_path / "run", 2, pins, 2, epochs=1)
    written = json.loads((tmp_path / "run" / "deepspeed.json").read_text())
    assert written["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert written["gradient_clipping"] == 0.5
    assert written["train_micro_batch_size_per_gpu"] == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_batch_size": 999}, "train_batch_size .* use global_batch"),
        ({"gradient_clipping": 9.0}, "gradient_clipping .* the plan has 0.5; use clip"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage .* the plan has 2; use plan.zero_stage"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer.device .* use plan.offload"),
        ({"bf16": {"enabled": True}}, "bf16 .* use precision"),
        ({"optimizer": {"type": "Adam"}}, "optimizer .* use optim"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler .* use decay"),
    ],
    ids=label,
)
def test_a_deepspeed_value_that_conflicts_with_the_plan_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(config))
    with pytest.raises(Problem, match=message):
        plan(ZERO2 | {"deepspeed_config": str(tmp_path / "mine.json")})


def test_a_deepspeed_value_that_agrees_or_is_off_is_accepted() -> None:
    agreeing = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}, "amp": {"enabled": False}}
    assert configuration(Plan(strategy="deepspeed", zero_stage=2, deepspeed_config=agreeing), 0.5)["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("name", "pins", "settings", "why"),
    [
        ("Transformer", ZERO2, {"scalar": True}, r"a parameter of a single number \(scale\): give it the shape \[1\]"),
        ("Float64", ZERO2, {}, "this model has float64: use fsdp"),
        ("RandomWalkTask", ZERO3, {}, "a Source calls the model itself"),
    ],
)
def test_what_deepspeed_cannot_train_is_refused(
    name: str, pins: dict[str, Any], settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=why):
        run(name, tmp_path, 2, pins, **settings)
