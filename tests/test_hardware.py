"""Detection of hardware, descriptions in words, the table of cards, and the report; no GPU is needed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from drivetrain.hardware import (
    Gpu,
    Hardware,
    TorchBuild,
    activity,
    check_torch_can_use,
    cpu,
    detect,
    nvml,
    report,
    restrict_to_gpus,
    torch_build,
    visible_gpus,
)
from drivetrain.hardware.cards import CARDS, capability_of, card_of_product
from drivetrain.hardware.described import parse
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.capacity import MachineCapacity
from drivetrain.plan.choose import choose
from tests.command import expect_error, run_ok
from tests.sample_tasks import Plain
from tests.waiting import Stopwatch

L4 = tuple(Gpu(i, "NVIDIA L4", 24 * 2**30, (8, 9)) for i in range(4))
T4 = tuple(Gpu(i, "Tesla T4", 16 * 2**30, (7, 5)) for i in range(2))
FOUR_L4 = Hardware(16, 2**36, L4, "", "535.1", (12, 2))
CUDA_BUILD = TorchBuild("2.13.0", "12.6", None)


def test_this_machine_is_detected() -> None:
    hardware = detect()
    assert hardware.cpu_cores >= 1
    assert hardware.memory_bytes > 2**28
    assert "CPU core" in hardware.sentence()
    assert torch_build().version.startswith("2.")


def test_a_gpu_that_torch_cannot_use_stops_with_cause_and_fix() -> None:
    with pytest.raises(Problem, match=r"4 x NVIDIA L4, but torch 2.13.0\+cpu is a CPU build.*--device cpu"):
        check_torch_can_use(FOUR_L4, TorchBuild("2.13.0+cpu", None, None), {})
    with pytest.raises(Problem, match=r"driver 535.1 reaches CUDA 12.2 and torch 2.13.0 needs 13.0: update the driver"):
        check_torch_can_use(FOUR_L4, TorchBuild("2.13.0", "13.0", None), {})
    for hidden in ("", "-1"):
        with pytest.raises(Problem, match=r"CUDA_VISIBLE_DEVICES='.*' hides them: unset it"):
            check_torch_can_use(FOUR_L4, CUDA_BUILD, {"CUDA_VISIBLE_DEVICES": hidden})
    check_torch_can_use(FOUR_L4, CUDA_BUILD, {})
    check_torch_can_use(Hardware(2, 2**34), TorchBuild("2.13.0+cpu", None, None), {})


def test_visible_gpus_follow_the_environment_and_the_flag() -> None:
    assert visible_gpus(FOUR_L4, {}) == ["0", "1", "2", "3"]
    assert visible_gpus(FOUR_L4, {"CUDA_VISIBLE_DEVICES": "2,0"}) == ["2", "0"]
    assert visible_gpus(FOUR_L4, {"CUDA_VISIBLE_DEVICES": "2,0"}, "1") == ["0"]
    assert visible_gpus(FOUR_L4, {"CUDA_VISIBLE_DEVICES": "GPU-abc,-1,1"}) == ["GPU-abc"]
    with pytest.raises(Problem, match="no GPU '7' here"):
        visible_gpus(FOUR_L4, {}, "0,7")


def plan(hardware: Hardware, device: str, procs: int, **pins: object) -> Plan:
    return choose(Plain(global_batch=64).settings(), hardware, device=device, world_size=procs, local_procs=procs, pins=pins)


def test_precision_and_backend_follow_the_hardware() -> None:
    assert (plan(FOUR_L4, "cuda", 4).precision, plan(FOUR_L4, "cuda", 4).backend) == ("bf16", "nccl")
    assert plan(Hardware(8, 2**34, T4), "cuda", 2).precision == "fp16"
    assert (plan(FOUR_L4, "cpu", 2).precision, plan(FOUR_L4, "cpu", 2).backend) == ("fp32", "gloo")


def test_the_global_batch_is_kept() -> None:
    for procs, micro, expected in ((1, 64, (64, 1)), (4, 64, (16, 1)), (3, 5, (5, 5)), (2, 7, (7, 5))):
        chosen = plan(FOUR_L4, "cpu", procs, micro_batch=micro)
        assert (chosen.micro_batch, chosen.accumulation) == expected
        assert chosen.global_batch == 64
    with pytest.raises(Problem, match="leave one of them out"):
        plan(FOUR_L4, "cpu", 1, micro_batch=8, accumulation=3)
    with pytest.raises(Problem, match=r"plan.strategy=ddp does not go with 1 process"):
        plan(FOUR_L4, "cpu", 1, strategy="ddp")


def test_a_plan_is_the_same_after_writing_and_reading_json() -> None:
    original = plan(FOUR_L4, "cuda", 4)
    assert Plan.from_json(original.to_json()) == original


def test_a_driver_that_never_answers_takes_only_the_timeout() -> None:
    watch = Stopwatch()
    with pytest.raises(TimeoutError):
        nvml.call_with_timeout(lambda: time.sleep(30), 0.2)
    assert watch.seconds < 1


# --- described hardware ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "count", "name", "gib", "nodes"),
    [
        ("4xL4-24GB", 4, "L4", 22, 1),
        ("8xH100-80GB", 8, "H100", 77, 1),
        ("2 nodes x 8xA100-40GB, 100Gb/s", 8, "A100", 38, 2),
        ("32 nodes x 8xH100-80GB", 8, "H100", 77, 32),
        ("8x RTX 4090", 8, "RTX4090", 23, 1),
        ("H200", 1, "H200", 135, 1),
        ("2xT4-16GB", 2, "T4", 15, 1),
        ("1x6GB", 1, "6 GB GPU", 6, 1),
        ("2xWonder-48GB", 2, "Wonder", 46, 1),
        ("cpu, 16 cores, 64GB RAM", 0, "", 0, 1),
        ("CPU 64 cores", 0, "", 0, 1),
        ("64 cores, 256GB RAM", 0, "", 0, 1),
        ("16 x 8xH100", 8, "H100", 77, 16),
        ("16x8xH100-80GB, 400Gb/s", 8, "H100", 77, 16),
        ("8xA100-SXM4-80GB", 8, "A100", 77, 1),
        ("4 x NVIDIA A100-PCIE-40GB", 4, "A100PCIe", 38, 1),
        ("2x3090", 2, "RTX3090", 23, 1),
        ("A6000-48GB", 1, "RTXA6000", 46, 1),
        ("RTX 6000 Ada Generation", 1, "RTX6000Ada", 46, 1),
        ("RTX6000-48GB", 1, "RTX6000Ada", 46, 1),
        ("8xMI300X", 8, "MI300X", 184, 1),
    ],
)
def test_a_description_is_parsed(words: str, count: int, name: str, gib: int, nodes: int) -> None:
    hardware = parse(words)
    assert (len(hardware.gpus), hardware.nodes, hardware.described) == (count, nodes, words)
    if count:
        assert hardware.gpus[0].name == name and round(hardware.gpus[0].memory_bytes / 2**30) == gib
    assert hardware.cpu_cores >= 8 and hardware.memory_bytes >= 2**34


def test_stated_cores_ram_and_network_are_used() -> None:
    hardware = parse("2 nodes x 4xL4-24GB, 48 cores, 192GB RAM, 200 Gbps")
    assert (hardware.cpu_cores, hardware.memory_bytes, hardware.network_gbps) == (48, 192 * 2**30, 200.0)
    assert parse("2 nodes x 4xL4-24GB").network_gbps == 0, "not stated: the plan assumes a value and says so"
    assert parse("CPU 64 cores 128GB RAM").cpu_cores == 64 and parse("CPU 64 cores 128GB RAM").memory_bytes == 128 * 2**30


@pytest.mark.parametrize(
    ("words", "gbps"),
    [("100Gb/s", 100), ("100GB/s", 800), ("12.5GBps", 100), ("200 gbps", 200), ("100GbE", 100), ("1Tb/s", 1000), ("2 TB/s", 16000)],
)
def test_bits_and_bytes_of_a_network_are_distinguished(words: str, gbps: float) -> None:
    assert parse(f"2 nodes x 8xH100, {words}").network_gbps == gbps


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("RTX2060-6GB", (7, 5)), ("RTX2050-4GB", (8, 6)), ("GTX1660-6GB", (7, 5)), ("GTX1030-2GB", (6, 1)), ("RTX 3075-10GB", (0, 0)),
        ("RTX3080 Laptop-16GB", (8, 6)), ("RTX4050-6GB", (8, 9)), ("RTX5050-8GB", (12, 0)), ("RTX PRO 4000 Blackwell-24GB", (12, 0)),
        ("Tesla P6-16GB", (6, 1)), ("B300-288GB", (10, 3)), ("Quadro P2000-5GB", (6, 1)), ("A2000-6GB", (8, 6)), ("T1000-8GB", (7, 5)),
        ("Wonder-48GB", (0, 0)), ("6GB", (0, 0)), ("TITAN X-12GB", (6, 1)), ("L2-24GB", (8, 9)), ("M40-24GB", (5, 2)), ("P100-16GB", (6, 0)),
    ],
)  # fmt: skip
def test_the_compute_capability_follows_from_the_family_of_the_name(name: str, capability: tuple[int, int]) -> None:
    hardware = parse(f"1x{name}")
    assert hardware.gpus[0].compute_capability == capability
    plan = choose(Plain().settings(), hardware, device="cuda", world_size=1, local_procs=1)
    assert plan.precision == ("bf16" if capability >= (8, 0) else "fp16")
    if capability == (0, 0):
        assert "compute capability is unknown" in plan.reasons["precision"] and "unknown" in hardware.gpu_note


def test_the_rates_of_the_table_are_consistent() -> None:
    """A typing error would show: the rates of a family have fixed ratios."""
    for card in CARDS:
        assert (card.bf16 > 0) == (card.compute_capability >= (8, 0)), card
        assert card.fp16 == 0 or card.fp16 >= card.bf16 >= card.tf32 >= card.fp32 * (card.bf16 > 0) * (card.tf32 > 0), card
        assert card.tf32 == 0 or 1.9 < card.bf16 / card.tf32 < 2.1, card
        assert 1 < card.bandwidth / card.memory_gb < 100 and 5 <= card.processors <= 304, card
        if card.compute_capability != (0, 0) and not card.name.startswith("MI"):
            assert capability_of(card.name) == card.compute_capability, card


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("4xL5", r"no GPU 'L5' in the table \(nearest: .*L4.*give its memory"),
        ("4xH10", "nearest: .*H100"),
        ("4xL4-24GB, blah", "'blah' is neither cores, RAM nor a network's"),
        ("0xT4-16GB", "at least one machine and one GPU"),
        ("1xL4-0GB", "nothing it states may be 0"),
        ("cpu, 0 cores", "nothing it states may be 0"),
        ("0 nodes x 2xT4", "at least one machine"),
        ("1000000000xH100", "1,000,000,000 GPUs in a machine are more than can be planned for"),
        ("999999999 nodes x 8xH100", "999,999,999 machines are more than can be planned for"),
        ("cpu, 9" + 5000 * "9" + " cores", "more than can be planned for"),
        ("1xH100-" + 300 * "9" + "GB", "more than can be planned for"),
        ("2xT4, 1" + 400 * "0" + "TB RAM", "more than can be planned for"),
        ("", "names no GPU"),
        ("4x", "names no GPU"),
    ],
)
def test_an_invalid_description_is_refused_with_the_fix(words: str, message: str) -> None:
    with pytest.raises(Problem, match=message):
        parse(words)


def test_a_known_card_with_another_memory_size_keeps_its_rates() -> None:
    hardware = parse("4xT4-15GB")
    assert hardware.gpus[0].compute_capability == (7, 5) and round(hardware.gpus[0].memory_bytes / 2**30) == 14
    assert "the table's T4 has 16 GB" in hardware.gpu_note


def test_a_mig_slice_has_its_share_of_the_rates() -> None:
    full_card, slice_ = (
        MachineCapacity.of(Hardware(8, 2**36, (Gpu(0, name, int(gb * 2**30), (8, 0), mig=mig),)), "cuda", 1).card
        for name, gb, mig in (("NVIDIA A100-SXM4-40GB", 39.4, False), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75, True))
    )
    assert slice_.bf16 == pytest.approx(full_card.bf16 / 7)
    assert 0.1 < slice_.bandwidth / full_card.bandwidth < 0.15
    assert (full_card.processors, slice_.processors) == (108, 15)


def test_a_plan_considers_only_the_selected_gpus() -> None:
    """Other GPUs of the machine, even small or full ones, have no effect."""
    gpus = (Gpu(0, "Tesla T4", 15 * 2**30, (7, 5), "GPU-aa"), Gpu(1, "NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0), "GPU-bb"))
    both = Hardware(16, 2**37, gpus)
    for names in (["1"], ["GPU-b"]):
        assert restrict_to_gpus(both, names).gpus == gpus[1:]
    assert restrict_to_gpus(both, ["0", "1"]) == both
    assert restrict_to_gpus(Hardware(4, 2**34), []).gpus == ()


def test_torch_lists_gpus_where_nvml_fails(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    Path("torch.py").write_text(
        "from types import SimpleNamespace as N\n"
        "card = N(name='AMD Instinct', total_memory=2**36, major=9, minor=4)\n"
        "cuda = N(device_count=lambda: 2, get_device_properties=lambda i: card)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(nvml, "has_driver", lambda: True)
    monkeypatch.setattr(nvml, "list_gpus", lambda: 1 / 0)
    hardware = detect()
    assert [(g.index, g.name, g.memory_bytes) for g in hardware.gpus] == [(0, "AMD Instinct", 2**36), (1, "AMD Instinct", 2**36)]
    assert "without NVML" in hardware.gpu_note
    Path("torch.py").write_text("raise ImportError")
    assert detect().gpus == () and "no driver" in detect().gpu_note


def test_the_lowest_limit_of_all_parent_cgroups_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A SLURM step or a systemd scope sets its limits below the root."""
    files = {
        "proc": "0::/job_7/step_0\n",
        "g/job_7/memory.max": "1073741824",
        "g/job_7/step_0/memory.max": "max",
        "g/job_7/cpu.max": "100000 100000",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    read = cpu._read
    monkeypatch.setattr(cpu, "CGROUP_ROOT", str(tmp_path / "g"))
    monkeypatch.setattr(cpu, "_read", lambda path: read(str(tmp_path / "proc") if path == "/proc/self/cgroup" else path))
    assert cpu.memory_bytes() == 2**30
    assert cpu.cpu_cores() == 1


def test_product_names_are_found_in_the_table() -> None:
    for product, gib, name, memory in (
        ("NVIDIA A100-SXM4-40GB", 40, "A100", 40),
        ("NVIDIA A100-SXM4-80GB", 80, "A100", 80),
        ("NVIDIA H100 80GB HBM3", 80, "H100", 80),
        ("NVIDIA H100 PCIe", 80, "H100PCIe", 80),
        ("NVIDIA H100 NVL", 94, "H100NVL", 94),
        ("NVIDIA H200", 140, "H200", 141),
        ("Tesla T4", 15, "T4", 16),
        ("NVIDIA L4", 22, "L4", 24),
        ("NVIDIA L40S", 45, "L40S", 48),
        ("NVIDIA A10G", 22, "A10G", 24),
        ("NVIDIA GeForce RTX 4090", 24, "RTX4090", 24),
        ("NVIDIA RTX A6000", 48, "RTXA6000", 48),
        ("NVIDIA A100 80GB PCIe", 80, "A100PCIe", 80),
        ("Tesla V100-SXM2-32GB", 32, "V100", 32),
        ("Tesla P100-PCIE-16GB", 16, "P100PCIe", 16),
        ("NVIDIA GeForce RTX 2080 Ti", 11, "RTX2080Ti", 11),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16, "RTX4070TiSUPER", 16),
        ("Quadro RTX 6000", 24, "RTX6000", 24),
        ("NVIDIA RTX 6000 Ada Generation", 48, "RTX6000Ada", 48),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, "RTXPRO6000", 96),
        ("AMD Instinct MI300X", 192, "MI300X", 192),
        ("NVIDIA TITAN RTX", 24, "TITANRTX", 24),
    ):
        card = card_of_product(product, gib * 2**30)
        assert card is not None and (card.name, card.memory_gb) == (name, memory), product
    assert card_of_product("Quadro K620", 2 * 2**30) is None
    assert card_of_product("NVIDIA GeForce RTX 4090 Laptop GPU", 16 * 2**30) is None, "a laptop's GPU has lower rates than the desktop's"


def test_the_report_says_how_much_memory_unequal_gpus_waste() -> None:
    mixed = Hardware(16, 2**36, (Gpu(0, "NVIDIA L4", 24 * 2**30, (8, 9)), Gpu(1, "Tesla T4", 16 * 2**30, (7, 5))), "", "535.1", (12, 2))
    text = report.text(mixed, {"cards": [None, None]})
    assert "the smallest 16 GiB" in text and "8.0 GiB of the others stay unused (choose equal ones with --gpus" in text
    assert "16 GiB (the smallest of unequal ones)" in mixed.sentence()
    equal = report.text(FOUR_L4, {"cards": [None] * 4})
    assert "0-3" in equal and "unequal" not in equal


class FakeNvml:
    """Replaces pynvml: one GPU with two MIG slices."""

    def __getattr__(self, name: str) -> object:
        answers = {
            "nvmlSystemGetCudaDriverVersion_v2": 12040, "nvmlDeviceGetCount": 1, "nvmlDeviceGetMigMode": (1, 1), "nvmlDeviceGetName": "A100",
            "nvmlDeviceGetMaxMigDeviceCount": 7, "nvmlDeviceGetCudaComputeCapability": (8, 0), "nvmlSystemGetDriverVersion": "550.1",
        }  # fmt: skip
        if name in answers:
            return lambda *_: answers[name]
        return {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._slice,
            "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(total=20 * 2**30, free=19 * 2**30),
            "nvmlDeviceGetUUID": lambda h: f"MIG-{h}",
            "nvmlDeviceGetPowerManagementLimit": self._refuse,
        }[name]

    def _slice(self, handle: int, index: int) -> str:
        if index > 1:
            raise RuntimeError("not found")
        return f"slice{index}"

    def _refuse(self, handle: int) -> int:
        raise RuntimeError("not supported")


def test_a_gpu_that_waits_in_a_kernel_is_distinguished_from_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 3, nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetPowerUsage=lambda h: (121_000, 640_000, 80_000)[h], nvmlDeviceGetPowerManagementLimit=lambda h: 700_000,
        nvmlDeviceGetUtilizationRates=lambda h: SimpleNamespace(gpu=(100, 99, 0)[h]),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(activity, "has_driver", lambda: True)
    assert list(map(str, activity.gpu_activity())) == [
        "GPU 0 is 100 % busy at 121 of 700 W: it waits in a kernel",
        "GPU 1 is 99 % busy at 640 of 700 W",
        "GPU 2 is 0 % busy at 80 of 700 W",
    ]
    monkeypatch.setattr(driver, "nvmlInit", lambda: 1 / 0)
    assert activity.gpu_activity() == []


def test_mig_slices_are_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    gpus, note, driver, cuda = nvml.list_gpus()
    assert [g.mig for g in gpus] == [True, True] and (note, driver, cuda) == ("", "550.1", (12, 4))
    hardware = Hardware(8, 2**36, gpus)
    assert visible_gpus(hardware, {}) == ["MIG-slice0", "MIG-slice1"]
    assert "a slice (MIG)" in report.text(hardware, {"cards": [None, None]})


def test_the_command_reports_this_machine_and_a_described_one(folder: Path) -> None:
    report_of_this_machine = run_ok("hardware")
    assert (
        "cores" in report_of_this_machine
        and "/dev/shm" in report_of_this_machine
        and "disk" in report_of_this_machine
        and "torch 2." in report_of_this_machine
    )
    facts = json.loads(run_ok("hardware", "--hardware", "2 nodes x 8xA100-40GB, 100Gb/s", "--json"))
    assert facts["hardware"]["nodes"] == 2 and facts["cards"][0]["bandwidth"] == 1555
    assert "nearest" in expect_error("hardware", "--hardware", "4xL5")
