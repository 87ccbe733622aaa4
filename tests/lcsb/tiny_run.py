"""A whole run in seconds: a tiny Llama saved as a folder, a short text, and settings to match.

Use as `import tiny_run`. `settings(folder)` gives a RunConfig; `start(folder, ...)` measures and predicts in this
process (no worker processes), so that arms can be trained at once.
"""

from __future__ import annotations

from pathlib import Path

import tiny
import torch

from lcsb import stages
from reports.records import RunConfig, RunFolder

WORDS = "block descent layer gradient momentum residual adapter learning rate cosine bound limit step cycle"


def write_model(folder: Path, **changes) -> Path:
    """TINY-L and a word tokenizer as a transformers folder, with a text beside it."""
    model = tiny.llama(**changes)
    model.save_pretrained(folder / "model")
    tiny.tokenizer(97).save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    words = WORDS.split()
    picks = torch.randint(len(words), (3000,), generator=generator).tolist()
    (folder / "corpus.txt").write_text(" ".join(words[i] for i in picks), encoding="utf-8")
    return folder


def settings(folder: Path, **changes) -> RunConfig:
    """A run of few tiny steps over the model and text in `folder`; dotted `changes` as in --set."""
    base = {
        "name": "tiny",
        "model": str(folder / "model"),
        "quantization": None,
        "seeds": [0, 1],
        "steps": 6,
        "cycle_length": 2,
        "eval_every": 3,
        "eval_windows": 4,
        "checkpoint_every": 2,
        "timing_repeats": 1,
        "timing_cycle_lengths": [1, 2],
        "fidelity_batches": 2,
        "workers": 1,  # importing torch costs each process more than the work does
        "lora": {"r": 2, "alpha": 4},
        "optimizer": {"learning_rate": 1e-3},
        "data": {"source": str(folder / "corpus.txt"), "tokens": 16},
        "arms": ["full", "exact-momentum", "exact-frozen", "identity-momentum", "mlp-momentum"],
    }
    for key, value in changes.items():
        place = base
        *path, last = key.split("__")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return RunConfig.from_mapping(base)


def start(root: Path, config: RunConfig) -> RunFolder:
    """Open, measure (here, not in a worker) and predict."""
    folder = stages.open_run(root, config)
    stages._measure(folder.root)
    stages.predict(folder)
    return folder
