"""The same tasks through EleutherAI's lm-evaluation-harness (extra `eval`), as an independent second opinion.

The harness reads the raw file by itself and builds prompts from templates of its own language, so agreement checks the
reading, the prompts, the tokens and the scores of `lcsb.evaluate` at once. It scores choices and completions; for plain
text its windows differ from ours, and it is refused.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lcsb.data import jsonl_rows
from lcsb.evaluate import Evaluation
from lcsb.tasks.formats import kind_of
from lcsb.tasks.load import TASKS
from lcsb.tasks.sources import task_file

_ARC = {
    "output_type": "multiple_choice",
    "target_delimiter": " ",
    "doc_to_target": "{{choices.label.index(answerKey)}}",
}
_TEMPLATES: dict[str, dict[str, Any]] = {
    "arc-challenge": {
        **_ARC,
        "doc_to_text": "Question: {{question | trim}}\nAnswer:",
        "doc_to_choice": "{{choices.text | map('trim') | list}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "arc-challenge-letter": {
        **_ARC,
        "doc_to_text": (
            "Question: {{question | trim}}\n{% for text in choices.text %}"
            "{{choices.label[loop.index0]}}. {{text | trim}}\n{% endfor %}Answer:"
        ),
        "doc_to_choice": "{{choices.label}}",
        "metric_list": [{"metric": "acc"}],
    },
    "gsm8k": {
        "output_type": "loglikelihood",
        "doc_to_text": "Question: {{question | trim}}\nAnswer:",
        "doc_to_target": " {{answer | trim}}",
        "metric_list": [{"metric": "perplexity"}],
    },
    "completion": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{completion}}",
        "metric_list": [{"metric": "perplexity"}],
    },
}
_NAMES = {
    "acc,none": "accuracy",
    "acc_stderr,none": "accuracy_standard_error",
    "acc_norm,none": "accuracy_per_character",
    "acc_norm_stderr,none": "accuracy_per_character_standard_error",
}


@dataclass(frozen=True)
class HarnessEvaluation(Evaluation):
    """What the harness found. log_likelihoods: of every choice or completion, item by item, in the data's order."""

    log_likelihoods: tuple[tuple[float, ...], ...] = ()


def evaluate_by_harness(
    model: Any,
    tokenizer: Any,
    task: str,
    *,
    path: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 4,
) -> HarnessEvaluation:
    """Score a loaded model by lm-evaluation-harness.

    Args:
        task: "arc-challenge", "arc-challenge-letter" or "gsm8k" (test rows), or a .jsonl file of prompt and completion.
        path, limit, batch_size: as in `lcsb.evaluate`.

    Returns:
        metrics: accuracies under the names that `lcsb.evaluate` uses; log_likelihood, the sum over the right choices
            or the completions, in nats.

    Raises:
        ModuleNotFoundError: the extra `eval` is not installed.
        ValueError: a task that the harness cannot be given.
    """
    try:
        lm_eval = importlib.import_module("lm_eval")
        tasks = importlib.import_module("lm_eval.tasks")
        huggingface = importlib.import_module("lm_eval.models.huggingface")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the harness is not installed ({error}): pip install 'lcsb[eval]'"
        ) from None
    template, data = _data(task, path)
    name = f"lcsb-{template}"
    with tempfile.TemporaryDirectory() as cache:
        if "data_files" in data.get("dataset_kwargs", {}):
            data["dataset_kwargs"]["cache_dir"] = cache  # not the user's: the file is read anew each time
        config = {"task": name, **data, **_TEMPLATES[template], "test_split": "test", "num_fewshot": 0}
        adapter = huggingface.HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device)
        )
        with _global_random_state():
            results = lm_eval.simple_evaluate(
                model=adapter,
                tasks=[config],
                task_manager=tasks.TaskManager(include_defaults=False),
                limit=limit,
                bootstrap_iters=1
                if template.startswith("arc")
                else 0,  # 0 takes the closed-form errors away too
                log_samples=True,
            )
    return _result(task, name, results)


@contextlib.contextmanager
def _global_random_state() -> Iterator[None]:
    """The harness seeds and draws from the process's generators; put them back."""
    state, array_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)
        np.random.set_state(array_state)  # noqa: NPY002


def _data(task: str, path: str | Path | None) -> tuple[str, dict[str, Any]]:
    """(template, where the harness finds the rows)."""
    if task in TASKS:
        known = TASKS[task]
        if task not in _TEMPLATES:
            raise ValueError(
                f"{task}: the harness reads texts in other windows; evaluate it without --harness"
            )
        file = task_file(known.folder, known.test_files, path)
        if file is None:
            return task, {"dataset_path": known.test_hub.name, "dataset_name": known.test_hub.config}
        return task, {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}}
    file = Path(task).expanduser()
    if file.suffix != ".jsonl" or not file.is_file():
        choices = ", ".join(name for name in _TEMPLATES if name in TASKS)
        raise ValueError(
            f"{task}: expected {choices}, or a .jsonl file of prompt and completion, for the harness"
        )
    first = next(((where, row) for where, row in jsonl_rows(file) if row is not None), None)
    kind = "empty" if first is None else kind_of(first[1], first[0], "text")
    if kind != "completion":
        raise ValueError(f"{file}: rows of {kind}, expected prompt and completion for the harness")
    return "completion", {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}}


def _result(task: str, name: str, results: Any) -> HarnessEvaluation:
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    scores = tuple(tuple(float(answer[0]) for answer in sample["filtered_resps"]) for sample in samples)
    right = [
        row[int(sample["target"])] if len(row) > 1 else row[0]
        for sample, row in zip(samples, scores, strict=True)
    ]
    figures = results["results"][name]
    metrics: dict[str, float | None] = {
        ours: float(figures[theirs]) if isinstance(figures[theirs], int | float) else None
        for theirs, ours in _NAMES.items()
        if theirs in figures
    }
    metrics["log_likelihood"] = sum(right)
    return HarnessEvaluation(task, metrics, {"items": len(samples), "scored": sum(map(len, scores))}, scores)
