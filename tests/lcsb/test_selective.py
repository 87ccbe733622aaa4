"""Backward modes against plain autograd in float64; the work they do and save; what they leave behind."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import pytest
import reference
import tiny
import torch
from torch import nn

from lcsb.config import LCSBConfig
from lcsb.layers import attention_module
from lcsb.selective import NonFiniteError, plan_roles, selective_backward

FAMILIES = ("llama", "qwen2", "gemma3", "gpt2", "gpt_neox")
GOLDEN = Path(__file__).parents[1] / "golden"


def build(family="llama", dtype=torch.float64, **settings):
    return tiny.with_lora(tiny.BUILDERS[family](dtype=dtype), **settings)


def engine_gradients(model, batch, config, step=0):
    """Adapter gradients (selected layers only) and loss of one backward pass at step `step`, by the engine."""
    with selective_backward(model, config, t=step) as lcsb:
        selected = lcsb.begin()
        loss = model(**batch).loss
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for parameter in model.parameters():
            parameter.grad = None
    return found, loss.detach(), selected


@contextlib.contextmanager
def without_recompute(model):
    flags = {m: m.gradient_checkpointing for m in model.modules() if hasattr(m, "gradient_checkpointing")}
    for module in flags:
        module.gradient_checkpointing = False
    yield
    for module, flag in flags.items():
        module.gradient_checkpointing = flag


def largest_difference(a, b):
    assert a.keys() == b.keys() and a
    return max(float((a[k] - b[k]).abs().max() / (1e-12 + b[k].abs().max())) for k in a)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backward", ["full", "exact", "identity", "mlp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_modes_equal_the_plain_reference(family, backward, recompute):
    model = build(family)
    batch = tiny.batch(model, rows=2, tokens=12, lengths=[12, 7])
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()
    config = LCSBConfig(backward, layers_per_step=2)
    for step in range(2):
        found, loss, selected = engine_gradients(model, batch, config, step)
        with without_recompute(model):
            truth, true_loss = reference.gradients(model, batch, backward, selected)
        assert torch.equal(loss, true_loss)
        assert largest_difference(found, truth) < 1e-10


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


# -- work -------------------------------------------------------------------------------------------------------


class Work:
    """Counts what a forward and backward pass does, by module: gradients that flow, forward runs, bytes saved."""

    def __init__(self, model, layers):
        self.layers, self.flowed, self.forwards, self.saved = layers, set(), {}, {}
        self._model, self._current = model, [None]

    def _forward(self, name):
        def hook(module, args, output):
            self.forwards[name] = self.forwards.get(name, 0) + 1
            value = output[0] if isinstance(output, tuple) else output
            if getattr(value, "requires_grad", False):
                value.register_hook(lambda gradient: self.flowed.add(name))

        return hook

    def _enter(self, index):
        def hook(module, args):
            self._current.append(index)

        return hook

    def _leave(self, module, args, output):
        self._current.pop()

    def _pack(self, tensor):
        if not isinstance(tensor, nn.Parameter) and not tensor.is_leaf:
            key = self._current[-1]
            self.saved[key] = self.saved.get(key, 0) + tensor.numel() * tensor.element_size()
        return tensor

    def run(self, batch):
        with contextlib.ExitStack() as stack:
            for name, module in self._model.named_modules():
                stack.callback(module.register_forward_hook(self._forward(name)).remove)
            for index, layer in enumerate(self.layers):
                stack.callback(layer.register_forward_pre_hook(self._enter(index)).remove)
                stack.callback(layer.register_forward_hook(self._leave).remove)
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                loss = self._model(**batch).loss
            loss.backward()


def layer_names(model, layers):
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(layer)] for layer in layers]


@pytest.mark.parametrize("hook_on_again", [False, True])
@pytest.mark.parametrize("backward", ["full", "exact", "identity", "mlp"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_backward_work(family, backward, hook_on_again):
    """U12: only what a mode needs is differentiated and saved, whoever forces input gradients on."""
    model = build(family)
    batch = tiny.batch(model, rows=1)
    config = LCSBConfig(backward, layers_per_step=2)
    p = 1 if backward == "full" else len(selective_backward(model, config).schedule.blocks)
    middle = p // 2
    with selective_backward(model, config, t=middle) as lcsb:
        if hook_on_again:
            model.enable_input_require_grads()
        selected = lcsb.begin()
        work = Work(model, lcsb.layers)
        work.run(batch)
        names = layer_names(model, lcsb.layers)
        graded = {
            i for i, group in enumerate(lcsb.adapters) if any(p.grad is not None for p in group.values())
        }
        attention = {
            i: next(n for n, m in model.named_modules() if m is attention_module(layer))
            for i, layer in enumerate(lcsb.layers)
        }
    assert graded == set(selected)
    assert backward == "full" or min(selected) > 0, "the case must have layers below the block"
    for index, name in enumerate(names):
        inside = {n for n in work.flowed if n.startswith(name + ".")}
        through_attention = {n for n in inside if n.startswith(attention[index])}
        if index in selected:
            assert through_attention and inside - through_attention
        elif index < min(selected) or backward == "identity":
            assert not inside and work.saved.get(index, 0) == 0
        elif backward == "exact":
            assert through_attention and inside - through_attention
        else:
            assert not through_attention and inside
    # The final norm and the head are always differentiated.
    assert any(n.endswith("lm_head") for n in work.flowed) and any(n.endswith(".norm") for n in work.flowed)


def test_backward_work_of_a_mixed_plan():
    """U12, layer by layer: nothing inside an identity layer, no attention in an mlp one, both in an exact one."""
    model = build("gemma3")
    plan = (None, "exact", "mlp", "identity", "mlp", "exact")
    with selective_backward(model, LCSBConfig("exact", layers_per_step=1)) as lcsb:
        model.enable_input_require_grads()
        lcsb.begin()
        lcsb.roles = plan_roles("certified", lcsb.selected, len(plan), grades=plan)
        work = Work(model, lcsb.layers)
        work.run(tiny.batch(model, rows=1))
        names = layer_names(model, lcsb.layers)
        assert {i for i, g in enumerate(lcsb.adapters) if any(p.grad is not None for p in g.values())} == {0}
    for index, grade in enumerate(plan):
        inside = {n for n in work.flowed if n.startswith(names[index] + ".")}
        through_attention = {n for n in inside if ".self_attn" in n}
        assert bool(through_attention) == (grade in (None, "exact"))
        assert bool(inside - through_attention) == (grade != "identity")
        assert (work.saved.get(index, 0) == 0) == (grade == "identity")


def test_saved_bytes_fall_with_the_selection():
    """U12: one layer of twelve selected saves about a twelfth."""
    model = tiny.with_lora(tiny.llama(num_hidden_layers=12))
    batch = tiny.batch(model, rows=1, tokens=64)
    total = {}
    for backward, k in (("full", None), ("identity", 1), ("exact", 1)):
        with selective_backward(model, LCSBConfig(backward, layers_per_step=k), t=11) as lcsb:
            selected = lcsb.begin()
            work = Work(model, lcsb.layers)
            work.run(batch)
        total[backward] = sum(value for key, value in work.saved.items() if key is not None)
        if k == 1:
            assert selected == (11,)
            assert {key for key, value in work.saved.items() if value and key is not None} == {11}
    assert total["identity"] == total["exact"]
    # the lowest layer that has a graph saves a little less than the others: its input needs no gradient
    assert 0.7 / 12 < total["identity"] / total["full"] <= 1 / 12


@pytest.mark.parametrize("backward", ["exact", "identity", "mlp"])
def test_recompute_work(backward):
    """Recompute runs only what backward needs: nothing of identity layers, no attention of mlp layers."""
    model = build()
    model.activation_checkpointing_enable({"use_reentrant": False})
    with selective_backward(model, LCSBConfig(backward, layers_per_step=1), t=1) as lcsb:
        selected = lcsb.begin()
        work = Work(model, lcsb.layers)
        work.run(tiny.batch(model, rows=1))
        names = layer_names(model, lcsb.layers)
    assert selected == (1,)
    inner = {i: work.forwards[f"{name}.mlp.gate_proj"] for i, name in enumerate(names)}
    projections = {i: work.forwards[f"{name}.self_attn.q_proj"] for i, name in enumerate(names)}
    idle = {"exact": (2, 2), "identity": (1, 1), "mlp": (1, 2)}[backward]
    assert (projections[0], inner[0]) == (1, 1)
    assert (projections[1], inner[1]) == (2, 2)
    assert all((projections[i], inner[i]) == idle for i in (2, 3))


@pytest.mark.parametrize("backward", ["exact", "identity", "mlp"])
def test_dropout_draws_the_same_numbers_in_recompute(backward):
    gradients = []
    for recompute in (False, True):
        model = build(dropout=0.3)
        batch = tiny.batch(model)
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            found, _, _ = engine_gradients(model, batch, LCSBConfig(backward, layers_per_step=2))
        gradients.append(found)
    assert largest_difference(*gradients) < 1e-12


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
