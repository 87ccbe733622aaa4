"""Merge an adapter into a base: W' = W + s B A (DoRA: with its norms), and what that does to the model.

An adapter trained on a quantised base was trained against the *rounded* weights. Merged into those weights, written in
float32, it is the same function (`merge_adapter`, checked by reading the result back). Rounded again, or put on the
unrounded weights, it is another model, near or not: `merge_table` measures how near.
"""

from __future__ import annotations

import copy
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lcsb.adapter_files import adapted_modules, load_adapter
from lcsb.cache import whole_folder
from lcsb.data import load_corpus
from lcsb.models import load_quantized, quantize_folder, save_model
from lcsb.quantized import dequantized_weight

LOGIT_TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit, that counts as float32 rounding."""
LOSS_TOLERANCE = 1e-5
"""Largest difference of the loss (relative, where it is above 1) that counts as float32 rounding."""


class MergeError(RuntimeError):
    """The merged model, read back, is not the function that was merged."""


@dataclass(frozen=True)
class MergeReport:
    """What `merge_adapter` wrote.

    modules: how many modules the adapter changes; untied: the head was separated from the embedding.
    loss_adapter, loss_merged: mean loss per token on the check rows, before and after, in nats.
    logit_difference: largest difference of a logit on them, relative to the largest logit.
    """

    modules: int
    untied: bool
    loss_adapter: float
    loss_merged: float
    logit_difference: float


@dataclass(frozen=True)
class MergeRow:
    """One row of the four-way table.

    loss in nats per token; gap = loss - loss of row a; logit_difference as in `MergeReport`, against row a; same: the
    same function as row a up to float32 rounding.
    """

    row: str
    model: str
    loss: float
    gap: float
    logit_difference: float
    same: bool


def merge_adapter(
    model: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    quantization: str | None = "nf4",
    double_quant: bool = False,
    untie: bool = False,
    check: torch.Tensor | None = None,
) -> MergeReport:
    """Merge `adapter` into the dequantised weights of its base and write the whole model, in float32, to `out`.

    Args:
        model: as in `load_quantized`, which is given `quantization` and `double_quant`: the base of the training.
        adapter: folder of the adapter.
        out: new or empty folder; appears whole or not at all.
        untie: if the adapter changes the head or the embedding of a model in which they are one matrix, make them
            two and write so into the configuration (`tie_word_embeddings`), else refuse.
        check: token ids [rows, tokens] on which the result is compared with the adapter on its base (default: 4 rows
            of 32 random tokens).

    Raises:
        ValueError: an adapter that does not fit (`load_adapter`); tied matrices that would come apart.
        MergeError: the folder, read back, gives other logits or another loss; nothing is left at `out`.
        OSError: `out` exists or cannot be written.
    """
    base, tokenizer = load_quantized(
        model, quantization=quantization, double_quant=double_quant, compute_dtype="float32"
    )
    with whole_folder(Path(out)) as folder:
        plain = dequantized_model(base)
        wrapped = load_adapter(base, adapter, trainable=False)
        names = adapted_modules(wrapped)
        rows = _check_rows(base) if check is None else check
        before = _outputs(wrapped, rows)
        tied = _is_tied(plain) and _changes_ends(plain, names)
        if tied and not untie:
            raise ValueError(
                f"{adapter} changes {', '.join(sorted(set(_ends(plain)) & set(names)))} of {type(plain).__name__}, "
                "whose head and embedding are one matrix: merged, one of the two changes would be lost; "
                "untie them (--untie)"
            )
        if tied:
            _untie(plain)
        del base, wrapped
        merged = merged_weights(plain, adapter)
        save_model(merged, tokenizer, folder)
        del merged, plain
        again, _ = load_quantized(folder, quantization=None, compute_dtype="float32")
        after = _outputs(again, rows)
        difference = _logit_difference(after[1], before[1])
        if not _same(difference, after[0] - before[0], before[0]):
            raise MergeError(
                f"{adapter}: merged into {model} and read back, the loss is {after[0]:.7g} where adapter and base give "
                f"{before[0]:.7g}, and logits differ by {difference:.1e} of the largest; nothing was written"
            )
    return MergeReport(len(names), tied, before[0], after[0], difference)


def merge_table(
    model: str | Path,
    adapter: str | Path,
    rows: torch.Tensor,
    *,
    quantization: str = "nf4",
    double_quant: bool = False,
) -> list[MergeRow]:
    """The four models that "the merged model" can mean, each saved, read back and evaluated on `rows` [n, tokens].

    a: adapter on the quantised base. b: merged into the dequantised base, float32. c: b quantised again. d: merged
    into the unquantised base. Only b is the function that was trained; c and d are other models.

    Raises:
        ValueError: as `merge_adapter`, and for an unquantised `quantization`.
    """
    if quantization is None:
        raise ValueError("merge table: quantization is None, expected 'nf4', 'fp4' or 'int8'")
    settings: dict[str, Any] = {"quantization": quantization, "double_quant": double_quant}
    base, _ = load_quantized(model, **settings, compute_dtype="float32")
    a = _outputs(load_adapter(base, adapter, trainable=False), rows)
    del base
    found = [("a", f"adapter on the {quantization} base", a)]
    with tempfile.TemporaryDirectory(prefix="lcsb-merge-") as place:
        folder = Path(place)
        merge_adapter(model, adapter, folder / "b", **settings)
        b, _ = load_quantized(folder / "b", quantization=None, compute_dtype="float32")
        found.append(("b", f"merged into the dequantised {quantization} base, float32", _outputs(b, rows)))
        del b
        c, tokenizer = quantize_folder(folder / "b", quantization, double_quant)
        save_model(c, tokenizer, folder / "c")
        c, _ = load_quantized(folder / "c", **settings, compute_dtype="float32")
        found.append(("c", f"b quantised to {quantization} again", _outputs(c, rows)))
        del c
        merge_adapter(model, adapter, folder / "d", quantization=None)
        d, _ = load_quantized(folder / "d", quantization=None, compute_dtype="float32")
        found.append(("d", "merged into the unquantised base, float32", _outputs(d, rows)))
    table = []
    for row, name, (loss, logits) in found:
        difference = _logit_difference(logits, a[1])
        gap = loss - a[0]
        table.append(MergeRow(row, name, loss, gap, difference, _same(difference, gap, a[0])))
    return table


def text_rows(
    model: str | Path,
    quantization: str | None,
    double_quant: bool,
    source: str,
    windows: int,
    tokens: int = 128,
) -> torch.Tensor:
    """The first `windows` held-out windows [windows, tokens] of a text corpus, tokenised for `model`."""
    _, tokenizer = load_quantized(model, quantization=quantization, double_quant=double_quant)
    held_out = load_corpus(source, tokenizer, tokens=tokens).held_out
    if not isinstance(held_out, torch.Tensor):
        raise ValueError(f"{source}: expected a text corpus, found a task of examples")
    return held_out[:windows]


def dequantized_model(model: Any) -> Any:
    """A float32 model of the same class on the CPU, whose weights are those that `model` stands for.

    Raises:
        RuntimeError: a weight of the class has no counterpart.
    """
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    with torch.device("meta"):
        plain = type(model)(config)
    plain = plain.to_empty(device="cpu").float()
    sources = dict(model.named_modules())
    with torch.no_grad():
        for name, module in plain.named_modules():
            source = sources[name]
            for kind, own in (("parameters", module._parameters), ("buffers", module._buffers)):
                for key, tensor in own.items():
                    if tensor is None:
                        continue
                    value = dequantized_weight(source) if key == "weight" else getattr(source, key)
                    if kind == "parameters" and type(module).__name__ == "Conv1D" and key == "weight":
                        # GPT-2's own layer holds the transpose of what a linear layer holds.
                        value = value if type(source).__name__ == "Conv1D" else value.T
                    if value.shape != tensor.shape:
                        raise RuntimeError(
                            f"{name}.{key}: shape {list(value.shape)}, expected {list(tensor.shape)}"
                        )
                    own[key] = (
                        nn.Parameter(value.detach().float().cpu().clone(), requires_grad=False)
                        if kind == "parameters"
                        else value.detach().cpu().clone()
                    )
    if _is_tied(model):
        plain.tie_weights()
    plain.generation_config = getattr(model, "generation_config", None)
    plain.name_or_path = getattr(model, "name_or_path", "")
    return plain.eval()


def merged_weights(plain: Any, adapter: str | Path) -> Any:
    """`plain` (unquantised) with the adapter merged into its weights.

    Raises:
        ValueError: the adapter does not fit; a merged weight is not finite.
    """
    wrapped = load_adapter(plain, adapter, trainable=False)
    return wrapped.merge_and_unload(safe_merge=True)


def _ends(model: Any) -> list[str]:
    """Names of the embedding and the head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is end for end in ends)]


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _changes_ends(model: Any, names: list[str]) -> bool:
    return not set(_ends(model)).isdisjoint(names)


def _untie(model: Any) -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False


def _check_rows(model: Any) -> torch.Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (4, 32), generator=generator)


@torch.no_grad()
def _outputs(model: Any, rows: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(mean loss per predicted token, logits [n, tokens, vocabulary] of the first rows), in evaluation mode."""
    model.eval()
    device = next(model.parameters()).device
    total, count = 0.0, 0
    kept: list[torch.Tensor] = []
    for row in rows.split(1):
        output = model(input_ids=row.to(device), labels=row.to(device))
        total += float(output.loss.double()) * (row.shape[1] - 1)
        count += row.shape[1] - 1
        if len(kept) < 4:  # a vocabulary of 262144 makes 1 MB of a token
            kept.append(output.logits.float().cpu())
    return total / count, torch.cat(kept)


def _logit_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _same(difference: float, gap: float, loss: float) -> bool:
    return (
        math.isfinite(gap) and difference <= LOGIT_TOLERANCE and abs(gap) <= LOSS_TOLERANCE * max(1.0, loss)
    )
