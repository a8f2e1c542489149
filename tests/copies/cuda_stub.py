"""A stub of the CUDA driver, libcuda.so.1, for hosts without a GPU: the last thing that KvikIO reaches for.

It answers as the real one does before anybody has initialised it: CUDA_ERROR_NOT_INITIALIZED to every call
but the question for its version. (Where that one fails, KvikIO waits for itself for ever.)
"""

from __future__ import annotations

import subprocess
from pathlib import Path

NOT_INITIALIZED = 3
VERSION = 12000

_CALLS = """
cuCtxCreate_v2 cuCtxDestroy_v2 cuCtxGetCurrent cuCtxGetDevice cuCtxPopCurrent_v2 cuCtxPushCurrent_v2
cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain
cuEventCreate cuEventDestroy_v2 cuEventQuery cuEventRecord cuEventSynchronize cuGetErrorName cuGetErrorString
cuInit cuLaunchHostFunc cuMemFreeHost cuMemGetAddressRange_v2 cuMemHostAlloc cuMemHostRegister_v2
cuMemHostUnregister cuMemcpyAsync cuMemcpyBatchAsync cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2
cuPointerGetAttribute cuPointerGetAttributes cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize
"""


def build_stub(directory: Path, *, knows_its_version: bool = True) -> Path:
    """Compiles the stub into a directory for LD_LIBRARY_PATH; returns the library."""
    lines = [f"int {call}(void) {{ return {NOT_INITIALIZED}; }}" for call in _CALLS.split()]
    answer = f"*version = {VERSION}; return 0;" if knows_its_version else f"return {NOT_INITIALIZED};"
    lines.append(f"int cuDriverGetVersion(int *version) {{ {answer} }}")
    library = directory / "libcuda.so.1"
    source = directory / "stub.c"
    source.write_text("\n".join(lines) + "\n")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True, timeout=60
    )
    return library
