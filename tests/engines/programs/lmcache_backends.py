"""LMCache's own storage backends, without an engine above them: store KV chunks, look them up, load them.

Runs in the engines' environment: ``python lmcache_backends.py BACKEND DIRECTORY CHUNKS STEP…`` with the
backend ``fs`` or ``local_disk`` and the steps ``store`` and ``load``. Prints as its last line
``{"found": N, "equal": N, "bytes": N}``: how many chunks the look-up found, how many came back byte for byte,
and how large one is.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import CreateStorageBackends

#: Layers, key and value, tokens of a chunk, KV heads, head size: 4 MiB in float32.
SHAPE = (16, 2, 256, 2, 64)
DTYPE = torch.float32
#: How long LMCache may take to write behind the caller's back, in seconds.
WRITE_SECONDS = 60.0


def configuration(backend: str, directory: str) -> LMCacheEngineConfig:
    """LMCache with this backend alone: nothing is kept in its own host memory."""
    settings: dict[str, object] = {"chunk_size": SHAPE[2], "local_cpu": False, "max_local_cpu_size": 0.5}
    if backend == "fs":
        settings["remote_storage_plugins"] = ["fs"]
        settings["extra_config"] = {"remote_storage_plugin.fs.base_path": directory}
    else:
        settings["local_disk"] = directory
        settings["max_local_disk_size"] = 1.0
    return LMCacheEngineConfig.from_defaults(**settings)


def key_of(number: int) -> CacheEngineKey:
    return CacheEngineKey("model", 1, 0, 0x1000 + number, DTYPE)


def chunk_of(number: int, shape: torch.Size) -> torch.Tensor:
    """The content of a chunk, which every process can make anew."""
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(number))


def main() -> None:
    backend_name, directory, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    metadata = LMCacheMetadata(
        model_name="model",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=DTYPE,
        kv_shape=SHAPE,
        chunk_size=SHAPE[2],
    )
    backends = CreateStorageBackends(configuration(backend_name, directory), metadata, loop)
    memory = backends["LocalCPUBackend"]
    backend = backends["RemoteBackend-fs" if backend_name == "fs" else "LocalDiskBackend"]
    # LMCache keeps a chunk as key and value, layer, token, and all heads of the token together.
    layers, pair, tokens, heads, head_size = SHAPE
    shape = torch.Size((pair, layers, tokens, heads * head_size))
    keys = [key_of(number) for number in range(count)]
    answer = {"found": 0, "equal": 0, "bytes": shape.numel() * DTYPE.itemsize}
    for step in sys.argv[4:]:
        if step == "store":
            objects = []
            for number in range(count):
                held = memory.allocate(shape, DTYPE, MemoryFormat.KV_2LTD)
                held.tensor.copy_(chunk_of(number, shape))
                objects.append(held)
            backend.batched_submit_put_task(keys, objects)
            deadline = time.monotonic() + WRITE_SECONDS
            while any(backend.exists_in_put_tasks(key) for key in keys):
                if time.monotonic() > deadline:
                    raise TimeoutError("LMCache has not written its chunks")
                time.sleep(0.01)
            for held in objects:
                held.ref_count_down()
        else:
            answer["found"] = sum(backend.contains(key) for key in keys)
            for number, held in enumerate(backend.batched_get_blocking(keys)):
                if held is not None:
                    answer["equal"] += torch.equal(held.tensor.view(shape), chunk_of(number, shape))
                    held.ref_count_down()
    for opened in backends.values():
        opened.close()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
