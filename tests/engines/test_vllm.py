"""vLLM with the connectors that keep KV in files."""

from __future__ import annotations

from tests.engines.caches import PlainCache
from tests.engines.vllm_engine import BLOCK, BLOCKS, LAYERS, Output, Vllm, example_connector, fs_tier, prompts


def assert_all_hit(
    cache: PlainCache, hits_before: int | None, warm: list[Output], uncached: list[Output]
) -> None:
    """The engine took every whole block from the cache, said the same, and the mount counted its reads."""
    assert [output.tokens for output in warm] == [output.tokens for output in uncached]
    assert [output.cached_tokens for output in warm] == [BLOCK * BLOCKS] * 2
    if hits_before is not None:
        hits = cache.hits()
        assert hits is not None
        assert hits > hits_before


def test_example_connector_hits_in_a_new_process(
    vllm: Vllm, cache: PlainCache, uncached: list[Output]
) -> None:
    connector = example_connector(cache.path)
    cold = vllm.generate(connector)
    assert [output.cached_tokens for output in cold] == [0, 0]
    assert [output.tokens for output in cold] == [output.tokens for output in uncached]
    cache.assert_pages("*.safetensors", LAYERS * len(prompts()))

    hits = cache.hits()
    assert_all_hit(cache, hits, vllm.generate(connector), uncached)


def test_fs_tier_hits_in_a_new_process_and_after_restarts_of_the_mount(
    vllm: Vllm, cache: PlainCache, uncached: list[Output]
) -> None:
    blocks = BLOCKS * len(prompts())
    connector = fs_tier(cache.path / "vllm")
    cold = vllm.generate(
        connector, await_files={"directory": str(cache.path), "suffix": ".bin", "count": blocks}
    )
    assert [output.cached_tokens for output in cold] == [0, 0]
    assert [output.tokens for output in cold] == [output.tokens for output in uncached]
    cache.assert_pages("*.bin", blocks)

    hits = cache.hits()
    assert_all_hit(cache, hits, vllm.generate(connector), uncached)

    cache.remount()
    hits = cache.hits()
    assert_all_hit(cache, hits, vllm.generate(connector), uncached)

    cache.kill_and_remount()
    hits = cache.hits()
    assert_all_hit(cache, hits, vllm.generate(connector), uncached)
    cache.assert_pages("*.bin", blocks)
