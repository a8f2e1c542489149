"""llama.cpp with its slots saved on the mount."""

from __future__ import annotations

import random

from tests.engines.caches import PlainCache
from tests.engines.llama import llama_server
from tests.engines.running import Engines

PROMPT_TOKENS = 2000
NEW_TOKENS = 16


def test_a_restored_slot_saves_the_prompt_work(engines: Engines, cache_in_both_modes: PlainCache) -> None:
    cache = cache_in_both_modes
    numbers = random.Random(0)
    prompt = [numbers.randrange(3, 259) for _ in range(PROMPT_TOKENS)]
    with llama_server(engines, cache.path) as server:
        expected, computed = server.complete(prompt, NEW_TOKENS)
        assert computed == PROMPT_TOKENS
        assert server.save("conversation.bin") >= PROMPT_TOKENS
    cache.assert_pages("conversation.bin", 1)

    hits = cache.hits()
    with llama_server(engines, cache.path) as server:
        assert server.restore("conversation.bin") >= PROMPT_TOKENS
        tokens, computed = server.complete(prompt, NEW_TOKENS)
        # The last token of the prompt is always computed: it gives the first one of the answer.
        assert computed == 1
        assert tokens == expected
        assert hits is None or (cache.hits() or 0) > hits
        # A slot is saved over the file of the last time.
        assert server.save("conversation.bin") >= PROMPT_TOKENS
    cache.assert_pages("conversation.bin", 1)
