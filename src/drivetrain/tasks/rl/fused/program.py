"""Compiles CUDA C++ for this GPU with NVRTC (which comes with torch's CUDA builds) and launches kernels on torch's stream."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.names import private_cache

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # the value of CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class KernelsUnavailable(Exception):
    """Kernels cannot be compiled or launched here; the text says why."""


class Program:
    """The kernels of a source text, compiled with given constants. The user's cache stores the result."""

    def __init__(self, source: str, constants: dict[str, int], device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise KernelsUnavailable(
                f"this GPU (compute capability {major}.{minor}) is too old: the kernels need compute capability 8.0 or later"
            )
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise KernelsUnavailable("there is no NVIDIA driver here (libcuda.so.1)") from None
        options = [f"--gpu-architecture=sm_{major}{minor}", "-default-device", "--std=c++17", *(f"-D{k}={v}" for k, v in constants.items())]
        image = _compiled(source, options)
        self._module = ctypes.c_void_p()
        torch.cuda.current_stream(device).synchronize()  # makes sure that a CUDA context exists
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), image))
        self._kernels: dict[str, ctypes.c_void_p] = {}

    def launch(self, name: str, grid: tuple[int, ...], threads: int, *args: Any, shared: int = 0) -> None:
        """Launches a kernel whose only argument is a struct: pointers (tensors or None), then integers, then floats."""
        codes = "".join(_struct_code(a) for a in args)
        packed = struct.pack(codes, *(_struct_value(a) for a in args))
        struct_buffer = ctypes.create_string_buffer(packed, len(packed))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(struct_buffer))
        x, y = (*grid, 1)[:2]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check(self._driver.cuLaunchKernel(self._kernel(name, shared), x, y, 1, threads, 1, 1, shared, stream, arguments, None))

    def blocks_per_processor(self, name: str, threads: int, shared: int) -> int:
        """Returns how many blocks of a kernel one multiprocessor holds at a time."""
        num_blocks = ctypes.c_int()
        kernel = self._kernel(name, shared)
        self._check(
            self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(num_blocks), kernel, threads, ctypes.c_size_t(shared))
        )
        return num_blocks.value

    def integers(self, name: str, count: int) -> list[int]:
        """Returns the values of a global array."""
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._check(self._driver.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), self._module, name.encode()))
        values = (ctypes.c_int * count)()
        self._check(self._driver.cuMemcpyDtoH_v2(values, address, ctypes.c_size_t(4 * count)))
        return list(values)

    def _kernel(self, name: str, shared: int) -> ctypes.c_void_p:
        if name not in self._kernels:
            kernel = ctypes.c_void_p()
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(kernel), self._module, name.encode()))
            if shared > 48 << 10:
                self._check(self._driver.cuFuncSetAttribute(kernel, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared))
            self._kernels[name] = kernel
        return self._kernels[name]

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise KernelsUnavailable(f"CUDA: {text.value.decode() if text.value else code}")


def _struct_code(value: Any) -> str:
    """Returns the code of `struct.pack` for an argument of a kernel."""
    if value is None or isinstance(value, Tensor):
        return "P"
    return "i" if isinstance(value, int) else "f"


def _struct_value(value: Any) -> int | float:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else value


def _compiled(source: str, options: list[str]) -> bytes:
    """Returns the compiled kernels: from the cache, or compiled now."""
    library, version = _nvrtc()
    key = hashlib.sha256("\0".join([source, *options, str(version)]).encode()).hexdigest()[:24]
    folder = private_cache("kernels")
    cached = folder / f"{key}.cubin"
    try:
        return cached.read_bytes()
    except OSError:
        pass
    image = compile_source(library, source, options)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(image)
        os.replace(file.name, cached)
    except OSError:
        pass  # the next run compiles again
    return image


def _nvrtc() -> tuple[ctypes.CDLL, tuple[int, int]]:
    """Returns the compiler library and its version."""
    major = (torch.version.cuda or "0").split(".")[0]
    for name in (f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        first, second = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(first), ctypes.byref(second))
        return library, (first.value, second.value)
    raise KernelsUnavailable("there is no CUDA compiler (NVRTC) with this torch")


def compile_source(library: ctypes.CDLL, source: str, options: list[str], on_log: Callable[[str], object] = lambda text: None) -> bytes:
    """Returns the compiled kernels; `on_log` receives the compiler's output."""
    program = ctypes.c_void_p()
    arguments = [o.encode() for o in options]
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"fused.cu", 0, None, None)
    try:
        failed = library.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
        log = _read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode(errors="replace")
        on_log(log)
        if failed:
            raise KernelsUnavailable(f"the kernels do not compile here: {log[:2000]}")
        return _read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(get_size: Any, get_value: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get_value(program, buffer)
    return buffer.raw
