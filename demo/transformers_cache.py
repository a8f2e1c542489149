"""The demo's engine: HF transformers, with the KV cache of a prompt kept in plain files.

``python transformers_cache.py cold|warm DIRECTORY ANSWER``: cold computes the prompt, writes one page a layer
below DIRECTORY and its answer to the file ANSWER; warm, in a new process, maps the pages, computes nothing
but the prompt's last token, and compares its answer with that of the cold run. transformers has no cache on
disk of its own: ``write_pages`` and ``map_pages`` are all that it takes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import time
from pathlib import Path

import torch
from telling import mebibytes, say, seconds, summarize, working
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

PROMPT_TOKENS = 3072
#: Tokens that are computed at a time.
CHUNK_TOKENS = 768
NEW_TOKENS = 16
CONFIG = LlamaConfig(
    vocab_size=8192,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=8192,
    initializer_range=0.1,
)
LAYERS, HEADS, HEAD_SIZE = 12, 4, 64


def make_model() -> LlamaForCausalLM:
    """The same random weights in every process: only they and the prompt decide what the answer is."""
    logging.set_verbosity_error()
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def make_prompt() -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))


def page_path(directory: Path, prompt: torch.Tensor, layer: int) -> Path:
    """A page is named by what it was computed from."""
    name = hashlib.sha256(prompt.numpy().tobytes()).hexdigest()[:16]
    return directory / name / f"layer-{layer:02}.kv"


def write_pages(directory: Path, prompt: torch.Tensor, cache: DynamicCache) -> int:
    """One file a layer: the keys, then the values. Returns the bytes written."""
    written = 0
    for number, layer in enumerate(cache.layers):
        path = page_path(directory, prompt, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        page = torch.stack((layer.keys, layer.values)).contiguous()
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            written += file.write(memoryview(page.numpy()).cast("B"))
        unfinished.rename(path)
    return written


def map_pages(directory: Path, prompt: torch.Tensor) -> DynamicCache:
    """The cache of the prompt, read where the filesystem holds it: the pages are mapped."""
    cache = DynamicCache(config=CONFIG)
    for number in range(LAYERS):
        with page_path(directory, prompt, number).open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        page = torch.frombuffer(mapping, dtype=torch.float32).view(2, 1, HEADS, -1, HEAD_SIZE)
        cache.update(page[0], page[1], number)
    return cache


def compute(model: LlamaForCausalLM, tokens: torch.Tensor, cache: DynamicCache) -> None:
    """Fill the cache with the keys and values of the tokens."""
    for chunk in tokens.split(CHUNK_TOKENS, dim=1):
        model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)


def step(model: LlamaForCausalLM, token: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """The scores of the token that comes next."""
    scores: torch.Tensor = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1]
    return scores


def main() -> None:
    phase, directory, answer_file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    with working("loading the model"):
        model, prompt = make_model(), make_prompt()
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    say(f"process {os.getpid()}: a Llama of {parameters:.0f} million parameters, whose values are random")
    say(f"a prompt of {PROMPT_TOKENS:,} random tokens: what counts is the time, the answer makes no sense")
    with torch.inference_mode():
        # What torch does but once in a process is not the cache's business.
        model(input_ids=prompt[:, :8], use_cache=False)
        started = time.perf_counter()
        if phase == "cold":
            cache = DynamicCache(config=CONFIG)
            with working("computing the prompt"):
                compute(model, prompt[:, :-1], cache)
        else:
            cache = map_pages(directory, prompt)
        scores = step(model, prompt[:, -1:], cache)
        first_token = time.perf_counter() - started
        say(f"time to first token: {seconds(first_token)}")
        if phase == "cold":
            started = time.perf_counter()
            # The prompt's last token is not part of the pages: computing it gives the answer's first.
            cache.crop(PROMPT_TOKENS - 1)
            written = write_pages(directory, prompt, cache)
            took = time.perf_counter() - started
            say(f"{LAYERS} pages written: {mebibytes(written)} in {seconds(took)}")
            step(model, prompt[:, -1:], cache)
        tokens = []
        token_scores = scores
        for _ in range(NEW_TOKENS):
            token = token_scores.argmax(dim=-1, keepdim=True)
            tokens.append(int(token))
            token_scores = step(model, token, cache)
    say(f"answer: {' '.join(map(str, tokens))}")
    if phase == "cold":
        torch.save({"first_token": first_token, "scores": scores, "tokens": tokens}, answer_file)
        return
    cold = torch.load(answer_file)
    if tokens != cold["tokens"] or not torch.equal(scores, cold["scores"]):
        sys.exit("demo: the answers differ: that must not happen, please report it")
    say("the same answer as before, its scores equal to the last bit")
    summarize(answer_file, cold["first_token"], first_token, NEW_TOKENS)


if __name__ == "__main__":
    main()
