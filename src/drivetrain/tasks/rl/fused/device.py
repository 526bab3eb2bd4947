"""CUDA C++ in a string, compiled for the GPU at hand by NVRTC (which comes with torch's CUDA builds) and launched on torch's stream."""

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

_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Unavailable(Exception):
    """Why kernels cannot be had here."""


class Program:
    """The kernels of one source, for one set of constants. Compiled once a machine: the result is kept in the user's cache."""

    def __init__(self, source: str, constants: dict[str, int], device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise Unavailable(
                f"this GPU (compute capability {major}.{minor}) has no products of matrices of 16 bits with tensor cores' layout of 8.0"
            )
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise Unavailable("there is no driver of NVIDIA's here (libcuda.so.1)") from None
        options = [f"--gpu-architecture=sm_{major}{minor}", "-default-device", "--std=c++17", *(f"-D{k}={v}" for k, v in constants.items())]
        image = _compiled(source, options)
        self._module = ctypes.c_void_p()
        torch.cuda.current_stream(device).synchronize()  # so that there is a context
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), image))
        self._kernels: dict[str, ctypes.c_void_p] = {}

    def launch(self, name: str, grid: tuple[int, ...], threads: int, *args: Any, shared: int = 0) -> None:
        """Start a kernel whose one argument is a struct of pointers (tensors or None), integers and numbers, in this order."""
        codes = "".join("P" if a is None or isinstance(a, Tensor) else "i" if isinstance(a, int) else "f" for a in args)
        packed = struct.pack(codes, *(a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in args))
        place = ctypes.create_string_buffer(packed, len(packed))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(place))
        x, y = (*grid, 1)[:2]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check(self._driver.cuLaunchKernel(self._kernel(name, shared), x, y, 1, threads, 1, 1, shared, stream, arguments, None))

    def resident(self, name: str, threads: int, shared: int) -> int:
        """Blocks of a kernel that one processor of the GPU holds at a time."""
        found = ctypes.c_int()
        kernel = self._kernel(name, shared)
        self._check(self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(found), kernel, threads, ctypes.c_size_t(shared)))
        return found.value

    def integers(self, name: str, count: int) -> list[int]:
        """The values of a global array."""
        place, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._check(self._driver.cuModuleGetGlobal_v2(ctypes.byref(place), ctypes.byref(size), self._module, name.encode()))
        values = (ctypes.c_int * count)()
        self._check(self._driver.cuMemcpyDtoH_v2(values, place, ctypes.c_size_t(4 * count)))
        return list(values)

    def _kernel(self, name: str, shared: int) -> ctypes.c_void_p:
        if name not in self._kernels:
            kernel = ctypes.c_void_p()
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(kernel), self._module, name.encode()))
            if shared > 48 << 10:
                self._check(self._driver.cuFuncSetAttribute(kernel, _DYNAMIC_SHARED, shared))
            self._kernels[name] = kernel
        return self._kernels[name]

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise Unavailable(f"CUDA: {text.value.decode() if text.value else code}")


def _compiled(source: str, options: list[str]) -> bytes:
    library, version = _nvrtc()
    mark = hashlib.sha256("\0".join([source, *options, str(version)]).encode()).hexdigest()[:24]
    folder = private_cache("kernels")
    kept = folder / f"{mark}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        pass
    image = _compile(library, source, options)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(image)
        os.replace(file.name, kept)
    except OSError:
        pass  # it is compiled again the next time
    return image


def _nvrtc() -> tuple[ctypes.CDLL, tuple[int, int]]:
    major = (torch.version.cuda or "0").split(".")[0]
    for name in (f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        first, second = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(first), ctypes.byref(second))
        return library, (first.value, second.value)
    raise Unavailable("there is no compiler for kernels (NVRTC) beside this torch")


def _compile(library: ctypes.CDLL, source: str, options: list[str], tell: Callable[[str], object] = lambda text: None) -> bytes:
    """`tell` hears what the compiler said."""
    program = ctypes.c_void_p()
    words = [o.encode() for o in options]
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"fused.cu", 0, None, None)
    try:
        failed = library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
        log = _read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode(errors="replace")
        tell(log)
        if failed:
            raise Unavailable(f"the kernels do not compile here: {log[:2000]}")
        return _read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    place = ctypes.create_string_buffer(size.value)
    read(program, place)
    return place.raw
