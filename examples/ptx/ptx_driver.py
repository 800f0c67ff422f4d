"""Loads PTX with the CUDA driver and launches its kernels on torch tensors.

The driver's functions come from `cuda.bindings` (package cuda-bindings), on which torch's CUDA wheels depend, so that
nothing is needed besides torch. `ptx_sigmoid.py` uses this; docs/ptx.md explains the PTX.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

try:
    from cuda.bindings import driver
except ImportError:
    driver = None

LOG_BYTES = 16384


def available() -> bool:
    """Whether there is a CUDA device and `cuda.bindings` to drive it with."""
    return driver is not None and torch.cuda.is_available()


def _check(result: tuple[Any, ...]) -> Any:
    """Takes the status off a result of `cuda.bindings.driver`; raises `RuntimeError` if it is an error."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        raise RuntimeError(f"CUDA driver: {name.decode() if name else status}")
    return values[0] if len(values) == 1 else tuple(values)


class Module:
    """PTX (or a cubin) loaded on one CUDA device.

    Args:
        image: PTX as text, or the bytes of a PTX or cubin file.
        device: the CUDA device; the current one by default.

    Raises:
        ImportError: cuda-bindings is not installed.
        RuntimeError: the driver does not accept the image. The text ends with its assembler's log, with line numbers.

    `log` holds what the driver's assembler says of registers and spills. It is empty for a cubin, and for PTX that was
    found in the driver's cache (CUDA_CACHE_DISABLE=1 turns that off).

    Example (on a machine with a GPU)::

        >>> module = Module(Path("examples/ptx/sigmoid_tanh.ptx").read_text())
        >>> module.launch("sigmoid_f32", blocks=1, threads=256, arguments=[x, y, x.numel()])
    """

    def __init__(self, image: str | bytes, device: torch.device | int | None = None) -> None:
        if driver is None:
            raise ImportError("cuda.bindings is missing: install a CUDA build of torch, or pip install cuda-bindings")
        index = torch.cuda.current_device() if device is None else torch.device(device).index
        self.device = torch.device("cuda", index)
        # torch works in the device's primary context. In another one, from cuCtxCreate, the tensors would be unknown.
        _check(driver.cuInit(0))
        self._context = _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(index))))
        # PTX is text that ends with a zero byte; in a cubin one more byte does no harm.
        data = (image.encode() if isinstance(image, str) else image) + b"\0"
        info, error = bytearray(LOG_BYTES), bytearray(LOG_BYTES)
        option = driver.CUjit_option
        options = {
            option.CU_JIT_INFO_LOG_BUFFER: info,
            option.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: LOG_BYTES,
            option.CU_JIT_ERROR_LOG_BUFFER: error,
            option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: LOG_BYTES,
            option.CU_JIT_LOG_VERBOSE: 1,
        }
        with self._current():
            result = driver.cuModuleLoadDataEx(data, len(options), list(options), list(options.values()))
        try:
            self._module = _check(result)
        except RuntimeError as failure:
            raise RuntimeError(f"{failure}\n{_text(error)}") from None
        self.log = _text(info)
        self._kernels: dict[str, Any] = {}

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Makes the context current. A thread that has not yet called torch on this device has none."""
        _check(driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            _check(driver.cuCtxPopCurrent())

    def launch(self, kernel: str, blocks: int, threads: int, arguments: Sequence[Tensor | int | float]) -> None:
        """Launches an entry of the module on torch's current stream of the device.

        A tensor is passed as its address, an `int` as 64 bits and a `float` as 32 bits; the driver cannot check them
        against the entry's parameters. Nothing is recorded for autograd. On torch's current stream the launch comes in
        order with torch's own kernels, the caching allocator may reuse the tensors' memory afterwards, and a CUDA graph
        captures it.
        """
        values: list[int | float] = []
        types: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                if argument.device != self.device:
                    raise ValueError(f"{kernel}: expected tensors on {self.device}, got one on {argument.device}")
                values.append(argument.data_ptr())
                types.append(ctypes.c_void_p)
            else:
                values.append(argument)
                types.append(ctypes.c_int64 if isinstance(argument, int) else ctypes.c_float)
        stream = driver.CUstream(torch.cuda.current_stream(self.device).cuda_stream)
        with self._current():
            if kernel not in self._kernels:
                self._kernels[kernel] = _check(driver.cuModuleGetFunction(self._module, kernel.encode()))
            grid, block = (blocks, 1, 1), (threads, 1, 1)
            packed = (tuple(values), tuple(types))
            _check(driver.cuLaunchKernel(self._kernels[kernel], *grid, *block, 0, stream, packed, 0))


def _text(log: bytearray) -> str:
    return bytes(log).split(b"\0", 1)[0].decode(errors="replace").strip()
