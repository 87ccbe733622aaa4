"""Token windows of a run without transformers: made in a process of its own, kept in the run folder, read by mapping.

A tokenizer's vocabulary takes memory (Gemma's 262,144 words: 360 MiB while it is read), which a process of its own
gives back. `python -m lcsb.engine.tokens CONFIG FOLDER OUT` is that process.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lcsb.data import Corpus, Examples
from reports.records import RunConfig, sha256_of

_PARTS = ("input_ids", "labels", "attention_mask")


class PackedTokenizer:
    """What `lcsb.data` and `lcsb.tasks` ask of a fast tokenizer, from tokenizer.json by the `tokenizers` library.

    Raises:
        ValueError: no tokenizer.json in the folder.
    """

    is_fast = True

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{file}: not there; `lcsb convert` copies the source's tokenizer beside the weights"
            )
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        named: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                named |= json.loads((folder / name).read_text(encoding="utf-8"))
        self.bos_token_id, self.eos_token_id = (
            self._id(named.get("bos_token")),
            self._id(named.get("eos_token")),
        )
        self.pad_token_id = self._id(named.get("pad_token"))
        singles = [value for key, value in named.items() if key.endswith("_token")]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = named.get(key) or []
            singles += list(more.values()) if isinstance(more, Mapping) else list(more)
        found = {self._id(token) for token in singles if isinstance(token, str | Mapping)}
        self.all_special_ids = sorted(token for token in found if token is not None)

    def _id(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, Mapping) else token
        return None if text is None else self._tokenizer.token_to_id(text)

    @property
    def chat_template(self) -> str | None:
        """Raises ValueError: conversations need transformers."""
        raise ValueError(
            "rows of messages need a chat template, which transformers renders; within a memory budget give rows of "
            "prompt and completion, or text"
        )

    def __call__(
        self,
        text: str | list[str],
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        **unused: Any,
    ) -> dict[str, Any]:
        """input_ids and offset_mapping of a text, or lists of them."""
        self._tokenizer.encode_special_tokens = split_special_tokens
        texts = [text] if isinstance(text, str) else text
        found = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        ids, offsets = [list(one.ids) for one in found], [list(one.offsets) for one in found]
        alone = isinstance(text, str)
        return {"input_ids": ids[0] if alone else ids, "offset_mapping": offsets[0] if alone else offsets}


def read_windows(config: RunConfig, folder: Path, out: Path) -> Corpus:
    """The corpus of `lcsb.prepare.read_corpus`, tensor by tensor, mapped from the file `out`.

    Args:
        config: of the run.
        folder: of the packed model, with its tokenizer.
        out: written if it is not there, or belongs to another tokenizer, text or setting.

    Raises:
        ValueError: what `load_task` refuses (in its words).
    """
    key = _key(config, folder)
    if key is None or not out.exists() or _facts(out).get("key") != key:
        out.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "lcsb.engine.tokens", "-", str(folder), str(out), key or ""]
        done = subprocess.run(command, input=config.to_yaml(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(
                (done.stderr.strip().splitlines() or ["tokenising failed without a message"])[-1]
            )
    facts = _facts(out)
    with safe_open(out, "pt") as file:  # the tensors are views of the file
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def part(name: str) -> torch.Tensor | Examples:
        if name in parts:
            return parts[name]
        return Examples(*(parts[f"{name}/{field}"] for field in _PARTS))

    fields = {name: facts[name] for name in ("sha256", "held_out_sha256", "source")}
    return Corpus(part("train"), part("held_out"), counts=facts["counts"], **fields)


def _key(config: RunConfig, folder: Path) -> str | None:
    """sha256 of all that the windows depend on; None where that cannot be told beforehand (task folders, the hub)."""
    data = config.data
    source = Path(data.source).expanduser()
    if data.source == "pydoc":
        text = sys.version
    elif source.is_file():
        text = sha256_of(source)
    else:
        return None
    tokenizer = [sha256_of(folder / name) for name in ("tokenizer.json", "tokenizer_config.json")
                 if (folder / name).is_file()]  # fmt: skip
    what = {"format": 1, "text": text, "tokenizer": tokenizer, "data": data.model_dump(mode="json")}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _facts(file: Path) -> dict[str, Any]:
    try:
        with safe_open(file, "pt") as opened:
            facts: dict[str, Any] = json.loads((opened.metadata() or {}).get("lcsb", "{}"))
            return facts
    except Exception as error:  # safetensors has an error class of its own
        if type(error).__name__ != "SafetensorError":
            raise
        return {}


def _write(config: RunConfig, folder: Path, out: Path, key: str) -> None:
    from lcsb.tasks.load import load_task

    data = config.data
    corpus = load_task(
        data.source,
        PackedTokenizer(folder),
        tokens=data.tokens,
        path=data.path,
        text_field=data.text_field,
        held_out_every=max(2, round(1 / data.held_out)),
        rows=data.rows,
    )
    tensors: dict[str, torch.Tensor] = {}
    for name, rows in (("train", corpus.train), ("held_out", corpus.held_out)):
        if isinstance(rows, torch.Tensor):
            tensors[name] = rows.contiguous()
        else:
            tensors |= {f"{name}/{field}": getattr(rows, field).contiguous() for field in _PARTS}
    facts = {"key": key or None, "sha256": corpus.sha256, "held_out_sha256": corpus.held_out_sha256,
             "source": corpus.source, "counts": dict(corpus.counts)}  # fmt: skip
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={"lcsb": json.dumps(facts)})
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _main() -> None:
    import yaml

    settings = RunConfig.from_mapping(yaml.safe_load(sys.stdin))
    try:
        _write(settings, Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    _main()
