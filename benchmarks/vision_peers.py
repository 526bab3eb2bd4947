"""Times the loops that benchmarks/vision.py compares with, each written as its users write it."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain.tasks.vision.nets import Conv4

MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels
NUM_IMAGES = 60_000
NUM_WINDOWS = 3


@dataclass(frozen=True)
class Row:
    """The speed of one program."""

    work: str
    name: str
    batch: int
    images_per_second: float
    spread: float
    """Largest over smallest speed of a window, minus one."""
    facts: dict[str, Any] = field(default_factory=dict)


def images(count: int = NUM_IMAGES) -> tuple[Tensor, Tensor]:
    """Makes random images like MNIST's: a fifth of the pixels are set, and one pixel shows the label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (count,), generator=generator)
    pixels = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
    pixels[torch.rand(count, 28, 28, generator=generator) < 0.8] = 0
    pixels[torch.arange(count), labels * 2 + 4] = 255
    return pixels, labels


class Window:
    """Times several windows of steps, after a warm-up."""

    def __init__(self, device: torch.device, num_warm_up: int, seconds: float) -> None:
        self.device, self.num_warm_up, self.seconds = device, num_warm_up, seconds
        self.speeds: list[float] = []
        """Steps per second, for each window."""
        self._num_calls = self._num_steps = 0
        self._started = 0.0

    def __call__(self) -> bool:
        """Counts a step; returns whether all windows are timed."""
        self._num_calls += 1
        if self._num_calls < self.num_warm_up:
            return False
        if self._num_calls == self.num_warm_up:
            self._start()
            return False
        self._num_steps += 1
        if time.perf_counter() - self._started >= self.seconds and self._num_steps >= 3:
            self._sync()
            self.speeds.append(self._num_steps / (time.perf_counter() - self._started))
            self._start()
        return len(self.speeds) == NUM_WINDOWS

    def _start(self) -> None:
        self._sync()
        self._started, self._num_steps = time.perf_counter(), 0

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def row(self, work: str, name: str, batch: int, **facts: Any) -> Row:
        speed = statistics.median(self.speeds) * batch
        return Row(work, name, batch, round(speed, 1), round(max(self.speeds) / min(self.speeds) - 1, 3), facts)


# --- the peers ----------------------------------------------------------------------------------


class PilImages(Dataset[Any]):
    """Reads samples as the guide reads MNIST: one PIL image each, with torchvision's transforms."""

    def __init__(self) -> None:
        from PIL import Image

        self.pixels, self.labels = images()
        self.open = lambda i: Image.fromarray(self.pixels[i].numpy())
        try:
            from torchvision import transforms
        except (ImportError, RuntimeError):
            self.transform, self.transform_name = _transform_by_pil, "the same transforms by PIL (no torchvision here)"
        else:
            self.transform_name = "torchvision's transforms"
            self.transform = transforms.Compose(
                [
                    transforms.RandomRotation(10),
                    transforms.RandomAffine(degrees=0, translate=(0.1, 0.1)),
                    transforms.ToTensor(),
                    transforms.Normalize((MEAN,), (STD,)),
                ]
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.transform(self.open(i)), int(self.labels[i])


def _transform_by_pil(image: Any) -> Tensor:
    from PIL import Image

    angle, right, down = (2 * torch.rand(3) - 1).tolist()
    image = image.rotate(10 * angle)
    image = image.transform(image.size, Image.Transform.AFFINE, (1, 0, round(2.8 * right), 0, 1, round(2.8 * down)))
    return (torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, 28, 28).float() / 255 - MEAN) / STD


def measure_guide(device: torch.device, batch: int, workers: int, window: Window) -> Row:
    """Guide 001's loop: loader workers, DDP's wrapper, AMP with a GradScaler, loss and accuracy read every step."""
    data = PilImages()
    loader = DataLoader(data, batch, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda", persistent_workers=workers > 0)
    with _process_group(device):
        model: nn.Module = Conv4(10, 0.5).to(device)
        model = nn.parallel.DistributedDataParallel(model, device_ids=[0] if device.type == "cuda" else None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
        scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
        total = correct = 0
        while True:
            for x, y in loader:
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                optimizer.zero_grad()
                with torch.autocast(device.type, torch.float16, enabled=device.type == "cuda"):
                    outputs = model(x)
                    loss = F.cross_entropy(outputs, y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                total += loss.item()
                correct += outputs.argmax(1).eq(y).sum().item()
                if window():
                    return window.row("augmented", f"the guide's loop, {workers} workers", batch, transforms=data.transform_name)


@contextlib.contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def _tensor_loader(device: torch.device, batch: int, workers: int) -> DataLoader[Any]:
    """Loads normalised floats from memory; workers only collate them."""
    pixels, labels = images()
    data = TensorDataset(((pixels.float() / 255 - MEAN) / STD).unsqueeze(1), labels)
    return DataLoader(data, batch, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda", persistent_workers=workers > 0)


def measure_accelerate(device: torch.device, batch: int, workers: int, window: Window) -> Row:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16" if device.type == "cuda" else "no", cpu=device.type == "cpu")
    model = Conv4(10, 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _tensor_loader(device, batch, workers))
    model.train()
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            if window():
                return window.row("not augmented", "Accelerate", batch, workers=workers)


def measure_lightning(device: torch.device, batch: int, workers: int, window: Window) -> Row:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Conv4(10, 0.5)

        def training_step(self, batch: Any, _: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=1e-4)

        def on_train_batch_end(self, *_: Any) -> None:
            if window():
                self.trainer.should_stop = True

    trainer = lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, precision="bf16-mixed" if device.type == "cuda" else "32-true",
        max_epochs=1000, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        barebones=False, min_epochs=0,
    )  # fmt: skip
    trainer.fit(Module(), _tensor_loader(device, batch, workers))
    return window.row("not augmented", "Lightning", batch, workers=workers)
