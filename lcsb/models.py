"""Load a causal language model in 4-bit, 8-bit or plain, and attach LoRA adapters to its decoder layers."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lcsb.cache import cached_folder, file_sha256, folder_sha256
from lcsb.gguf_files import BUILTIN_MODELS, builtin_gguf, copy_licence_note, read_gguf
from lcsb.layers import named_decoder_layers
from lcsb.quantized import (
    check_shapes,
    dequantized_weight,
    make_trainable_safe,
    own_memory,
    parameter_bytes,
    set_compute_dtype,
)

QUANTIZATIONS = ("nf4", "fp4", "int8", None)
_COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CACHE_FORMAT = "1"


def load_quantized(
    model: str | Path,
    *,
    quantization: str | None = "nf4",
    double_quant: bool = False,
    compute_dtype: str = "auto",
    revision: str | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Load a language model and its tokenizer, the projections quantised, ready for training on this machine.

    Args:
        model: hub id, folder, path of a .gguf file, or built-in name ("smollm2-135m", "gemma3-270m").
        quantization: "nf4", "fp4" (bitsandbytes, quantisation blocks of 64 numbers), "int8" (one scale a row) or
            None. Embeddings, head and norms stay unquantised, and tied as they were.
        double_quant: quantise the 4-bit scales too (0.13 instead of 0.5 bits a weight).
        compute_dtype: "float32", "bfloat16" or "auto": float32 on the CPU always, bfloat16 on CUDA where the device
            has it, else float32. Auto is float32 also on CPUs whose bfloat16 products are faster: a run must not
            change its numbers with the machine. float16 is refused: without loss scaling its range (65504) is not
            enough for the backward pass.
        revision, local_files_only, trust_remote_code: for hub ids, as in transformers; remote code is never run
            unless asked for, and a model that needs it is quantised anew at each load.

    Returns:
        (model in evaluation mode, tokenizer). On the first CUDA device where there is one, else on the CPU. Weights
        own their memory: no file stays mapped. `make_trainable_safe` has been applied.

    A conversion happens once, on the CPU from float32, into a folder of the user's cache (`LCSB_CACHE`, else
    `XDG_CACHE_HOME`/lcsb, else ~/.cache/lcsb) named by the content of the source, the settings and the versions of
    the libraries; later loads read that folder, after checking its files by sha256.

    Raises:
        ValueError: unknown setting; a source that is not there, not complete, or already quantised in another way.
        ModuleNotFoundError: a built-in model's package is absent (the message holds the install line).
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"quantization={quantization!r}, expected one of {', '.join(map(repr, QUANTIZATIONS))}"
        )
    if double_quant and quantization not in ("nf4", "fp4"):
        raise ValueError(f"double_quant=True with quantization={quantization!r}, expected 'nf4' or 'fp4'")
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    dtype = _resolve_dtype(compute_dtype, device)
    name = str(model)
    settings = {"quantization": str(quantization), "double_quant": str(double_quant)}
    if name in BUILTIN_MODELS:
        folder = _converted_builtin(name, quantization, settings)
    elif name.endswith(".gguf"):
        folder = _converted_gguf(Path(name), quantization, settings)
    else:
        source = _local_folder(name, revision, local_files_only, trust_remote_code)
        _check_files(source)
        held = _held_quantization(source)
        if held is not None and held != (quantization, double_quant):
            raise ValueError(
                f"{name} is already quantised ({held[0]}, double_quant={held[1]}), "
                f"expected {quantization}, double_quant={double_quant}"
            )
        if quantization is None or held is not None or trust_remote_code:
            pending = quantization if held is None else None
            loaded = _read_folder(source, dtype, device, pending, double_quant, trust_remote_code)
            return _finished(*loaded, dtype, name)
        folder = _converted_folder(source, quantization, settings)
    return _finished(*_read_folder(folder, dtype, device), dtype, name)


def attach_lora(
    model: Any,
    r: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    use_rslora: bool = False,
    use_dora: bool = False,
    seed: int = 0,
) -> Any:
    """Wrap `model` with PEFT LoRA: y = W x + s B A x, A [r, in] random, B [out, r] zero, s = alpha/r or alpha/sqrt(r).

    Args:
        target_modules: "all-linear": every linear projection inside the decoder layers and nothing else (no head, no
            embedding, no vision stack); or names or a regular expression as PEFT takes them.
        use_rslora: s = alpha/sqrt(r).
        use_dora: DoRA, y = m (W + s B A) x / |W + s B A|, norms row by row and m trained too.
        seed: the adapters' start is a function of the seed alone; the global random state is left as it was.

    Returns:
        PeftModel in the mode (training, evaluation) of `model`. Adapters are float32 (float64 on a float64 model) and
        require grad, the base is frozen, and no hook makes the embedding's output require grad.

    Raises:
        ValueError: no target found, or a rank or dropout out of range.
    """
    from peft import LoraConfig, get_peft_model

    if r < 1:
        raise ValueError(f"r={r}, expected a rank of at least 1")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout}, expected 0 <= dropout < 1")
    wanted = _projections(model) if target_modules == "all-linear" else None
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=wanted
        or (target_modules if isinstance(target_modules, str) else list(target_modules)),
        use_rslora=use_rslora,
        use_dora=use_dora,
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        # Adapters are drawn on the CPU, whatever the device of the base: only the CPU generator is seeded.
        torch.default_generator.manual_seed(seed)
        wrapped = get_peft_model(model, config)
    # New modules start in training mode, a loaded base in evaluation: one mode for both, the base's.
    wrapped.train(model.training)
    remove_input_gradient_hooks(wrapped)
    if wanted is not None:
        prefix = "base_model.model."
        got = {n.removeprefix(prefix) for n, m in wrapped.named_modules() if hasattr(m, "lora_A")}
        if got != set(wanted):
            odd = sorted(got.symmetric_difference(wanted))
            raise ValueError(
                f"LoRA covers other modules than the decoder layers' projections: {', '.join(odd[:4])}"
            )
    return wrapped


def run_header(model: nn.Module) -> dict[str, Any]:
    """What a run holds: class, weight bytes by kind, trainable parameters, types of compute and of the adapters.

    `targets_near_zero` counts the adapted matrices without an element above 1e-6: an adapter there changes a part of
    the model that was switched off. Optimiser moments have the adapters' type; the loss is computed in float32.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    trainable = [p for p in model.parameters() if p.requires_grad]
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    return {
        "model_class": type(base).__name__,
        "parameter_bytes": parameter_bytes(model),
        "compute_dtype": str(base.dtype).removeprefix("torch."),
        "trainable_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in trainable}),
        "targets_near_zero": sum(
            float(dequantized_weight(module.base_layer).abs().max()) < 1e-6
            for module in base.modules()
            if hasattr(module, "lora_A") and hasattr(module.base_layer, "weight")
        ),
        "trainable_parameters": sum(p.numel() for p in trainable),
        "tied_embeddings": head is not None and head.weight is embedding.weight,
        "device": str(next(model.parameters()).device.type),
    }


def _resolve_dtype(compute_dtype: str, device: torch.device) -> torch.dtype:
    if compute_dtype == "auto":
        half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if half else torch.float32
    if compute_dtype == "float16":
        raise ValueError(
            "compute_dtype='float16' overflows in the backward pass without loss scaling, "
            "expected 'auto', 'float32' or 'bfloat16'"
        )
    if compute_dtype not in _COMPUTE_DTYPES:
        raise ValueError(f"compute_dtype={compute_dtype!r}, expected 'auto', 'float32' or 'bfloat16'")
    return _COMPUTE_DTYPES[compute_dtype]


def _converted_builtin(name: str, quantization: str | None, settings: dict[str, str]) -> Path:
    def build(folder: Path) -> None:
        with builtin_gguf(name) as path:
            _write_from_gguf(path, folder, quantization, settings)
        copy_licence_note(name, folder)

    # The file's hash is known, so a later load needs neither the package nor a pass over the file.
    key = _key("gguf", BUILTIN_MODELS[name].sha256, settings)
    return cached_folder(f"{name}-{quantization or 'float32'}", key, build)


def packed_builtin(name: str) -> Path:
    """The cache's folder with the NF4 weights of a built-in model, converted if it is not there."""
    return _converted_builtin(name, "nf4", {"quantization": "nf4", "double_quant": "False"})


def _converted_gguf(path: Path, quantization: str | None, settings: dict[str, str]) -> Path:
    if not path.is_file():
        raise ValueError(f"no file {path}")
    return cached_folder(
        f"{path.stem}-{quantization or 'float32'}",
        _key("gguf", file_sha256(path), settings),
        lambda folder: _write_from_gguf(path, folder, quantization, settings),
    )


def _converted_folder(source: Path, quantization: str | None, settings: dict[str, str]) -> Path:
    def build(folder: Path) -> None:
        double = settings["double_quant"] == "True"
        read = _read_folder(source, torch.float32, torch.device("cpu"), quantization, double)
        save_model(*read, folder)

    # A hub snapshot is a folder named by its commit; the content is hashed all the same, one rule for both.
    return cached_folder(
        f"{source.name}-{quantization}", _key("folder", folder_sha256(source), settings), build
    )


def _key(kind: str, content: str, settings: dict[str, str]) -> dict[str, str]:
    packages = ["transformers", "bitsandbytes"] + (["gguf"] if kind == "gguf" else [])
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {"format": _CACHE_FORMAT, "kind": kind, "content": content, **settings, **versions}


def _write_from_gguf(path: Path, folder: Path, quantization: str | None, settings: dict[str, str]) -> None:
    model, tokenizer = read_gguf(path)
    if quantization is not None:
        # Quantised from the weights in memory: no float32 file is written in between.
        config, generation = model.config, model.generation_config
        quantised = type(model).from_pretrained(
            None,
            config=config,
            state_dict=model.state_dict(),
            quantization_config=_quantization_config(quantization, settings["double_quant"] == "True"),
            dtype=torch.float32,
            device_map={"": "cpu"},
        )
        quantised.generation_config = generation
        model = quantised
    save_model(model, tokenizer, folder)


def quantize_folder(source: Path, quantization: str, double_quant: bool = False) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder with plain weights, quantised on the CPU; the cache knows nothing of it."""
    read = _read_folder(source, torch.float32, torch.device("cpu"), quantization, double_quant)
    return _finished(*read, torch.float32, str(source))


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer in transformers' format."""
    # A name or path of the machine that converted has no place in a cached folder.
    model.config._name_or_path = ""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _quantization_config(quantization: str, double_quant: bool) -> Any:
    from transformers import BitsAndBytesConfig

    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.float32,
    )


def _read_folder(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    double_quant: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    extra = {}
    if quantization is not None:
        extra["quantization_config"] = _quantization_config(quantization, double_quant)
    with _one_line_errors(folder, "the model"):
        model, info = _auto_class(folder, trust_remote_code).from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": device},
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            **extra,
        )
    # Tensors without a place are harmless in a plain model (a part that is not used); in a quantised one they are
    # scales, and the numbers would be read under other scales.
    wrong = ["missing_keys", "mismatched_keys"] + (
        ["unexpected_keys"] if getattr(model, "is_quantized", False) else []
    )
    for kind in wrong:
        if info[kind]:
            names = ", ".join(sorted(map(str, info[kind]))[:4])
            raise ValueError(
                f"{folder}: {len(info[kind])} {kind.replace('_', ' ')} for {type(model).__name__}: {names}"
            )
    check_shapes(model)
    with _one_line_errors(folder, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    return model, tokenizer


def _check_files(folder: Path) -> None:
    """Open each file that the libraries would report without its name."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: cannot be read as safetensors ({error})") from None
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: cannot be read as JSON ({error})") from None


@contextlib.contextmanager
def _one_line_errors(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, RuntimeError) and "mismatch" not in text:
            raise
        reason = text if len(text) <= 300 else f"{text[:297]}..."
        raise ValueError(f"{folder}: {what} cannot be loaded ({type(error).__name__}: {reason})") from error


def _auto_class(folder: Path, trust_remote_code: bool) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code
    )
    if trust_remote_code or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    raise ValueError(f"{folder} holds a {config.model_type!r} model, expected a decoder-only language model")


def _finished(model: Any, tokenizer: Any, dtype: torch.dtype, name: str) -> tuple[Any, Any]:
    own_memory(model)
    make_trainable_safe(model)
    set_compute_dtype(model, dtype)
    # What the load did to the names of a quantised file cannot be undone by transformers' save, which then fails; a
    # quantised model saves under its own names.
    if getattr(model, "is_quantized", False):
        model._weight_conversions = []
    # Adapters saved later name this as their base: what the user asked for, not a cache folder.
    model.name_or_path = model.config._name_or_path = name
    return model.eval(), tokenizer


def _local_folder(name: str, revision: str | None, local_files_only: bool, trust_remote_code: bool) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            kind = "an adapter's" if (path / "adapter_config.json").is_file() else "no model's"
            raise ValueError(
                f"{path} is {kind} folder, expected one with config.json and .safetensors weights"
            )
        return path
    near = difflib.get_close_matches(name, BUILTIN_MODELS, n=1, cutoff=0.6)
    hint = f"; nearest built-in name is {near[0]!r}" if near else ""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ValueError(f"{name!r} is neither a folder, a .gguf file, a hub id nor a built-in name{hint}")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"] + (
        ["*.py"] if trust_remote_code else []
    )
    try:
        snapshot = snapshot_download(
            name,
            revision=revision,
            local_files_only=local_files_only,
            allow_patterns=patterns,
            ignore_patterns=["original/*", "consolidated*"],
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{name!r} is no folder or built-in name, and the hub gave nothing: {reason}{hint}"
        ) from error
    return Path(snapshot)


def _held_quantization(folder: Path) -> tuple[str, bool] | None:
    """(quantization, double_quant) of a folder saved quantised by bitsandbytes; None where it is not quantised."""
    held = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    if held is None:
        return None
    if held.get("quant_method") != "bitsandbytes":
        raise ValueError(
            f"{folder} is quantised by {held.get('quant_method')!r}, expected an unquantised or bitsandbytes model"
        )
    if held.get("load_in_8bit"):
        return "int8", False
    return held["bnb_4bit_quant_type"], bool(held["bnb_4bit_use_double_quant"])


def _projections(model: Any) -> list[str]:
    """Names of all linear projections (nn.Linear, quantised ones, GPT-2's Conv1D) inside the decoder layers."""
    from transformers.pytorch_utils import Conv1D

    names = [
        f"{layer_name}.{name}"
        for layer_name, layer in named_decoder_layers(model)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    ]
    if not names:
        raise ValueError(f"found no linear projection in the decoder layers of {type(model).__name__}")
    return names


def remove_input_gradient_hooks(model: nn.Module) -> None:
    """Remove the hooks that make the embedding's output require grad."""
    # transformers and PEFT install one (under this name) when recompute is on, and transformers' own removal knows
    # the last set of handles only. With it every backward pass runs to the bottom.
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "").startswith("make_inputs_require_grad"):
                del module._forward_hooks[key]
