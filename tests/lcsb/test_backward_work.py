"""What a pass does and saves, counted by module: gradients that flow, layers run again, bytes kept."""

from __future__ import annotations

import contextlib

import pytest
import tiny
import torch
from passes import build, engine_gradients, largest_difference
from torch import nn

from lcsb.config import LCSBConfig
from lcsb.layers import attention_module
from lcsb.roles import plan_roles
from lcsb.selective import selective_backward


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
