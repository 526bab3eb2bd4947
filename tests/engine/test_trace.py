"""A trace on the CPU predicts the memory and work of a GPU, also where their kernels differ."""

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


class VideoNet(Task):
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
    return {precision: survey(VideoNet(), precision) for precision in ("fp32", "bf16")}


def test_pooling_stays_in_half_precision_as_on_a_gpu(profiles: Any) -> None:
    """A CPU's autocast makes max_pool3d a full copy, which was half of the memory predicted for such nets."""
    full, half = (profiles[p].plain.peak(32, gradients=False) for p in ("fp32", "bf16"))
    assert half < 0.6 * full


def test_a_norm_is_slower_the_fewer_channels_it_has(profiles: Any) -> None:
    machine = MachineCapacity.of(parse("1xH200-141GB"), "cuda", 1)
    [forward, backward] = [w for w in profiles["bf16"].plain.work if w.kind == "channels"]
    for work in (forward, backward):
        num_bytes = work.bytes[0] + 4096 * work.bytes[1]
        assert work.depth == (8.0, 0.0)
        assert operation_seconds(work, 4096, machine, "bf16") > num_bytes / (NORM_CHANNEL_BYTES_PER_SECOND * 8)
    assert not [w for w in profiles["fp32"].plain.work if w.kind == "channels"], "in fp32, cuDNN computes the norm"


class ConvertedModel(VideoNet):
    """Its model() converts the model to bf16, and two of its layers share their weights."""

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
    profile = survey(ConvertedModel(), "fp32")
    assert profile.traced == "fake", "the trace allocated no weights"
    assert profile.parameters == 3072 * 3072
    assert nn.Linear(2, 2).to(torch.bfloat16).weight.dtype == torch.bfloat16, "after the survey, torch converts as usual"


class GroupedConvolution(VideoNet):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(24, 24, 7, padding=3, groups=24), nn.Flatten(), nn.Linear(24 * 64, 10))

    def train_data(self) -> Tensors:
        return Tensors(torch.zeros(64, 24, 8, 8), torch.zeros(64, dtype=torch.int64))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, (batch[0] * model[2].bias.mean(), batch[1]))  # type: ignore[index, union-attr]


@pytest.mark.parametrize(("precision", "kind"), [("bf16", "grouped"), ("fp32", "grouped_channels_first")])
def test_the_work_of_grouped_convolutions_is_counted_per_group(precision: str, kind: str) -> None:
    forward, backward = (w for w in survey(GroupedConvolution(), precision).plain.work if w.kind == kind)
    assert forward.flops == (0.0, 2 * 24 * 64 * 49)
    assert backward.flops == (0.0, 2 * 2 * 24 * 64 * 49), "the gradients of the input and of the weights"
    assert forward.depth == backward.depth == (1.0, 0.0)


def test_work_is_repeated_in_this_process_if_the_child_fails() -> None:
    this_process = os.getpid()
    assert _start_in_child(lambda: os.getpid())() != this_process or len(os.sched_getaffinity(0)) == 1

    def dies_in_child() -> int:
        if os.getpid() != this_process:
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    assert _start_in_child(dies_in_child)() == 7

    def raises() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _start_in_child(raises)()


def test_a_process_that_may_have_no_children_does_the_work_itself() -> None:
    """The workers of a multiprocessing pool are daemons, which may have no children."""
    with get_context("fork").Pool(1) as pool:
        work_pid, own_pid = pool.apply(_pids)
    assert work_pid == own_pid


def _pids() -> tuple[int, int]:
    return _start_in_child(os.getpid)(), os.getpid()


# --- every matrix product is counted --------------------------------------------------------------------


def products(work: Callable[[], object]) -> list[tuple[str, float]]:
    """Returns (kind, FLOPs) of the operations that multiply matrices."""
    recorder = OperationRecorder([])
    with ShapesOnly(allow_non_fake_inputs=True), FakeGpuKernels(None, recorder.record_work), recorder:
        work()
    return [(kind, flops) for kind, _, flops, *_ in recorder.operations if flops]


def empty(*shape: int) -> Tensor:
    return torch.empty(*shape)


def without_gradients() -> None:
    with torch.inference_mode():
        F.linear(empty(4, 5), empty(6, 5), empty(6))


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: empty(4, 6).addmm_(empty(4, 5), empty(5, 6)), ("gemm", 240)),
        (lambda: torch.mm(empty(4, 5), empty(5, 6), out=empty(4, 6)), ("gemm", 240)),
        (lambda: empty(3, 4, 6).baddbmm_(empty(3, 4, 5), empty(3, 5, 6)), ("gemm", 720)),
        (lambda: torch.addbmm(empty(4, 6), empty(3, 4, 5), empty(3, 5, 6)), ("gemm", 720)),
        (lambda: torch.einsum("bik,bkj->bij", empty(3, 4, 5), empty(3, 5, 6)), ("gemm", 720)),
        (lambda: torch.mv(empty(4, 6), empty(6)), ("gemm", 48)),
        (lambda: torch.dot(empty(6), empty(6)), ("gemm", 12)),
        (lambda: F.bilinear(empty(3, 4), empty(3, 5), empty(6, 4, 5)), ("other", 720)),
        (without_gradients, ("gemm", 240)),
        (lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(empty(1, 2, 8, 4), empty(1, 2, 8, 4), empty(1, 2, 8, 4)), ("attention", 2048)),
    ],
)  # fmt: skip
def test_every_operator_that_multiplies_is_counted(work: Callable[[], object], expected: tuple[str, float]) -> None:
    assert products(work) == [expected]


def test_a_frozen_layer_costs_its_forward_and_the_gradient_of_its_input() -> None:
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

    work = survey(Frozen(), "bf16").plain
    assert work is not None
    flops = sum(w.num_calls * (w.flops[0] + w.flops[1]) for w in work.work)
    assert flops == 2 * (2 * 32 * 64 + 2 * 64 * 64 + 3 * 64 * 4)


def test_a_copied_layer_shares_the_mode_of_its_tensors() -> None:
    """nn.TransformerEncoder copies its layers; if the mode were copied too, the storage of its tensors would be freed twice."""
    mode = ShapesOnly(allow_non_fake_inputs=True)
    with mode:
        counter = nn.BatchNorm1d(4).num_batches_tracked
        layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    assert isinstance(counter, FakeTensor) and counter.fake_mode is mode
    assert all(isinstance(p, FakeTensor) and p.fake_mode is mode for p in layers.parameters())
