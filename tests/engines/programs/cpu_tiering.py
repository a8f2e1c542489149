"""vLLM's tiered KV offloading on a machine without an accelerator.

vLLM's ``TieringOffloadingSpec`` keeps KV blocks in a region of host memory and, below it, in secondary tiers
such as ``fs``. On a GPU a worker copies blocks between the device and that region; vLLM refuses to build that
worker on a CPU. ``CpuTieringSpec`` builds one that copies from memory to memory. Manager, region and ``fs``
tier stay vLLM's own, so what is written on the filesystem, and how, is what a machine with a GPU would do::

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "CpuTieringSpec", "spec_module_path": "cpu_tiering", "cpu_bytes_to_use": 1073741824,
        "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/kv/vllm"}]}}

with the directory of this file on PYTHONPATH.
"""

from __future__ import annotations

import time

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemoryCopyWorker(OffloadingWorker):
    """Copies whole blocks between the engine's KV cache and the region; a job is done once submitted."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._references = kv_caches.group_data_refs
        self._engine_side = [
            canonical.tensor.view(torch.int8).view(-1, canonical.page_size_bytes)
            for canonical in kv_caches.tensors
        ]
        self._region_side = [
            region.create_next_worker_view(canonical.page_size_bytes) for canonical in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, engine=src_spec, region=dst_spec, to_region=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, engine=dst_spec, region=src_spec, to_region=False)

    def _copy(self, job_id: int, engine: GPULoadStoreSpec, region: LoadStoreSpec, to_region: bool) -> bool:
        assert isinstance(region, BlockIDsLoadStoreSpec)
        started = time.monotonic()
        copied = first = 0
        # Both sides name their blocks group after group, in the same order.
        for size, references in zip(engine.group_sizes, self._references, strict=True):
            here = torch.from_numpy(engine.block_ids[first : first + size]).long()
            there = torch.from_numpy(region.block_ids[first : first + size]).long()
            first += size
            for reference in references:
                length = reference.page_size_bytes
                cache = self._engine_side[reference.tensor_idx]
                kept = self._region_side[reference.tensor_idx]
                if to_region:
                    kept[there, :length] = cache[here, :length]
                else:
                    cache[here, :length] = kept[there, :length]
                copied += length * size
        self._finished.append(TransferResult(job_id, True, copied, time.monotonic() - started))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: a job is finished when ``submit_*`` returns."""

    def shutdown(self) -> None:
        self._engine_side.clear()
        self._region_side.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """``TieringOffloadingSpec`` with a worker that runs without an accelerator."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.blocks_per_chunk != 1:
            raise ValueError("CpuTieringSpec moves single blocks: leave block_size of the offloading alone")
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemoryCopyWorker(kv_caches, region)
        return self._worker
