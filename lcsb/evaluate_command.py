"""What `lcsb evaluate` does: load the model with its adapter, read the task, score it here or by the harness."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from lcsb.adapter_files import SETTINGS, load_adapter
from lcsb.evaluate import Evaluation, Progress, evaluate
from lcsb.models import QUANTIZATIONS, load_quantized
from lcsb.tasks.load import load_items
from reports.config import Size

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of the command; see there."""

    task: str
    adapter: Path | None = None
    model: str | None = None
    quantization: str = "nf4"
    path: Path | None = None
    limit: int | None = None
    window: int = 512
    stride: int | None = None
    batch_size: int = 4
    text_field: str = "text"
    size: str = "standard"
    harness: bool = False


def evaluate_task(options: EvaluateOptions, progress: Callable[[str], Any] | None = None) -> Evaluation:
    """Score the model of `options` on their task.

    Raises:
        ValueError: bad options, data, model or adapter; one line each.
    """
    if options.size not in get_args(Size):
        raise ValueError(f"size is {options.size!r}, expected one of {', '.join(get_args(Size))}")
    quantization = None if options.quantization == "none" else options.quantization
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization is {options.quantization!r}, expected nf4, fp4, int8 or none")
    base = options.model or (DEFAULT_MODEL if options.adapter is None else trained_on(options.adapter))
    model, tokenizer = load_quantized(base, quantization=quantization)
    if options.adapter is not None:
        model = load_adapter(model, options.adapter, trainable=False)
    if options.harness:
        from lcsb.harness import evaluate_by_harness

        return evaluate_by_harness(
            model,
            tokenizer,
            options.task,
            path=options.path,
            limit=options.limit,
            batch_size=options.batch_size,
        )
    items = load_items(options.task, tokenizer, path=options.path, text_field=options.text_field)
    name = Path(options.task).name if Path(options.task).is_file() else options.task

    def run(report: Progress | None) -> Evaluation:
        return evaluate(
            model,
            tokenizer,
            items,
            name,
            window=options.window,
            stride=options.stride,
            limit=options.limit,
            exact_match=options.task == "gsm8k" and options.size == "full",
            batch_size=options.batch_size,
            progress=report,
        )

    if progress is None:
        return run(None)
    with progress(f"evaluate {name}") as reporter:
        begin = time.monotonic()

        def report(done: int, total: int) -> None:
            elapsed = time.monotonic() - begin
            reporter(done / total, elapsed * (total - done) / done, f"{done} of {total}")

        return run(report)


def trained_on(folder: Path) -> str:
    """The base model that an adapter names. Raises ValueError where it names none."""
    path = folder / SETTINGS
    if not path.is_file():
        raise ValueError(f"{folder}: no {SETTINGS} in it, expected the folder of a PEFT adapter")
    try:
        name = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if not name:
        raise ValueError(f"{path}: names no base model; give it (--model)")
    return str(name)
