"""What leaves DRAM next, and what the SSD admits. Pure: no clock, no input or output."""

from __future__ import annotations

from kvfs.policy.classes import SMALL
from kvfs.policy.expiry import Expiry
from kvfs.policy.lru import Entry, LeastRecentlyUsed
from kvfs.policy.reuse import ExpectedReuse, PolicyStatistics
from kvfs.policy.slots import Page

__all__ = ["SMALL", "Entry", "ExpectedReuse", "Expiry", "LeastRecentlyUsed", "Page", "PolicyStatistics"]
