"""The loops that benchmarks/vision.py compares with, each as its users write it, and how a loop is timed."""

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

MEAN, STD = 0.1307, 0.3081
IMAGES = 60_000
WINDOWS = 3


@dataclass(frozen=True)
class Row:
    """One contestant's figure."""

    work: str
    name: str
    batch: int
    images_per_second: float
    spread: float
    """Largest over smallest window, less one."""
    facts: dict[str, Any] = field(default_factory=dict)


def images(count: int = IMAGES) -> tuple[Tensor, Tensor]:
    """Bytes like MNIST's (a fifth of the pixels set) that carry their label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (count,), generator=generator)
    pixels = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
    pixels[torch.rand(count, 28, 28, generator=generator) < 0.8] = 0
    pixels[torch.arange(count), labels * 2 + 4] = 255
    return pixels, labels


class Window:
    """Times windows of steps: called once a step, it says when it has seen enough."""

    def __init__(self, device: torch.device, warm: int, seconds: float) -> None:
        self.device, self.warm, self.seconds = device, warm, seconds
        self.speeds: list[float] = []
        self._seen = self._steps = 0
        self._begun = 0.0

    def __call__(self) -> bool:
        self._seen += 1
        if self._seen < self.warm:
            return False
        if self._seen == self.warm:
            self._start()
            return False
        self._steps += 1
        if time.perf_counter() - self._begun >= self.seconds and self._steps >= 3:
            self._sync()
            self.speeds.append(self._steps / (time.perf_counter() - self._begun))
            self._start()
        return len(self.speeds) == WINDOWS

    def _start(self) -> None:
        self._sync()
        self._begun, self._steps = time.perf_counter(), 0

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def row(self, work: str, name: str, batch: int, **facts: Any) -> Row:
        speed = statistics.median(self.speeds) * batch
        return Row(work, name, batch, round(speed, 1), round(max(self.speeds) / min(self.speeds) - 1, 3), facts)


# --- the peers ----------------------------------------------------------------------------------


class PilImages(Dataset[Any]):
    """As the guide reads MNIST: a PIL image a sample, torchvision's transforms on it."""

    def __init__(self) -> None:
        from PIL import Image

        self.pixels, self.labels = images()
        self.open = lambda i: Image.fromarray(self.pixels[i].numpy())
        try:
            from torchvision import transforms
        except (ImportError, RuntimeError):
            self.transform, self.how = _transform_by_pil, "the same transforms by PIL (no torchvision here)"
        else:
            self.how = "torchvision's transforms"
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

    angle, right, down = torch.rand(3).tolist()
    image = image.rotate(20 * angle - 10)
    image = image.transform(image.size, Image.Transform.AFFINE, (1, 0, round(5.6 * right - 2.8), 0, 1, round(5.6 * down - 2.8)))
    return (torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, 28, 28).float() / 255 - MEAN) / STD


def guide(device: torch.device, batch: int, workers: int, window: Window) -> Row:
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
                    return window.row("augmented", f"the guide's loop, {workers} workers", batch, transforms=data.how)


@contextlib.contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def _ready_loader(device: torch.device, batch: int, workers: int) -> DataLoader[Any]:
    """Samples that need no more than collating: normalised floats in memory."""
    pixels, labels = images()
    data = TensorDataset(((pixels.float() / 255 - MEAN) / STD).unsqueeze(1), labels)
    return DataLoader(data, batch, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda", persistent_workers=workers > 0)


def accelerate(device: torch.device, batch: int, workers: int, window: Window) -> Row:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16" if device.type == "cuda" else "no", cpu=device.type == "cpu")
    model = Conv4(10, 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _ready_loader(device, batch, workers))
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


def lightning(device: torch.device, batch: int, workers: int, window: Window) -> Row:
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
    trainer.fit(Module(), _ready_loader(device, batch, workers))
    return window.row("not augmented", "Lightning", batch, workers=workers)
