"""Writes tiny models as GGUF files with the reference writer (package gguf), for the tests of the GGUF reader.

The layout is written down here from the format's description, independently of the reader under test: names of the
tensors, the row permutation of q and k in Llama files (pairs of half-rotations interleaved), and Gemma's norms stored
with their 1 added. `write(...)` returns {name in the model: matrix as the file's own dequantiser gives it}.
"""

from __future__ import annotations

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
}  # fmt: skip
PRE_NORM = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
QWEN3_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name, arch):
    stem, suffix = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    _, _, index, part = stem.split(".", 3)
    table = NAMES | (GEMMA_NORMS if arch == "gemma3" else PRE_NORM | QWEN3_NORMS)
    return f"blk.{index}.{table[part]}.{suffix}"


def permuted(matrix, heads):
    """Rows of each head (first half, second half) -> interleaved pairs: the order Llama files use."""
    rows = matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, *matrix.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(matrix.shape)


def unpermuted(matrix, heads):
    rows = matrix.reshape(heads, matrix.shape[0] // heads // 2, 2, *matrix.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(matrix.shape)


# Bytes of a block of 256 numbers, and where its float16 scales stand (the writer has no quantiser for these types).
K_LAYOUT = {"Q4_K": (144, (0, 2)), "Q6_K": (210, (208,))}


def k_blocks(shape, kind):
    """Random blocks of a K type with small scales: valid data, though not of any matrix in particular."""
    size, scales = K_LAYOUT[kind.name]
    generator = np.random.default_rng(shape)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // 256, size), dtype=np.uint8)
    for at in scales:
        values = generator.uniform(1e-5, 2e-5, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = values[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write(path, model, arch, qtype, leave_out=(), extra=None, rope_scaling=None, raw_type=None):
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("rope_theta") or rope["full_attention"]["rope_theta"])
    if rope_scaling is not None:
        writer.add_rope_scaling_type(rope_scaling)
        writer.add_rope_scaling_factor(8.0)
    if arch == "llama":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if arch in ("gemma3", "qwen3"):
        writer.add_key_length(config.head_dim)
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    _add_tokenizer(writer, config.vocab_size)
    expected = {}
    for name, parameter in model.named_parameters():
        if name in leave_out:
            continue
        matrix = parameter.detach().numpy().astype(np.float32)
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        rotated = arch == "llama" and ("q_proj" in name or "k_proj" in name)
        added = 1.0 if arch == "gemma3" and "norm" in name else 0.0
        stored = permuted(matrix, heads) if rotated else matrix + np.float32(added)
        kind = qtype if matrix.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = k_blocks(stored.shape, kind) if kind.name in K_LAYOUT else gguf.quantize(stored, kind)
        writer.add_tensor(gguf_name(name, arch), data, raw_dtype=kind)
        back = gguf.dequantize(data, kind)
        expected[name] = unpermuted(back, heads) if rotated else back - np.float32(added)
    if extra is not None:
        writer.add_tensor(extra, np.ones(4, dtype=np.float32))
    if raw_type is not None:
        writer.add_tensor("blk.0.odd.weight", np.zeros((2, 64), dtype=np.int8), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _add_tokenizer(writer, vocabulary):
    """Byte-level BPE: 256 bytes, a few merges, then control tokens."""
    letters = list(bytes_to_unicode().values())
    merges = ["t h", "th e", "i n", "a n", "e r"]
    tokens = letters + [merge.replace(" ", "") for merge in merges]
    types = [1] * len(tokens)
    while len(tokens) < vocabulary:
        tokens.append(f"<|s{len(tokens)}|>")
        types.append(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(vocabulary - 1)
    writer.add_eos_token_id(vocabulary - 2)
    writer.add_pad_token_id(vocabulary - 3)
