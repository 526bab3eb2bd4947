"""Objects are sent between processes as JSON and tensors, never as pickles."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.group import Group
from drivetrain.engine.group.wire import NotSendable, decode, encode
from drivetrain.outcomes import Outcome

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_plain_values_are_decoded_unchanged(value: Any) -> None:
    assert decode(encode(value)) == value


def test_tensors_are_decoded_bit_for_bit() -> None:
    tensors = [
        torch.arange(6).reshape(2, 3),
        torch.randn(5).bfloat16(),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.randn(4, 4).t(),
    ]
    tensors += [torch.randn(3, dtype=torch.complex64), torch.tensor([float("nan"), -0.0])]
    for tensor, decoded in zip(tensors, decode(encode(tensors)), strict=True):
        assert (decoded.dtype, decoded.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(encode(decoded), encode(tensor)), "also a NaN's bits and the sign of 0"


def test_sizes_dtypes_arrays_enums_and_errors_are_decoded_as_documented() -> None:
    value = {"size": torch.Size([2, 3]), "dtype": torch.float16, "array": np.arange(3), "outcome": Outcome.NAN, "number": np.float32(0.5)}
    decoded = decode(encode(value))
    assert isinstance(decoded["size"], torch.Size) and decoded["dtype"] is torch.float16 and decoded["array"].tolist() == [0, 1, 2]
    assert decoded["outcome"] == "nan" and decoded["number"] == 0.5
    error = decode(encode(OSError(28, "No space left on device")))
    assert isinstance(error, OSError) and error.errno == 28


class Command:
    """An object whose pickle runs a command, as an attacker would send it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.file}'",)


def test_a_pickle_is_not_read_and_not_sent(tmp_path: Path) -> None:
    file = tmp_path / "ran"
    with pytest.raises(NotSendable):
        decode(torch.frombuffer(bytearray(pickle.dumps(Command(file))), dtype=torch.uint8))
    with pytest.raises(NotSendable, match="a Command is not sent to other processes"):
        encode(Command(file))
    assert not file.exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"object": ["os.system", {"command": "true"}]}',
        '{"object": ["torch.distributed.checkpoint.planner.SavePlan", {"nothing": 1}]}',
        '{"torch": "load"}',
        '{"torch": "__builtins__"}',
        '{"tensor": ["float32", [1000000000000]]}',
        '{"tensor": ["float32", [-1, 4]]}',
        '{"error": ["eval", ["1 + 1"]], "dict": []}',
        '{"unknown": 1}',
        "[1, 2]",
        '{"list": ' * 5000 + "[]" + "}" * 5000,
        "}",
    ],
)
def test_malformed_bytes_are_refused(text: str) -> None:
    data = len(text).to_bytes(8, "little") + text.encode()
    with pytest.raises(NotSendable):
        decode(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def test_an_error_of_an_unknown_class_becomes_a_runtime_error() -> None:
    text = '{"error": ["system", ["true"]]}'
    data = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text.encode()), dtype=torch.uint8)
    assert type(decode(data)) is RuntimeError


@pytest.mark.world_size(2)
def test_every_object_collective_sends_plain_objects(group: Group, tmp_path: Path) -> None:
    """So do torch's own collectives, which its checkpoint writer and users call."""
    values: list[Any] = [None, None]
    dist.all_gather_object(values, {"rank": group.rank, "tensor": torch.full((2,), group.rank)})
    assert [value["rank"] for value in values] == [0, 1] and values[1]["tensor"].tolist() == [1, 1]
    assert group.broadcast_object(("a", torch.float32) if group.is_main else None) == ("a", torch.float32)
    box: list[Any] = [Command(tmp_path / "ran") if group.is_main else None]
    with pytest.raises(NotSendable, match="a Command is not sent") if not group.is_main else contextlib.nullcontext():
        dist.broadcast_object_list(box)  # the receiver raises too, instead of waiting
    with pytest.raises(NotSendable):
        dist.all_gather_object([None, None], Command(tmp_path / "ran"))
