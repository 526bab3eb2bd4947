"""Bytes as text."""

from __future__ import annotations

from collections.abc import Callable


def format_gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.0f} GiB" if num_bytes >= 10 * 2**30 else f"{num_bytes / 2**30:.1f} GiB"


def format_bytes(num_bytes: float) -> str:
    """Returns GiB from 1 GiB on, MiB below."""
    return format_gib(num_bytes) if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def format_need(needed_bytes: float, usable_bytes: float, show: Callable[[float], str] = format_gib) -> str:
    """Returns "13 GiB of 14 GiB", with enough digits for the two numbers to differ."""
    texts = show(needed_bytes), show(usable_bytes)
    for digits in (1, 2, 3):
        if texts[0] == texts[1]:
            texts = f"{needed_bytes / 2**30:.{digits}f} GiB", f"{usable_bytes / 2**30:.{digits}f} GiB"
    return f"{texts[0]} of {texts[1]}"
