"""Which pages have the same prospects: those of one class, which a page gets whenever a request uses it.

What a class is worth is learned (`kvfs.policy.hazards`); here is only what is told apart: the state of the
page in the request, how often it was used, and how much of the request was new.
"""

from __future__ import annotations

from typing import Final

SMALL: Final = 64 << 10
"""Files of fewer bytes leave after all others: they give little room and often describe the large ones."""
MOST_USES: Final = 127
"""Uses are counted so far: more tell nothing further."""
MANY_USES: Final = 16
"""What so many requests have used is a prompt that all share: what goes on below it begins anew."""

LAST: Final = 0
"""The state of the last page of a request, which the next request often replaces by a fuller one."""
KNOWN: Final = 1
"""Seen before; the request goes on where an earlier one ended, or adds nothing."""
CONTINUED: Final = 2
"""New, in such a request."""
SHARED: Final = 3
"""Seen before; the request leaves the way of an earlier one."""
ROOT: Final = 4
"""New, with nothing before it but a prompt that all share."""
BRANCH: Final = 5
"""New, where the request leaves the way of an earlier one."""
PLAIN: Final = 6
"""Nothing is known of a chain."""

_STATES = (LAST, KNOWN, CONTINUED, SHARED, ROOT, BRANCH, PLAIN)
_KIN = {LAST: 0, KNOWN: 1, CONTINUED: 1, SHARED: 2, ROOT: 2, BRANCH: 2, PLAIN: 3}
"""States whose chains have the same fate."""
_USES_STEPS = 7
_NEW_STEPS = 9

USES_STEP: Final = bytes(uses if uses < 4 else min(uses.bit_length() + 1, 6) for uses in range(MOST_USES + 1))
"""For each number of uses its step: 0, 1, 2, 3, 4 to 7, 8 to 15, 16 and more."""
CLASSES: Final = len(_STATES) * _USES_STEPS * _NEW_STEPS
FACTORS: Final = len(_STATES) * _USES_STEPS
"""How many values each of the two factors of a class has at most."""
USES_FACTOR: Final = tuple(number // _NEW_STEPS for number in range(CLASSES))
"""For each class, the number of its state and uses."""
NEW_FACTOR: Final = tuple(
    _KIN[number // (_USES_STEPS * _NEW_STEPS)] * _NEW_STEPS + number % _NEW_STEPS for number in range(CLASSES)
)
"""For each class, the number of its kin and of how much was new."""
IS_PROTECTED: Final = bytes(factor % _USES_STEPS > 1 for factor in USES_FACTOR)
"""For each class, whether its pages have been used again since they were made."""
STEP: Final = _NEW_STEPS
"""From the class of one step of uses to that of the next."""


def unused_class(state: int, new_pages: int) -> int:
    """The class of a page in ``state`` that was used never, in a request with so many new pages; each step of
    uses is ``STEP`` further. How often something was the last page of a request tells nothing: LAST has no
    further steps."""
    return state * _USES_STEPS * _NEW_STEPS + min(new_pages.bit_length(), _NEW_STEPS - 1)
