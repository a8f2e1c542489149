"""kvfs: the KV cache of large language models as a filesystem in hugepage DRAM."""

__version__ = "0.1.0"
