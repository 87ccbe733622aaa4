"""tokenizer.json from the vocabulary in a GGUF file: byte-level BPE, and SentencePiece BPE as Llama and Gemma use it.

Written line by line, without building the tokenizer: transformers takes 1.0 GB to do so for Gemma's 262,144 words. The
file is the one that transformers would save.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

# Types of tokens in GGUF.
_CONTROL, _USER_DEFINED = 3, 4
_SPACE: Final = "\u2581"

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_LLAMA3: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
# How a byte-level vocabulary cuts text before merging; None: as GPT-2.
SPLITS: Final[dict[str, str | None]] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
# Bytes that a word of the vocabulary takes while its tokenizer is written, with its merges; measured.
BYTES_PER_WORD: Final = 150


def write_tokenizer(metadata: Mapping[str, Any], architecture: str, label: str, folder: Path) -> list[str]:
    """Write tokenizer.json, tokenizer_config.json and the chat template; returns what the user should know.

    Raises:
        ValueError: a vocabulary of another kind, or cut in a way that is not known here.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        return [f"{label} holds no tokenizer, so neither does the result"]
    kind = metadata.get("tokenizer.ggml.model")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    gemma = kind == "llama" and architecture == "gemma3"
    spelled: dict[str, str] = {}
    if kind == "gpt2":
        core, spelled = _byte_level(metadata, tokens, label)
    elif kind == "llama":
        core = _gemma() if gemma else _sentencepiece()
        if gemma:
            # Words of spaces are stored as spaces, which the normaliser has replaced when a word is looked up.
            spelled = {t: _SPACE * len(t) for t in tokens if " " in t and not t.strip()}
    else:
        raise ValueError(
            f"{label}: its vocabulary is of kind {kind!r}, expected gpt2 or llama; give the tokenizer's folder"
        )
    vocabulary = {spelled.get(token, token): index for index, token in enumerate(tokens)}
    special = {
        name: tokens[int(metadata[key])]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"), ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"), ("unk_token", "tokenizer.ggml.unknown_token_id"),
        )
        if key in metadata
    }  # fmt: skip
    # Older files have no flag; llama.cpp puts the first token before a SentencePiece text that does not say otherwise.
    bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")) and "bos_token" in special
    eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in special
    core["post_processor"] = _template(
        special["bos_token"] if bos else None, special["eos_token"] if eos else None, vocabulary
    )
    if "tokenizer.ggml.merges" in metadata:
        merges: Iterable[tuple[str, str]] = _given_merges(metadata["tokenizer.ggml.merges"])
    elif gemma:
        merges = _merges_by_place(vocabulary)
    else:
        merges = _merges_by_score(
            vocabulary, dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
        )
    added = _added_tokens(
        metadata.get("tokenizer.ggml.token_type", ()), tokens, vocabulary, special, kind == "gpt2"
    )
    with (folder / "tokenizer.json").open("w", encoding="utf-8") as file:
        _write(file, core, added, vocabulary, merges)
    config = {
        "backend": "tokenizers",
        "model_max_length": int(1e30),
        "tokenizer_class": "GemmaTokenizer" if gemma else "TokenizersBackend",
        # A token that the file does not have is said to be none, or the class would put its own in its place.
        **{f"{name}_token": special.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk")},
    }
    if gemma and "<mask>" in vocabulary:
        config["mask_token"] = "<mask>"
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8"
    )
    if "tokenizer.chat_template" in metadata:
        (folder / "chat_template.jinja").write_text(str(metadata["tokenizer.chat_template"]), "utf-8")
    return []


# -- kinds of vocabulary -----------------------------------------------------------------------------------------------

_Core = dict[str, Any]


def _model(**changes: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, **changes,
    }  # fmt: skip


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], label: str) -> tuple[_Core, dict[str, str]]:
    cut = str(metadata.get("tokenizer.ggml.pre", "default"))
    if cut not in SPLITS:
        raise ValueError(
            f"{label}: its text is cut by the rule {cut!r}, expected one of {', '.join(SPLITS)}; give the tokenizer's "
            "folder"
        )
    letters = byte_letters()
    alphabet = set(letters)
    spelled = {
        token: "".join(letters[byte] for byte in token.encode("utf-8"))
        for token in tokens
        if not set(token) <= alphabet
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    before: dict[str, Any] = byte_level
    split = SPLITS[cut]
    if split is not None:
        first = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        before = {"type": "Sequence", "pretokenizers": [first, {**byte_level, "use_regex": False}]}
    core = {
        "normalizer": None,
        "pre_tokenizer": before,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": _model(
            continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False, byte_fallback=False
        ),
    }
    return core, spelled


def _sentencepiece() -> _Core:
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    before = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
    return {
        "normalizer": None,
        "pre_tokenizer": before,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(),
    }


def _gemma() -> _Core:
    core = _sentencepiece()
    core["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    core["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False
    }  # fmt: skip
    core["decoder"]["decoders"].pop()
    core["model"]["unk_token"] = "<unk>"
    return core


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE: itself if it prints, else one from U+0100 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, others = [], 0
    for byte in range(256):
        letters.append(chr(byte) if byte in printing else chr(256 + others))
        others += byte not in printing
    return letters


# -- parts of the file -------------------------------------------------------------------------------------------------


def _template(bos: str | None, eos: str | None, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    def part(sequence: str, kind: int) -> list[dict[str, Any]]:
        first = [{"SpecialToken": {"id": bos, "type_id": kind}}] if bos else []
        last = [{"SpecialToken": {"id": eos, "type_id": kind}}] if eos else []
        return [*first, {"Sequence": {"id": sequence, "type_id": kind}}, *last]

    tokens = {t: {"id": t, "ids": [vocabulary[t]], "tokens": [t]} for t in (bos, eos) if t}
    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": part("A", 0) + part("B", 1),
        "special_tokens": tokens,
    }


def _added_tokens(
    types: Iterable[int],
    tokens: list[str],
    vocabulary: Mapping[str, int],
    special: Mapping[str, str],
    bytes_: bool,
) -> list[dict[str, Any]]:
    alphabet = set(byte_letters()) if bytes_ else None
    whole: dict[str, bool] = {}
    for token, kind in zip(tokens, types, strict=False):
        # In a byte-level vocabulary a control token with any other letter is a mistake of the file's writer.
        if kind == _CONTROL and (alphabet is None or set(token) <= alphabet):
            whole[token] = True
        elif kind == _USER_DEFINED and token in vocabulary:
            whole.setdefault(token, False)
    for token in special.values():
        whole[token] = True
    return [
        {"id": vocabulary[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": is_special}
        for token, is_special in sorted(whole.items(), key=lambda item: vocabulary.get(item[0], -1))
        if token in vocabulary
    ]  # fmt: skip


def _given_merges(merges: Iterable[str]) -> Iterator[tuple[str, str]]:
    for merge in merges:
        left, _, right = merge.partition(" ")
        yield left, right


def _splits(token: str, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Ways to put a word together from two others, the longest first part first."""
    for at in range(len(token) - 1, 0, -1):
        if token[:at] in vocabulary and token[at:] in vocabulary:
            yield token[:at], token[at:]


def _merges_by_place(vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Gemma's scores do not follow the order of its merges; the order of its words does."""
    for token in sorted(vocabulary, key=vocabulary.__getitem__):
        yield from _splits(token, vocabulary)


def _merges_by_score(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    found = [
        (score, left, right) for token, score in scores.items() for left, right in _splits(token, vocabulary)
    ]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _write(
    file: IO[str],
    core: _Core,
    added: list[dict[str, Any]],
    vocabulary: dict[str, int],
    merges: Iterable[tuple[str, str]],
) -> None:
    """The layout that the tokenizers library writes; vocabulary and merges line by line."""

    def block(value: Any, depth: int) -> str:
        return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n" + "  " * depth)

    quote = json.encoder.encode_basestring
    file.write('{\n  "version": "1.0",\n  "truncation": null,\n  "padding": null,\n')
    file.write(f'  "added_tokens": {block(added, 1)},\n')
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        file.write(f'  "{name}": {block(core[name], 1)},\n')
    file.write('  "model": {\n')
    for name, value in core["model"].items():
        file.write(f'    "{name}": {json.dumps(value)},\n')
    file.write('    "vocab": {')
    comma = ""
    for token in sorted(vocabulary, key=vocabulary.__getitem__):
        file.write(f"{comma}\n      {quote(token)}: {vocabulary[token]}")
        comma = ","
    file.write('\n    },\n    "merges": [')
    comma = ""
    for left, right in merges:
        file.write(f"{comma}\n      [\n        {quote(left)},\n        {quote(right)}\n      ]")
        comma = ","
    file.write("\n    ]\n  }\n}" if comma else "]\n  }\n}")
