"""Makes the small models that the engines run: random weights, so that nothing comes from a model hub.

Runs in an engine's environment: ``python models.py DIRECTORY KIND…``, where a kind is a name of ``KINDS`` or
``tiny.gguf``. A model that is there already is left alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
GGUF = "tiny.gguf"
_TEXT = "a page of the cache is written once and read many times by every process of the host. "

#: What differs between the models; ``kv`` of a token is 2 · layers · KV heads · head size numbers.
KINDS: dict[str, dict[str, Any]] = {
    # 2.6 M parameters, 4 KiB of KV a token: starts in no time.
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dtype": "float32",
    },
    # 303 M parameters, 48 KiB of KV a token: a prompt of 4,096 tokens takes seconds on two cores.
    "medium": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "dtype": "bfloat16",
    },
}


def make_transformers_model(directory: Path, kind: str) -> None:
    """Write config, safetensors weights and a tokenizer, all of which ``transformers`` can load."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape = dict(KINDS[kind])
    dtype = getattr(torch, shape.pop("dtype"))
    tokenizer = Tokenizer(BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 10, trainer)
    begin, end, padding = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=padding
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        head_dim=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        # Weights this large make the next token depend on all that came before.
        initializer_range=0.1,
        **shape,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(directory)
    fast.save_pretrained(directory)


def make_gguf_model(path: Path) -> None:
    """Write a model of the ``tiny`` shape for llama.cpp, with a vocabulary of bytes."""
    import gguf
    import numpy

    shape = KINDS["tiny"]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    layers, heads, kv_heads = (
        shape["num_hidden_layers"],
        shape["num_attention_heads"],
        shape["num_key_value_heads"],
    )
    head_size = hidden // heads
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    types = [
        gguf.TokenType.UNKNOWN,
        gguf.TokenType.CONTROL,
        gguf.TokenType.CONTROL,
        *[gguf.TokenType.BYTE] * 256,
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    numbers = numpy.random.default_rng(0)

    def add(name: str, *dimensions: int) -> None:
        values = numbers.standard_normal(dimensions, dtype=numpy.float32) * numpy.float32(0.05)
        writer.add_tensor(name, values)

    def add_ones(name: str) -> None:
        writer.add_tensor(name, numpy.ones(hidden, dtype=numpy.float32))

    add("token_embd.weight", len(tokens), hidden)
    add_ones("output_norm.weight")
    add("output.weight", len(tokens), hidden)
    for layer in range(layers):
        prefix = f"blk.{layer}"
        add_ones(f"{prefix}.attn_norm.weight")
        add(f"{prefix}.attn_q.weight", hidden, hidden)
        add(f"{prefix}.attn_k.weight", kv_heads * head_size, hidden)
        add(f"{prefix}.attn_v.weight", kv_heads * head_size, hidden)
        add(f"{prefix}.attn_output.weight", hidden, hidden)
        add_ones(f"{prefix}.ffn_norm.weight")
        add(f"{prefix}.ffn_gate.weight", inner, hidden)
        add(f"{prefix}.ffn_up.weight", inner, hidden)
        add(f"{prefix}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    base = Path(sys.argv[1])
    base.mkdir(parents=True, exist_ok=True)
    for kind in sys.argv[2:]:
        final = base / kind
        if final.exists():
            continue
        unfinished = final.with_name(f"{final.name}.unfinished")
        if kind == GGUF:
            make_gguf_model(unfinished)
        else:
            make_transformers_model(unfinished, kind)
            for path in unfinished.iterdir():
                # safetensors files come out readable by their owner alone, and another user runs the engines.
                path.chmod(0o644)
        unfinished.rename(final)


if __name__ == "__main__":
    main()
