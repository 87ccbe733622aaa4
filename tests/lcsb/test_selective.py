"""Backward modes against plain autograd in float64, what they leave behind, and the step."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import pytest
import reference
import tiny
import torch
from passes import FAMILIES, build, engine_gradients, largest_difference
from torch import nn

from lcsb.config import LCSBConfig
from lcsb.roles import plan_roles
from lcsb.selective import NonFiniteError, selective_backward

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("backward", ["exact", "identity", "mlp"])
def test_surrogates_differ_from_the_truth_and_exact_does_not(backward):
    model = build()
    batch = tiny.batch(model)
    found, _, selected = engine_gradients(model, batch, LCSBConfig(backward, layers_per_step=2))
    truth, _ = reference.gradients(model, batch, "full", selected)
    difference = largest_difference(found, truth)
    assert difference < 1e-10 if backward == "exact" else difference > 1e-3


@pytest.mark.parametrize("backward", ["exact", "identity", "mlp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_selected_is_full_bit_for_bit(family, backward):
    model = build(family, dtype=torch.float32)
    batch = tiny.batch(model)
    full, _ = reference.gradients(model, batch)
    found, _, _ = engine_gradients(model, batch, LCSBConfig(backward, layers_per_step=None))
    assert found.keys() == full.keys()
    assert all(torch.equal(found[name], full[name]) for name in full)


def test_trajectory_with_all_layers_selected_equals_a_plain_loop_bit_for_bit():
    plain = build(dtype=torch.float32)
    ours = copy.deepcopy(plain)
    first = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    second = torch.optim.AdamW([p for p in ours.parameters() if p.requires_grad], lr=1e-2)
    with selective_backward(ours, LCSBConfig("exact")) as lcsb:
        for step in range(4):
            batch = tiny.batch(plain, seed=step)
            plain(**batch).loss.backward()
            first.step()
            first.zero_grad()
            lcsb.begin()
            ours(**batch).loss.backward()
            lcsb.step(second)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


class _Chain(nn.Module):
    """h[l+1] = h[l] + (W[l] + B[l] A[l]) tanh(h[l]), the model of the golden identity gradients."""

    class Layer(nn.Module):
        def __init__(self, w, a, b):
            super().__init__()
            self.register_buffer("w", w)
            self.a, self.b = nn.Parameter(a), nn.Parameter(b)

        def forward(self, hidden):
            return hidden + (self.w + self.b @ self.a) @ torch.tanh(hidden)

    def __init__(self, case):
        super().__init__()
        matrices = ([torch.tensor(m, dtype=torch.float64) for m in case[key]] for key in ("W", "A", "B"))
        self.chain = nn.ModuleList(self.Layer(*parts) for parts in zip(*matrices, strict=True))

    def forward(self, x):
        for layer in self.chain:
            x = layer(x)
        return x


@pytest.mark.parametrize("case", json.loads((GOLDEN / "identity_gradients.json").read_text()))
@pytest.mark.parametrize("backward", ["exact", "identity"])
def test_golden_identity_gradients(case, backward):
    model = _Chain(case)
    x, y = (torch.tensor(case[key], dtype=torch.float64) for key in ("x", "y"))
    with selective_backward(model, LCSBConfig(backward, layers=tuple(model.chain))) as lcsb:
        lcsb.begin()
        # The golden selection {0, 2} is no block of a cycle: set the step's selection and plan by hand.
        lcsb.selected = tuple(case["selected"])
        lcsb.roles = plan_roles(backward, lcsb.selected, len(model.chain))
        loss = (model(x) - y).square().sum() / 2
        loss.backward()
    assert float(loss.detach()) == pytest.approx(case["loss"], rel=1e-12)
    for index, layer in enumerate(model.chain):
        if index not in case["selected"]:
            assert layer.a.grad is None and layer.b.grad is None
            continue
        expected = case[backward][str(index)]
        for found, key in ((layer.a.grad, "dA"), (layer.b.grad, "dB")):
            assert (found - torch.tensor(expected[key], dtype=torch.float64)).abs().max() < 1e-10


# -- what surrounds the passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", ["identity", "mlp"])
def test_double_backward_raises(backward):
    """U16: a second derivative through a branch that is not the gradient of a loss is refused, never wrong."""
    model = build()
    with selective_backward(model, LCSBConfig(backward, layers_per_step=1)) as lcsb:
        lcsb.begin()
        loss = model(**tiny.batch(model)).loss
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(loss, list(lcsb.trained_parameters().values()), create_graph=True)


def test_first_derivatives_of_the_paths():
    """U16: gradient check in float64: identity path one to one, and its value bit for bit."""
    from lcsb.branches import IdentityPath, OnceDifferentiable

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden, output = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    hidden.requires_grad_(True)
    path = IdentityPath.apply(hidden, output)
    assert torch.equal(path, output)
    (jacobian,) = torch.autograd.functional.jacobian(lambda h: (IdentityPath.apply(h, output),), hidden)
    assert torch.equal(jacobian.reshape(60, 60), torch.eye(60, dtype=torch.float64))
    assert torch.autograd.gradcheck(OnceDifferentiable.apply, (hidden,))


def test_double_backward_is_right_in_exact_mode():
    """U16: modes exact and full may be differentiated twice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = build()
    batch = tiny.batch(model, rows=1, tokens=6)
    products = []
    for engine in (True, False):
        context = selective_backward(model, LCSBConfig("exact", layers_per_step=1)) if engine else None
        with context or contextlib.nullcontext(), sdpa_kernel(SDPBackend.MATH):
            if context is not None:
                context.begin()
            parameters = [p for n, p in model.named_parameters() if ".0." in n and p.requires_grad]
            loss = model(**batch).loss
            first = torch.autograd.grad(loss, parameters, create_graph=True)
            square = sum(value.square().sum() for value in first)
            products.append(torch.autograd.grad(square, parameters))
    for a, b in zip(*products, strict=True):
        assert (a - b).abs().max() <= 1e-10 * b.abs().max()


def snapshot(model):
    return (
        {n: p.requires_grad for n, p in model.named_parameters()},
        [dict(m.__dict__).keys() for m in model.modules()],
        [getattr(m, "gradient_checkpointing", None) for m in model.modules()],
        model.config.use_cache,
    )


@pytest.mark.parametrize("fail", [False, True])
def test_model_is_left_as_it_was_found(fail):
    model = build(dtype=torch.float32)
    model.config.use_cache = True
    model.activation_checkpointing_enable({"use_reentrant": False})
    before = snapshot(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with (
        contextlib.suppress(KeyboardInterrupt),
        selective_backward(model, LCSBConfig("mlp", layers_per_step=1)) as lcsb,
    ):
        lcsb.begin()
        model(**tiny.batch(model)).loss.backward()
        assert model.config.use_cache is False
        if fail:
            raise KeyboardInterrupt
        lcsb.step(optimizer)
    model.zero_grad()
    assert snapshot(model) == before
    copy.deepcopy(model)
    found, _ = reference.gradients(model, tiny.batch(model))
    assert all(torch.isfinite(value).all() for value in found.values())


def test_adapters_stay_trainable_between_passes():
    model = build()
    with selective_backward(model, LCSBConfig("exact", layers_per_step=1), t=0) as lcsb:
        lcsb.begin()
        loss = model(**tiny.batch(model)).loss
        assert all(p.requires_grad for p in lcsb.parameters().values())
        loss.backward()


def test_forward_without_begin_is_refused_and_evaluation_is_not():
    model = build()
    batch = tiny.batch(model)
    with torch.no_grad():
        expected = model(**batch).loss
    with selective_backward(model, LCSBConfig("identity", layers_per_step=1)):
        with pytest.raises(RuntimeError, match="begin"):
            model(**batch)
        with torch.no_grad():
            assert torch.equal(model(**batch).loss, expected)


def test_nested_contexts_are_refused():
    model = build()
    with (
        selective_backward(model, LCSBConfig()),
        pytest.raises(RuntimeError, match="already inside"),
        selective_backward(model, LCSBConfig()),
    ):
        pass


def test_no_adapters_is_refused():
    with pytest.raises(ValueError, match="attach LoRA"):
        selective_backward(tiny.llama().requires_grad_(False), LCSBConfig())


@pytest.mark.parametrize("backward", ["exact", "identity", "mlp"])
@pytest.mark.parametrize("variant", ["use_rslora", "use_dora"])
def test_rslora_and_dora(variant, backward):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, **{variant: True})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = get_peft_model(tiny.llama(dtype=torch.float64), config)
    batch = tiny.batch(model)
    found, _, selected = engine_gradients(model, batch, LCSBConfig(backward, layers_per_step=2))
    truth, _ = reference.gradients(model, batch, backward, selected)
    if variant == "use_dora":
        assert any("magnitude" in name for name in found)
    assert largest_difference(found, truth) < 1e-10


def test_other_adapters_are_refused_by_name():
    from peft import IA3Config, get_peft_model

    model = get_peft_model(
        tiny.llama(), IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    )
    with pytest.raises(ValueError, match="IA3, expected LORA"):
        selective_backward(model, LCSBConfig())


def test_layers_without_adapters_leave_the_cycle():
    from peft import LoraConfig, get_peft_model

    base = tiny.llama(dtype=torch.float64)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0, 2, 3]))
    with selective_backward(model, LCSBConfig("identity", layers_per_step=1)) as lcsb:
        seen = []
        for _ in range(3):
            seen.append(lcsb.begin())
            lcsb.advance()
    assert seen == [(0,), (2,), (3,)]


# -- the step ----------------------------------------------------------------------------------------------------


def run_steps(model, config, steps, max_norm=None, lr=1e-2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    records = []
    with selective_backward(model, config) as lcsb:
        for step in range(steps):
            lcsb.begin()
            model(**tiny.batch(model, seed=step)).loss.backward()
            records.append(lcsb.step(optimizer, max_norm=max_norm))
    return records, optimizer


@pytest.mark.parametrize("idle", ["momentum", "frozen"])
def test_idle_layers_move_only_under_momentum(idle):
    model = build()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    with selective_backward(model, LCSBConfig("exact", idle, layers_per_step=1)) as lcsb:
        for step in range(2):
            lcsb.begin()
            model(**tiny.batch(model, seed=step)).loss.backward()
            before = {n: p.detach().clone() for n, p in lcsb.adapters[0].items()}
            lcsb.step(optimizer)
        moved = {n: float((p.detach() - before[n]).abs().max()) for n, p in lcsb.adapters[0].items()}
    b = [value for name, value in moved.items() if "lora_B" in name]
    if idle == "frozen":
        assert max(moved.values()) == 0.0
    else:
        assert all(value == pytest.approx(0.670 * 1e-2, rel=2e-3) for value in b)


def test_every_layer_is_trained_within_a_cycle_and_selection_size_matters():
    paths = []
    for k in (1, 2):
        model = build()
        start = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_B" in n}
        records, _ = run_steps(model, LCSBConfig("exact", layers_per_step=k), 4 // k + 1)
        assert [r.selected for r in records[: 4 // k]] == [tuple(range(i, i + k)) for i in range(0, 4, k)]
        assert all(not torch.equal(p, start[n]) for n, p in model.named_parameters() if n in start)
        paths.append([p.detach().clone() for n, p in model.named_parameters() if n in start])
    assert any(not torch.equal(a, b) for a, b in zip(*paths, strict=True))


def test_clipping_and_norm_use_the_selected_layers_after_accumulation():
    model = build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    batches = [tiny.batch(model, seed=s) for s in (1, 2)]
    with selective_backward(model, LCSBConfig("exact", "frozen", layers_per_step=1), t=2) as lcsb:
        lcsb.begin()
        for batch in batches:
            (model(**batch).loss / 2).backward()
        group = lcsb.adapters[2]
        gradient = torch.cat([p.grad.flatten() for p in group.values()]).clone()
        before = torch.cat([p.detach().flatten() for p in group.values()]).clone()
        record = lcsb.step(optimizer, max_norm=1e-3)
        after = torch.cat([p.detach().flatten() for p in group.values()])
    assert record.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-12)
    assert torch.allclose(
        before - after, gradient * (1e-3 / (gradient.norm() + 1e-6)), rtol=1e-10, atol=1e-14
    )


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_step_that_is_not_finite_changes_nothing(on_nonfinite):
    model = build(dtype=torch.float32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    config = LCSBConfig("exact", layers_per_step=1, on_nonfinite=on_nonfinite)
    with selective_backward(model, config) as lcsb:
        for step in range(3):
            lcsb.begin()
            model(**tiny.batch(model, seed=step)).loss.backward()
            lcsb.step(optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        weights = [p.detach().clone() for p in model.parameters()]
        lcsb.begin()
        (model(**tiny.batch(model)).loss * 1e38 * 1e38).backward()
        if on_nonfinite == "stop":
            with pytest.raises(NonFiniteError, match=r"step 3, batch b7.*lora_"):
                lcsb.step(optimizer, batch="b7")
        else:
            record = lcsb.step(optimizer)
            assert not record.taken and record.t == 3
        assert lcsb.t == 3
        assert all(p.grad is None for p in lcsb.parameters().values())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    for key, entry in optimizer.state_dict()["state"].items():
        assert all(
            torch.equal(torch.as_tensor(entry[k]), torch.as_tensor(state["state"][key][k])) for k in entry
        )


def test_outer_parameters_train_or_freeze():
    for outer in ("train", "freeze"):
        model = build()
        head = model.get_output_embeddings().weight
        embedding = model.get_input_embeddings().weight
        for parameter in (head, embedding):
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        before = [head.detach().clone(), embedding.detach().clone()]
        truth_embedding = torch.autograd.grad(model(**tiny.batch(model)).loss, embedding)[0]
        with selective_backward(model, LCSBConfig("exact", layers_per_step=1, outer=outer), t=3) as lcsb:
            lcsb.begin()
            model(**tiny.batch(model)).loss.backward()
            if outer == "train":
                assert torch.allclose(embedding.grad, truth_embedding, rtol=1e-10, atol=1e-14)
            lcsb.step(optimizer)
        moved = [not torch.equal(a, b) for a, b in zip(before, (head, embedding), strict=True)]
        assert moved == [outer == "train"] * 2
        assert head.requires_grad and embedding.requires_grad


def test_config_round_trip_and_unknown_values():
    config = LCSBConfig("mlp", "frozen", layers_per_step=3)
    assert LCSBConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="did you mean 'backward'"):
        LCSBConfig.from_dict({"bakward": "full"})
    with pytest.raises(ValueError, match="nearest: 'identity'"):
        LCSBConfig("identiti")
    with pytest.raises(ValueError, match="layers_per_step is 9, expected 1 to 4"):
        selective_backward(build(), LCSBConfig(layers_per_step=9))
