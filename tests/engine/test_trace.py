"""What a GPU does otherwise than the CPU that a trace runs on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from drivetrain.data import Tensors
from drivetrain.engine.measure.fake_kernels import FakeGpuKernels
from drivetrain.engine.measure.survey import _start_in_child, survey
from drivetrain.engine.measure.trace import OperationRecorder, ShapesOnly
from drivetrain.hardware.described import parse
from drivetrain.plan.capacity import MachineCapacity
from drivetrain.plan.predict_time import NORM_CHANNEL_BYTES_PER_SECOND, operation_seconds
from drivetrain.task import Task


class Film(Task):
    global_batch: int = 32

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(1024, 10)
        )

    def train_data(self) -> Tensors:
        return Tensors(torch.zeros(64, 3, 4, 16, 16), torch.zeros(64, dtype=torch.int64))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)


@pytest.fixture(scope="module")
def profiles() -> Any:
    return {precision: survey(Film(), precision) for precision in ("fp32", "bf16")}


def test_pooling_stays_in_half_precision_as_on_a_gpu(profiles: Any) -> None:
    """A CPU's autocast makes max_pool3d a full copy, which was half of the memory predicted for such nets."""
    full, half = (profiles[p].plain.peak(32, gradients=False) for p in ("fp32", "bf16"))
    assert half < 0.6 * full


def test_a_norm_of_few_channels_is_as_slow_as_they_are_few(profiles: Any) -> None:
    machine = MachineCapacity.of(parse("1xH200-141GB"), "cuda", 1)
    [forward, backward] = [w for w in profiles["bf16"].plain.work if w.kind == "channels"]
    for work in (forward, backward):
        moved = work.bytes[0] + 4096 * work.bytes[1]
        assert work.depth == (8.0, 0.0)
        assert operation_seconds(work, 4096, machine, "bf16") > moved / (NORM_CHANNEL_BYTES_PER_SECOND * 8)
    assert not [w for w in profiles["fp32"].plain.work if w.kind == "channels"], "cuDNN's, in full precision"


class Converted(Film):
    """Its model is moved to another precision while it is made, and two of its layers share their weights."""

    def model(self) -> nn.Module:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(3072, 3072, bias=False), nn.Linear(3072, 3072, bias=False)
                self.second.weight = self.first.weight

            def forward(self, x: Tensor) -> Tensor:
                return self.second(self.first(x.flatten(1).to(torch.bfloat16))).float()

        return Tied().to(torch.bfloat16)


def test_a_model_may_be_converted_while_it_is_made() -> None:
    profile = survey(Converted(), "fp32")
    assert profile.traced == "fake", "no weights were made for it"
    assert profile.parameters == 3072 * 3072
    assert nn.Linear(2, 2).to(torch.bfloat16).weight.dtype == torch.bfloat16, "torch's own way is back"


class Channelwise(Film):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(24, 24, 7, padding=3, groups=24), nn.Flatten(), nn.Linear(24 * 64, 10))

    def train_data(self) -> Tensors:
        return Tensors(torch.zeros(64, 24, 8, 8), torch.zeros(64, dtype=torch.int64))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, (batch[0] * model[2].bias.mean(), batch[1]))  # type: ignore[index, union-attr]


@pytest.mark.parametrize(("precision", "kind"), [("bf16", "grouped"), ("fp32", "grouped_flat")])
def test_convolutions_in_groups_are_counted_by_what_each_group_sees(precision: str, kind: str) -> None:
    forward, backward = (w for w in survey(Channelwise(), precision).plain.work if w.kind == kind)
    assert forward.flops == (0.0, 2 * 24 * 64 * 49)
    assert backward.flops == (0.0, 2 * 2 * 24 * 64 * 49), "of the input and of the weights"
    assert forward.depth == backward.depth == (1.0, 0.0)


def test_work_beside_is_done_here_where_the_copy_fails() -> None:
    here = os.getpid()
    assert _start_in_child(lambda: os.getpid())() != here or len(os.sched_getaffinity(0)) == 1

    def dies() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    assert _start_in_child(dies)() == 7

    def wrong() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _start_in_child(wrong)()


def test_a_process_that_may_have_no_children_works_by_itself() -> None:
    """A daemonic one, as pools of processes are made of."""
    with get_context("fork").Pool(1) as pool:
        work, at_all = pool.apply(_pids)
    assert work == at_all


def _pids() -> tuple[int, int]:
    return _start_in_child(os.getpid)(), os.getpid()


# --- every product is counted --------------------------------------------------------------------


def products(work: Callable[[], object]) -> list[tuple[str, float]]:
    """(kind, FLOPs) of the operations that multiply."""
    recorder = OperationRecorder([])
    with ShapesOnly(allow_non_fake_inputs=True), FakeGpuKernels(None, recorder.record_work), recorder:
        work()
    return [(kind, flops) for kind, _, flops, *_ in recorder.operations if flops]


def new(*shape: int) -> Tensor:
    return torch.empty(*shape)


def without_gradients() -> None:
    with torch.inference_mode():
        F.linear(new(4, 5), new(6, 5), new(6))


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: new(4, 6).addmm_(new(4, 5), new(5, 6)), ("gemm", 240)),
        (lambda: torch.mm(new(4, 5), new(5, 6), out=new(4, 6)), ("gemm", 240)),
        (lambda: new(3, 4, 6).baddbmm_(new(3, 4, 5), new(3, 5, 6)), ("gemm", 720)),
        (lambda: torch.addbmm(new(4, 6), new(3, 4, 5), new(3, 5, 6)), ("gemm", 720)),
        (lambda: torch.einsum("bik,bkj->bij", new(3, 4, 5), new(3, 5, 6)), ("gemm", 720)),
        (lambda: torch.mv(new(4, 6), new(6)), ("gemm", 48)),
        (lambda: torch.dot(new(6), new(6)), ("gemm", 12)),
        (lambda: F.bilinear(new(3, 4), new(3, 5), new(6, 4, 5)), ("other", 720)),
        (without_gradients, ("gemm", 240)),
        (lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(new(1, 2, 8, 4), new(1, 2, 8, 4), new(1, 2, 8, 4)), ("attention", 2048)),
    ],
)  # fmt: skip
def test_every_operator_that_multiplies_is_counted(work: Callable[[], object], expected: tuple[str, float]) -> None:
    assert products(work) == [expected]


def test_a_frozen_layer_costs_its_forward_and_its_input_s_gradient() -> None:
    class Frozen(Task):
        def model(self) -> nn.Module:
            base = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 4))
            base[1].requires_grad_(False)
            return base

        def train_data(self) -> Tensors:
            return Tensors(torch.randn(16, 32), torch.zeros(16, dtype=torch.long))

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            x, y = batch
            return F.cross_entropy(model(x), y)

    found = survey(Frozen(), "bf16").plain
    assert found is not None
    flops = sum(w.num_calls * (w.flops[0] + w.flops[1]) for w in found.work)
    assert flops == 2 * (2 * 32 * 64 + 2 * 64 * 64 + 3 * 64 * 4)


def test_a_copied_layer_shares_the_mode_of_its_tensors() -> None:
    """nn.TransformerEncoder copies its layers; copies of the mode freed the storage of BatchNorm's counter once each."""
    mode = ShapesOnly(allow_non_fake_inputs=True)
    with mode:
        counter = nn.BatchNorm1d(4).num_batches_tracked
        layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    assert isinstance(counter, FakeTensor) and counter.fake_mode is mode
    assert all(isinstance(p, FakeTensor) and p.fake_mode is mode for p in layers.parameters())
