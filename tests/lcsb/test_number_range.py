"""Types of load and compute, large activations and padded rows: finite and near the float32 numbers, or refused."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lcsb.config import LCSBConfig
from lcsb.measure.fidelity import measure_fidelity
from lcsb.models import attach_lora, load_quantized
from lcsb.quantized import refuse_half
from lcsb.selective import selective_backward

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """{type the weights are saved in: folder}, Qwen2 with tied embeddings."""
    folders = {}
    for name, dtype in TYPES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        tiny.qwen2(dtype=dtype).save_pretrained(folders[name])
        tiny.tokenizer().save_pretrained(folders[name])
    return folders


def run(model, steps=3, config=None, t=0, learning_rate=1e-2):
    """(losses, gradient norms) of LCSB steps on one batch; everything after them is finite."""
    config = config or LCSBConfig("exact", layers_per_step=2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    losses, norms = [], []
    with selective_backward(model.train(), config, t=t) as lcsb:
        for _ in range(steps):
            lcsb.begin()
            loss = model(**tiny.batch(model)).loss
            losses.append(loss.item())
            loss.backward()
            norms.append(lcsb.step(optimizer).grad_norm)
    assert all(map(math.isfinite, losses + norms))
    assert all(bool(p.isfinite().all()) for p in model.parameters() if p.is_floating_point())
    for state in optimizer.state.values():
        assert bool(state["exp_avg"].isfinite().all()) and state["exp_avg"].dtype == torch.float32
    return losses, norms


@pytest.mark.parametrize(
    "saved, quantization",
    [
        ("float32", "nf4"),
        ("float16", None),
        *(
            pytest.param(saved, kind, marks=pytest.mark.slow)
            for saved, kind in (
                ("bfloat16", "nf4"), ("float16", "nf4"), ("float32", None), ("bfloat16", None), ("float32", "int8"),
            )
        ),
    ],
)  # fmt: skip
def test_type_saved_by_type_of_compute(sources, saved, quantization):
    """U20, U29: every cell trains to finite numbers near the float32 cell's, or is refused with a reason."""
    losses = {}
    for compute in ("auto", "float32", "bfloat16"):
        base, _ = load_quantized(sources[saved], quantization=quantization, compute_dtype=compute)
        model = attach_lora(base, r=4)
        losses[compute], _ = run(model, steps=5)
        assert losses[compute][-1] < losses[compute][0]
    assert losses["auto"] == losses["float32"]
    for low, full in zip(losses["bfloat16"], losses["float32"], strict=True):
        assert low != full and abs(low - full) < 0.02 * full
    with pytest.raises(ValueError, match="compute_dtype='float16' overflows in the backward pass"):
        load_quantized(sources[saved], quantization=quantization, compute_dtype="float16")


@pytest.mark.parametrize("loaded", [*TYPES, "auto"])
@pytest.mark.parametrize("compute", TYPES)
def test_models_loaded_by_transformers_itself(sources, loaded, compute):
    """U20, U29: the cells that the user can make without our loader; float16 anywhere is refused on the CPU."""
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=TYPES[compute]
    )
    base = AutoModelForCausalLM.from_pretrained(
        sources["bfloat16"], dtype=TYPES.get(loaded, "auto"), quantization_config=config
    )
    model = tiny.with_lora(base)
    if "float16" in (loaded, compute):
        with pytest.raises(
            ValueError, match=r"computes in float16 on the CPU, where nothing scales"
        ) as error:
            selective_backward(model, LCSBConfig())
        assert "\n" not in str(error.value)
    else:
        run(model)


def test_unquantised_float16_is_refused():
    """U29, also for adapters in float16 on a float32 base."""
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight computes in float16"):
        refuse_half(tiny.llama(dtype=torch.float16))
    model = tiny.with_lora(tiny.llama())
    refuse_half(model)
    name, parameter = next((n, p) for n, p in model.named_parameters() if "lora_A" in n)
    parameter.data = parameter.data.half()
    with pytest.raises(ValueError, match=f"{name} computes in float16"):
        selective_backward(model, LCSBConfig())


def test_few_and_many_tokens_take_one_function(sources):
    """U18: 1 and 64 tokens, evaluation and training: the same numbers as the dequantised matrices give."""
    from lcsb.merge import dequantized_model

    model, _ = load_quantized(sources["float32"])
    plain = dequantized_model(model)
    ids = tiny.batch(model, rows=1, tokens=64)["input_ids"]
    for tokens in (1, 2, 64):
        expected = plain(input_ids=ids[:, :tokens]).logits
        for training in (False, True):
            model.train(training)
            with torch.set_grad_enabled(training):
                found = model(input_ids=ids[:, :tokens]).logits
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "backward", ["identity", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("exact", "mlp"))]
)
def test_large_query_and_key_biases(backward):
    """U23: scores in the hundreds, bfloat16 eager and fused within 1 % of float32, gradients finite."""
    losses = {}
    for dtype, attention in (
        ("float32", "eager"),
        ("bfloat16", "eager"),
        ("bfloat16", "sdpa"),
        ("float32", "sdpa"),
    ):
        model = tiny.qwen2(attn_implementation=attention)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.bias.mul_(200)
                layer.self_attn.k_proj.bias.mul_(200)
        model = tiny.with_lora(model.to(TYPES[dtype]), random_b=False)
        losses[dtype, attention] = run(model, 2, LCSBConfig(backward, layers_per_step=1))[0][0]
    for value in losses.values():
        assert value == pytest.approx(losses["float32", "eager"], rel=0.01)


@pytest.mark.parametrize(
    "family, attention",
    [("qwen2", "eager"), ("qwen2", "sdpa"), ("gemma2", "eager"), ("gemma3", "eager"), ("gemma3", "sdpa")],
)
def test_rows_padded_on_the_left(family, attention):
    """U23: a row of 3 tokens beside one of 40: nothing is NaN, and loss and gradients are those of the rows alone."""
    # Not in float64: transformers' eager softmax is in float32, where a float64 mask's smallest number is -inf and a
    # row that is all padding becomes NaN.
    model = tiny.with_lora(tiny.BUILDERS[family](attn_implementation=attention))
    rows = [tiny.batch(model, rows=1, tokens=n, seed=n)["input_ids"][0] for n in (3, 40)]
    ids = torch.zeros(2, 40, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, tokens in enumerate(rows):
        ids[row, -len(tokens) :], mask[row, -len(tokens) :] = tokens, 1
        labels[row, 1 - len(tokens) :] = tokens[1:]  # before the first token there is padding alone
    for backward in ("exact", "identity", "mlp"):
        config = LCSBConfig(backward, layers_per_step=2)

        def gradients(batch, config=config):
            with selective_backward(model, config) as lcsb:
                lcsb.begin()
                loss = model(**batch).loss
                loss.backward()
                found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                model.zero_grad(set_to_none=True)
            return loss.item(), found

        loss, found = gradients({"input_ids": ids, "attention_mask": mask, "labels": labels})
        alone = [gradients({"input_ids": r[None], "labels": r[None]}) for r in rows]
        shares = [(len(r) - 1) / sum(len(r) - 1 for r in rows) for r in rows]
        assert loss == pytest.approx(sum(s * v for s, (v, _) in zip(shares, alone, strict=True)), rel=1e-5)
        for name, gradient in found.items():
            expected = sum(s * g[name] for s, (_, g) in zip(shares, alone, strict=True))
            assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "backward", ["identity", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("exact", "mlp"))]
)
def test_large_embeddings_in_bfloat16(backward):
    """U24: TINY-G with embeddings times 16, the bottom layer alone selected, so the signal crosses every layer."""
    norms = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny.gemma3()
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(16)
        model = tiny.with_lora(model.to(dtype))
        config = LCSBConfig(backward, layers_per_step=1)
        norms[dtype] = [run(model, 1, config, t=layer, learning_rate=0.0)[1][0] for layer in range(6)]
        model = tiny.with_lora(tiny.gemma3(seed=1).to(dtype))
        run(model, 3, config)
    for low, full in zip(norms[torch.bfloat16], norms[torch.float32], strict=True):
        assert low == pytest.approx(full, rel=0.25)
    half = tiny.gemma3(dtype=torch.float16)
    with pytest.raises(ValueError, match="computes in float16 on the CPU"):
        selective_backward(tiny.with_lora(half), LCSBConfig(backward))


def test_gradient_norms_by_depth():
    """U27: the table that a run measures (true norms, and each mode's ratio by depth) is what training will meet."""
    model = tiny.with_lora(tiny.gemma3(dtype=torch.float64))
    batch = tiny.batch(model)
    measured = measure_fidelity(model, batch, 1)
    rho = {(row.mode, row.layout): row.norm_ratio for row in measured.rows}
    for backward in ("exact", "identity", "mlp"):
        for layer in range(6):
            with selective_backward(model, LCSBConfig(backward, layers_per_step=1), t=layer) as lcsb:
                assert lcsb.begin() == (layer,)
                model(**batch).loss.backward()
                norm = float(lcsb.gradient_norm())
                model.zero_grad(set_to_none=True)
            ratio = 1.0 if backward == "exact" else rho[backward, "cyclic"][layer]
            assert norm == pytest.approx(ratio * measured.gradient_norm[layer], rel=1e-9)
    assert max(measured.gradient_norm) > 1.2 * min(measured.gradient_norm)  # not equal by layer
    assert any(abs(value - 1) > 0.1 for value in rho["identity", "cyclic"])
