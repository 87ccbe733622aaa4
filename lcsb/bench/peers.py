"""The peers, each in a transformers Trainer on the pre-quantised checkpoint, driven step by step over the pipe.

QLoRA (all adapters), BAdam (badam's BlockOptimizer over adapters) and LISA (random layers): NF4 weights, float32
compute, recompute with use_reentrant=False, AdamW (torch's fused one), no clipping. They get what makes them fast and
small on a CPU: the input-gradient hook is off (Trainer switches it on when training begins, so it is taken off after
that), weights come from the checkpoint that is quantised already, batches are made outside of the time that counts, and
neither BAdam's switch of blocks nor LISA's draw of layers is counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lcsb.bench.channel import Channel, Stopwatch
from lcsb.measure.memory import AnonymousPeak, read_status

#: layers that LISA trains at a step (gamma of its paper, whose value is 2)
LISA_LAYERS = 2


def lisa_draws(layers: int, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """The layers of `count` successive draws, uniform without replacement."""
    generator = random.Random(seed)
    return [tuple(sorted(generator.sample(range(layers), min(LISA_LAYERS, layers)))) for _ in range(count)]


def serve(spec: Mapping[str, Any], channel: Channel) -> None:
    """Train until the benchmark goes. Spec as the engine's, with kind qlora, badam or lisa."""
    import torch

    torch.set_num_threads(int(spec["threads"]))
    with AnonymousPeak() if spec["sample"] else contextlib.nullcontext() as anonymous:
        import bitsandbytes  # noqa: F401 - so that the floor is that of all imports
        import peft  # noqa: F401
        import transformers

        transformers.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        floor = read_status("VmHWM")
        with tempfile.TemporaryDirectory() as scratch:
            trainer = _trainer(spec, channel, anonymous, floor, scratch)
            with contextlib.suppress(_Done):
                trainer.train()


def _model(spec: Mapping[str, Any]) -> Any:
    import bitsandbytes
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from bcd_theory.geometry import PROJECTIONS

    dtype = getattr(torch, spec["compute_dtype"])
    model = AutoModelForCausalLM.from_pretrained(spec["folder"], dtype=dtype, local_files_only=True)
    # The checkpoint says float32; the adapters stay float32 either way.
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.compute_dtype = dtype
    model.config.use_cache = False
    model.requires_grad_(False)
    lora = LoraConfig(
        r=spec["rank"],
        lora_alpha=2 * spec["rank"],
        lora_dropout=0.0,
        target_modules=list(PROJECTIONS),
        task_type="CAUSAL_LM",
    )
    # PEFT draws the adapters from torch's global generator.
    torch.manual_seed(0)
    model = get_peft_model(model, lora)
    _trim()
    return model


def _trim() -> None:
    """Give the pages that loading has freed back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _trainer(
    spec: Mapping[str, Any], channel: Channel, anonymous: AnonymousPeak | None, floor: int, scratch: str
) -> Any:
    from transformers import Trainer, TrainingArguments

    model = _model(spec)
    driver = _driver(spec, channel, anonymous, floor)
    arguments = TrainingArguments(
        output_dir=scratch,
        max_steps=10**6,
        per_device_train_batch_size=1,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=0.0,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in spec["windows"]]
    optimizers = (_badam(model, spec), None) if spec["kind"] == "badam" else (None, None)
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=_collate,
        callbacks=[driver],
        optimizers=optimizers,
    )


def _collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import torch

    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def _badam(model: Any, spec: Mapping[str, Any]) -> Any:
    """BAdam's optimiser over as many blocks as our arms have, from the lowest block upward."""
    import torch
    from badam import BlockOptimizer

    from bcd_theory.partition import contiguous_blocks

    with contextlib.redirect_stdout(None):
        return BlockOptimizer(
            base_optimizer=torch.optim.AdamW(
                [p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0, fused=True
            ),
            named_parameters_list=list(model.named_parameters()),
            block_prefix_list=[
                [f"layers.{layer}." for layer in block]
                for block in contiguous_blocks(_layer_count(model), spec["layers_per_step"])
            ],
            switch_block_every=10**9,  # the driver switches, outside of the time that counts
            switch_mode="ascending",
            verbose=0,
        )


def _layer_count(model: Any) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def _driver(spec: Mapping[str, Any], channel: Channel, anonymous: AnonymousPeak | None, floor: int) -> Any:
    """A callback that waits for requests before each step and answers after it."""
    from transformers import TrainerCallback

    from lcsb.layers import decoder_layers
    from lcsb.models import remove_input_gradient_hooks

    class Driver(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.taken = 0
            self.marks: dict[str, dict[str, float]] = {}
            self.loss: Any = None
            self.hooks: list[Any] = []
            self.watch = Stopwatch()

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            remove_input_gradient_hooks(model)
            self.layers = decoder_layers(model)
            self.draws = lisa_draws(len(self.layers), spec["cycle"])
            base = model.get_base_model()
            self.hooks = [
                self.layers[0].register_forward_pre_hook(self._enter),
                self.layers[-1].register_forward_hook(self._leave),
                base.register_forward_hook(self._see_loss),
            ]
            cycle = {"qlora": 1}.get(spec["kind"], spec["cycle"])
            channel.send({"ready": {"floor_bytes": floor, "cycle_length": cycle, "planned": None}})

        # Stamps, each taken once a step: recompute passes the layers' hooks again.
        def _mark(self, name: str) -> None:
            self.marks.setdefault(name, self.watch.read())

        def _enter(self, *_: Any) -> None:
            self._mark("layers begin")

        def _leave(self, module: Any, arguments: Any, output: Any) -> None:
            if "layers end" not in self.marks:
                self._mark("layers end")
                hidden = output[0] if isinstance(output, tuple) else output
                hidden.register_hook(lambda gradient: self._mark("layers backward"))

        def _see_loss(self, module: Any, arguments: Any, output: Any) -> None:
            self.loss = output.loss.detach()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            while (request := channel.receive()) is not None and request["do"] == "memory":
                channel.send(
                    {
                        "peak_bytes": read_status("VmHWM"),
                        "anonymous_bytes": anonymous.bytes if anonymous is not None else None,
                    }
                )
            if request is None or request["do"] == "stop":
                raise _Done
            if request["do"] != "step":
                raise ValueError(f"request: found {request['do']!r}, expected step, memory or stop")
            self._choose_layers(kwargs["optimizer"])
            self.marks.clear()
            self.watch = Stopwatch()

        def _choose_layers(self, optimizer: Any) -> None:
            if spec["kind"] == "badam" and self.taken:
                with contextlib.redirect_stdout(None):
                    getattr(optimizer, "optimizer", optimizer).switch_trainable_params(verbose=0)
            if spec["kind"] == "lisa":
                drawn = self.draws[self.taken % len(self.draws)]
                for index, layer in enumerate(self.layers):
                    for name, parameter in layer.named_parameters():
                        if "lora_" in name:
                            parameter.requires_grad_(index in drawn)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._mark("backward end")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            whole = self.watch.read()
            marks = self.marks
            layers = {
                key: marks["layers end"][key] - marks["layers begin"][key]
                + marks["backward end"][key] - marks["layers backward"][key]
                for key in ("cpu", "wall")
            }  # fmt: skip
            block = self.taken % spec["cycle"] if spec["kind"] != "qlora" else 0
            self.taken += 1
            channel.send(
                {
                    "step": whole,
                    "layers": layers,
                    "loss": float(self.loss),
                    "block": block,
                    "disk_bytes": None,
                }
            )

    return Driver()


class _Done(BaseException):
    """The benchmark has gone; leave `Trainer.train` from inside."""
