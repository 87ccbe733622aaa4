"""A GGUF file as a source of a conversion: header and blocks read by a few bytes at a time, from one file or its parts.

The package `gguf` maps the whole file and holds an object for every token of the vocabulary (1.1 GB for 262,144
words), so the header is read here; its dequantisation, which works on rows, is used as it is.
"""

from __future__ import annotations

import io
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from torch import Tensor

from lcsb.engine.gguf_tokenizer import BYTES_PER_WORD, write_tokenizer
from lcsb.engine.sources import Source

ARCHITECTURES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PRE_NORM: Final = {"ffn_norm": "post_attention_layernorm"}
_SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Joined(io.RawIOBase):
    """Files read one after another as if they were one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [path.open("rb", buffering=0) for path in paths]
        self._starts = [0]
        for path in paths:
            self._starts.append(self._starts[-1] + path.stat().st_size)
        self.size, self._at = self._starts[-1], 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        for index, file in enumerate(self._files):
            start, end = self._starts[index], self._starts[index + 1]
            if start <= self._at < end:
                file.seek(self._at - start)
                got = file.readinto(memoryview(buffer)[: end - self._at]) or 0
                self._at += got
                return got
        return 0

    def close(self) -> None:
        for file in getattr(self, "_files", ()):
            file.close()
        super().close()


@dataclass(frozen=True)
class _Tensor:
    """Shape, GGML type, first byte in the file and bytes of a row."""

    shape: tuple[int, ...]
    kind: int
    start: int
    row_bytes: int


class GGUFSource(Source):
    """A GGUF model of llama, qwen2, qwen3 or gemma3 architecture, under transformers' names.

    Args:
        paths: the file, or the parts of one in their order.
        label: what errors call it.

    Raises:
        ImportError: the `gguf` package is absent.
        ValueError: not GGUF, cut short, an architecture or a tensor type that is not read, scaled rotary positions.
    """

    def __init__(self, paths: Sequence[Path], label: str) -> None:
        try:
            from gguf import quants
            from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        except ImportError as error:
            raise ImportError(f"reading {label} needs the gguf package: pip install 'gguf>=0.19'") from error
        self._dequantize, self._kinds, self._sizes = quants.dequantize, GGMLQuantizationType, GGML_QUANT_SIZES
        self.label, self.files = label, {Path(label).name: list(paths)}
        self._file = _Joined(paths)
        self.metadata, found = self._read_header()
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{label}: architecture {self.architecture!r}, expected one of {', '.join(ARCHITECTURES)}"
            )
        self._refuse_rotary_scaling(found)
        self._gguf_names = {self._name(name): name for name in found}
        self._tensors = {self._name(name): tensor for name, tensor in found.items()}
        self.config = self._config()

    # -- the header ----------------------------------------------------------------------------------------------

    def _read_header(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        reader: Any = io.BufferedReader(self._file, 1 << 20)
        try:
            magic = reader.read(4)
            if magic != b"GGUF":
                raise ValueError(f"{self.label} is not a GGUF file: starts with {magic!r}, expected b'GGUF'")
            version, tensors, keys = struct.unpack("<IQQ", reader.read(20))
            if version not in (2, 3):
                raise ValueError(f"{self.label}: GGUF version {version}, expected 2 or 3 (little-endian)")
            metadata = {}
            for _ in range(keys):
                key = _string(reader)
                metadata[key] = _value(reader, _number(reader, "I"))
            table = []
            for _ in range(tensors):
                name, width = _string(reader), _number(reader, "I")
                shape = struct.unpack(f"<{width}Q", reader.read(8 * width))[::-1]
                table.append((name, shape, _number(reader, "I"), _number(reader, "Q")))
            end = reader.tell()
        except (struct.error, UnicodeDecodeError, KeyError, MemoryError, OverflowError) as error:
            raise ValueError(f"{self.label}: its header cannot be read, it was cut short ({error})") from None
        finally:
            reader.detach()
        alignment = int(metadata.get("general.alignment", 32))
        data = -(-end // alignment) * alignment
        return metadata, {name: self._place(name, shape, kind, data + at) for name, shape, kind, at in table}

    def _place(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> _Tensor:
        try:
            numbers, length = self._sizes[self._kinds(kind)]
            sample = np.zeros((1, length), dtype=np.uint8)
            self._dequantize(sample, self._kinds(kind))
        except (ValueError, KeyError, NotImplementedError):
            known = self._kinds(kind).name if kind in list(self._kinds) else str(kind)
            raise ValueError(
                f"{self.label}: tensor {name} has type {known}, which cannot be dequantised"
            ) from None
        if shape[-1] % numbers:
            raise ValueError(
                f"{self.label}: tensor {name} has rows of {shape[-1]}, expected whole blocks of {numbers}"
            )
        tensor = _Tensor(shape, kind, start, shape[-1] // numbers * length)
        end = start + tensor.row_bytes * int(np.prod(shape[:-1], dtype=np.int64))
        if end > self._file.size:
            raise ValueError(
                f"{self.label}: {name} ends at byte {end}, the file has {self._file.size}; it was cut short"
            )
        return tensor

    def _refuse_rotary_scaling(self, tensors: dict[str, _Tensor]) -> None:
        # Neither transformers' configuration for these models nor the engine has the factors.
        found = [name for name in tensors if name.startswith("rope_")]
        for key, value in self.metadata.items():
            plain = "none" if key.endswith(".rope.scaling.type") else 1.0
            if key.endswith((".rope.scaling.type", ".rope.scaling.factor")) and value != plain:
                found.append(f"{key} = {value}")
        if found:
            raise ValueError(
                f"{self.label} scales its rotary positions ({', '.join(found)}), which cannot be read from GGUF: "
                "convert the model's safetensors folder"
            )

    def _name(self, name: str) -> str:
        """transformers' name; one that has none is kept, and reported as left over."""
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{suffix}"
        parts = stem.split(".")
        table = _LAYER | (_SANDWICH if self.architecture == "gemma3" else _PRE_NORM)
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in table:
            return f"model.layers.{parts[1]}.{table[parts[2]]}.{suffix}"
        return name

    def _key(self, name: str, default: Any = None) -> Any:
        found = self.metadata.get(f"{self.architecture}.{name}", default)
        if found is None:
            raise ValueError(f"{self.label}: no key {self.architecture}.{name} in its metadata")
        return found

    def _config(self) -> dict[str, Any]:
        kind, model_class = ARCHITECTURES[self.architecture]
        heads, hidden = int(self._key("attention.head_count")), int(self._key("embedding_length"))
        words = self.metadata.get("tokenizer.ggml.tokens", [])
        head_dim = int(self._key("attention.key_length", self._key("rope.dimension_count", hidden // heads)))
        base = float(self._key("rope.freq_base", 10000.0))
        config: dict[str, Any] = {
            "architectures": [model_class],
            "model_type": kind,
            "num_hidden_layers": int(self._key("block_count")),
            "hidden_size": hidden,
            "intermediate_size": int(self._key("feed_forward_length")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._key("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "max_position_embeddings": int(self._key("context_length")),
            "rms_norm_eps": float(self._key("attention.layer_norm_rms_epsilon")),
            "vocab_size": int(self._key("vocab_size", len(words))),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
        }
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
            if f"tokenizer.ggml.{theirs}_token_id" in self.metadata:
                config[f"{ours}_token_id"] = int(self.metadata[f"tokenizer.ggml.{theirs}_token_id"])
        if kind != "gemma3_text":
            return config | {
                "hidden_act": "silu", "rope_parameters": {"rope_theta": base, "rope_type": "default"}
            }  # fmt: skip
        layers = config["num_hidden_layers"]
        # The format has no field for it: 256 in every Gemma 3 but the one of 62 layers (27B), as llama.cpp knows too.
        return config | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": hidden // heads if layers == 62 else 256,
            "sliding_window": int(self._key("attention.sliding_window")),
            "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)],
            "rope_parameters": {
                "full_attention": {"rope_theta": base, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        }

    def write_tokenizer(self, folder: Path) -> list[str]:
        return write_tokenizer(self.metadata, self.architecture, self.label, folder)

    def extra_bytes(self) -> int:
        return BYTES_PER_WORD * len(self.metadata.get("tokenizer.ggml.tokens", ()))

    # -- tensors -------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        if len(self._tensors[name].shape) == 1:
            return torch.float32  # a Gemma norm less 1 need not be a float16
        kind = self._kinds(self._tensors[name].kind).name
        return {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)

    def row_step(self, name: str) -> int:
        return self.shape(name)[0] // self._rotated_heads(name) if self._rotated_heads(name) else 1

    def rows(self, name: str, first: int, last: int) -> Tensor:
        tensor = self._tensors[name]
        vector = len(tensor.shape) == 1
        values = self._read(tensor, 0, 1)[0, first:last] if vector else self._read(tensor, first, last)
        heads = self._rotated_heads(name)
        if heads:
            # Llama files interleave the two halves of each head's rows.
            width = tensor.shape[0] // heads
            values = values.reshape(-1, width // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if self.architecture == "gemma3" and name.endswith("norm.weight"):
            values = values - np.float32(1)  # the file holds 1 + w
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.dtype(name))

    def _rotated_heads(self, name: str) -> int:
        if self.architecture != "llama" or ".self_attn." not in name:
            return 0
        key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        return int(self.config[key]) if key else 0

    def _read(self, tensor: _Tensor, first: int, last: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        data = bytearray((last - first) * tensor.row_bytes)
        view = memoryview(data)
        self._file.seek(tensor.start + first * tensor.row_bytes)
        while view:
            got = self._file.readinto(view)
            if not got:
                raise ValueError(f"{self.label}: the file ended while it was read; it was cut short")
            view = view[got:]
        raw = np.frombuffer(data, dtype=np.uint8).reshape(last - first, tensor.row_bytes)
        values: np.ndarray[Any, np.dtype[np.float32]] = self._dequantize(raw, self._kinds(tensor.kind))
        return values


def _number(reader: IO[bytes], code: str) -> int:
    (value,) = struct.unpack(f"<{code}", reader.read(struct.calcsize(code)))
    return int(value)


def _string(reader: IO[bytes]) -> str:
    length = _number(reader, "Q")
    raw = reader.read(length)
    if len(raw) < length:
        raise struct.error(f"a string of {length} bytes")
    return raw.decode("utf-8")


def _value(reader: IO[bytes], kind: int) -> Any:
    if kind == _STRING:
        return _string(reader)
    if kind == _ARRAY:
        element, length = _number(reader, "I"), _number(reader, "Q")
        if element in (_STRING, _ARRAY):
            return [_value(reader, element) for _ in range(length)]
        code = _SCALARS[element]
        size = struct.calcsize(f"<{code}")
        raw = reader.read(length * size)
        if len(raw) < length * size:
            raise struct.error(f"an array of {length} numbers")
        if code == "?":
            return list(raw)
        values = array({"q": "q", "Q": "Q"}.get(code, code))
        values.frombytes(raw)
        return values
    (value,) = struct.unpack(f"<{_SCALARS[kind]}", reader.read(struct.calcsize(f"<{_SCALARS[kind]}")))
    return value
