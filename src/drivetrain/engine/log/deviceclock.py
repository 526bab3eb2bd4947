"""Where a GPU's time goes in a step: marks on its stream at the moments of some steps, read once it has passed them, so nobody waits."""

from __future__ import annotations

import torch

EVERY = 47  # steps from one that is marked to the next: those that log, evaluate or save fall on rounder numbers


class DeviceClock:
    """Seconds of the device by part. Where it idles, the part that kept it waiting is charged."""

    def __init__(self, parts: int) -> None:
        self.seconds = [0.0] * parts
        self._steps = 0
        self._marks: list[tuple[int, torch.cuda.Event]] = []
        self._marking = False

    def reached(self, name: str, part: int) -> None:
        """From here on the training's stream does what belongs to a part."""
        begins = name == "step"
        if begins:
            self._steps += 1
            if self._marks and not self._marking:
                self._read()
        if self._marking:
            self._mark(part)
            self._marking = self._marking and not begins
        elif begins and not self._marks and self._steps % EVERY == 0:
            self._marking = True
            self._mark(part)

    def _mark(self, part: int) -> None:
        if torch.cuda.is_current_stream_capturing():  # what is recorded now will happen at another time
            self._marks, self._marking = [], False
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))

    def _read(self) -> None:
        if not self._marks[-1][1].query():
            return  # it is not there yet
        for (part, begun), (_, ended) in zip(self._marks, self._marks[1:], strict=False):
            self.seconds[part] += begun.elapsed_time(ended) / 1000
        self._marks = []
