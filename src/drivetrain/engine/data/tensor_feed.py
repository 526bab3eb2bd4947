"""Feed of `Tensors`: samples that are rows of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from drivetrain.data import Tensors
from drivetrain.engine.data import signature
from drivetrain.engine.data.batches import as_tensor, tensor_to_device
from drivetrain.engine.data.feed import MicroBatch, OrderedFeed


class TensorFeed(OrderedFeed):
    """Selects rows of tensors; the tensors live on the device where they fit there."""

    def __init__(self, data: Tensors, on_device: bool, *order: Any) -> None:
        super().__init__(len(data), *order)
        self.data = data
        device = self.group.device
        self._device = device if on_device else torch.device("cpu")
        self.is_resident = self._device == device
        self.columns = [as_tensor(c).to(self._device) for c in data.columns]
        self._digests: list[str | None] | None = None
        self._order_table: Tensor | None = None
        """With device counters: the epoch's order, one global batch a row. Its memory never moves, as CUDA graphs read it."""
        if self.group.device_counters and self.is_resident:
            self._order_table = torch.zeros(self.steps_per_epoch, self.batch, dtype=torch.int64, device=self._device)

    def signature(self) -> dict[str, Any]:
        if self._digests is None and self.records_signature:
            self._digests = signature.of_columns(self.columns)
        return super().signature() | {"columns": self._digests}

    def _store_order(self, ids: Tensor) -> Tensor:
        if self._order_table is None:
            return super()._store_order(ids)
        return self._order_table.view(-1)[: self.length].copy_(tensor_to_device(ids, self._device))

    def sample_ids_on_device(self, step: Tensor, num_samples: int) -> Tensor | None:
        if self._order_table is None or self.group.size > 1 or self.micro < self.batch:
            return None
        return self._order_table.index_select(0, torch.remainder(step, self.steps_per_epoch))[0, :num_samples]

    def micro_batches(self, epoch: int, index: int) -> Iterator[MicroBatch]:
        for ids, num_real, position in self.spans(epoch, index):
            batch = None
            if not self.is_resident:
                rows = [column.index_select(0, ids) for column in self.columns]
                self.reached("copy")
                batch = self.data.batch([tensor_to_device(column, self.group.device) for column in rows])
                ids = tensor_to_device(ids, self.group.device)
            yield MicroBatch(batch, ids, num_real, position)

    def assemble(self, loaded: Any, ids: Tensor) -> Any:
        return self.data.batch([column.index_select(0, ids) for column in self.columns]) if self.is_resident else loaded
