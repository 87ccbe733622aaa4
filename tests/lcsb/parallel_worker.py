"""One LCSBTrainer run of a tiny model, in as many processes as the launcher starts; each writes what it saw.

python parallel_worker.py OUT BATCH ACCUMULATION '{"schedule": "shuffled", ...}' [nothing | callback | other-seed]
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny
import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainingArguments

from lcsb import LCSBCallback, LCSBConfig, LCSBTrainer


def data(rows=24, tokens=10):
    """Rows of unequal target counts."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 96, (rows, tokens), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % 4] = -100
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(rows)]


def main(out, batch, accumulation, config, variant="nothing"):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    out, rank = Path(out), int(os.environ.get("RANK", "0"))
    # Another start on each rank: rank 0's must win.
    model = tiny.with_lora(tiny.llama(), seed=1 + rank)
    arguments = TrainingArguments(
        str(out / "trainer"), max_steps=6, per_device_train_batch_size=int(batch), max_grad_norm=0.5,
        gradient_accumulation_steps=int(accumulation), learning_rate=1e-3, use_cpu=True, report_to=[],
        logging_steps=1, save_strategy="no", disable_tqdm=True,
        seed=rank if variant == "other-seed" else 0,
    )  # fmt: skip
    config = LCSBConfig.from_dict(json.loads(config))
    if variant == "callback":
        Trainer(model=model, args=arguments, train_dataset=data(), callbacks=[LCSBCallback(config)]).train()
        return
    trainer = LCSBTrainer(model=model, args=arguments, train_dataset=data(), lcsb=config)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    seen = {
        "selected": [row["lcsb/selected"] for row in rows],
        "norms": [row["lcsb/grad_norm"] for row in rows],
        "bytes": trainer.lcsb.replicas.bytes_sent,
        "wrapped": type(trainer.model_wrapped).__name__,
    }
    (out / f"rank-{rank}.json").write_text(json.dumps(seen))
    tensors = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    save_file(tensors, out / f"rank-{rank}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
