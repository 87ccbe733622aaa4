"""What `LCSBTrainer` needs of the memory engine: a model, planned for its batches, and its options looked through."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from lcsb.config import LCSBConfig
from lcsb.engine.module import EngineModel


def resolved_config(lcsb: LCSBConfig | Mapping[str, Any] | None, model: Any) -> LCSBConfig:
    """The settings that were given, or an EngineModel's own."""
    if lcsb is None and isinstance(model, EngineModel):
        return model.lcsb_config
    return lcsb if isinstance(lcsb, LCSBConfig) else LCSBConfig.from_dict(dict(lcsb or {}))


def engine_model(config: LCSBConfig, given: Mapping[str, Any]) -> EngineModel:
    """The model of a Trainer whose steps the memory engine computes, planned for the training set's longest row.

    Raises:
        ValueError: a model in memory, or what the engine does not compute.
        BudgetError: the budget cannot be met.
    """
    model, args = given.get("model"), given.get("args") or TrainingArguments("tmp_trainer")
    for name in ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func", "model_init"):
        if given.get(name) is not None:
            raise ValueError(
                f"{name}: not with the memory engine, which computes the loss and never all logits; leave it out"
            )
    refuse_engine_options(args)
    rows, tokens = args.per_device_train_batch_size, _longest_row(given.get("train_dataset"))
    if isinstance(model, EngineModel):
        model.fit(rows, tokens)
        return model
    if not isinstance(model, str | Path):
        raise ValueError(
            f"ram_budget: found {config.ram_budget!r} for a {type(model).__name__} that is in memory already; give "
            "model='folder of packed weights' (`lcsb convert` writes one), a built-in name, or an EngineModel"
        )
    scratch = Path(args.output_dir)
    return EngineModel(model, config, seed=args.seed, rows=rows, tokens=tokens, scratch=scratch)


def _longest_row(dataset: Any) -> int:
    """Tokens of the longest row; 1 if that cannot be told (a stream), so that each batch is planned when it comes."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return 1
    rows = (dataset[index] for index in range(len(dataset)))
    return max(
        (len(row["input_ids"]) for row in rows if isinstance(row, Mapping) and "input_ids" in row), default=1
    )


def refuse_engine_options(args: Any) -> None:
    """Refuse `TrainingArguments` that would change what the engine computes, or silently would not.

    Raises:
        ValueError: names the first of them.
    """
    unwanted = {
        "bf16": args.bf16,
        "fp16": args.fp16,
        "bf16_full_eval": args.bf16_full_eval,
        "fp16_full_eval": args.fp16_full_eval,
        "torch_compile": args.torch_compile,
        "use_liger_kernel": args.use_liger_kernel,
        "label_smoothing_factor": args.label_smoothing_factor,
        "neftune_noise_alpha": args.neftune_noise_alpha,
        "include_for_metrics": args.include_for_metrics,
    }
    for name, value in unwanted.items():
        if value:
            hint = " (EngineModel(compute_dtype='bfloat16') asks for it)" if name == "bf16" else ""
            raise ValueError(f"{name} is {value}: the memory engine does not take it; leave it out{hint}")
    if args.device.type != "cpu":
        raise ValueError(
            f"device {args.device}: inside a Trainer the memory engine computes on the CPU; set use_cpu=True"
        )
    if args.world_size != 1:
        raise ValueError(f"{args.world_size} processes: the memory engine trains in one")
