"""The memory engine computes what transformers, peft and `selective_backward` compute on the same packed weights."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiny_packed
import torch

from lcsb import LCSBConfig, selective_backward
from lcsb.engine.engine import AdamWSettings, Engine, LoRASettings, Residency
from lcsb.selective import NonFiniteError

LORA = LoRASettings(r=4, alpha=32)
# Whole quantisation blocks a row, or bitsandbytes takes wrong scales.
WIDE = {"intermediate_size": 128}
HEADS = {"qwen3": {"head_dim": 32}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("packed")
    return {
        family: tiny_packed.write(place, family, **WIDE, **HEADS.get(family, {}))
        for family in tiny_packed.ENGINE_FAMILIES
    }


def open_engine(folder, model, config=None, **settings):
    engine = Engine(folder, config or LCSBConfig(), lora=LORA, **settings)
    engine.load_adapter_tensors(tiny_packed.adapters(model))
    return engine


def relative(ours, theirs):
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("mode", ["full", "exact", "identity", "mlp"])
@pytest.mark.parametrize("family", tiny_packed.ENGINE_FAMILIES)
def test_loss_and_every_gradient(folders, family, mode):
    """Two rows, longer than the sliding windows; loss to 1e-6, each adapter gradient to 1e-5."""
    model = tiny_packed.reference(folders[family])
    config = LCSBConfig(mode, layers_per_step=2)
    engine = open_engine(folders[family], model, config)
    ids = tiny_packed.tokens(model, 2, 20)
    labels = ids.clone()
    labels[1, 13:] = -100
    for t in range(engine.schedule.cycle_length):
        engine.t = t
        found = engine.loss_and_gradient(ids, labels)
        with selective_backward(model, config, t=t) as lcsb:
            selected = lcsb.begin()
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            assert found.loss == pytest.approx(loss.item(), rel=1e-6)
            assert sorted(found.by_layer) == list(selected)
            for index, flat in found.by_layer.items():
                theirs = {name: p.grad for name, p in lcsb.adapters[index].items()}
                for name, view in engine.layout.views(flat).items():
                    projection, part = name.split(".")
                    (key,) = [n for n in theirs if f".{projection}.lora_{part.upper()}." in n]
                    assert relative(view, theirs[key]) < 1e-5, key
            model.zero_grad()


@pytest.mark.parametrize("idle", ["momentum", "frozen"])
@pytest.mark.parametrize("mode", ["full", "exact", "mlp"])
def test_trajectory_is_that_of_selective_backward(folders, mode, idle):
    model = tiny_packed.reference(folders["llama"])
    config = LCSBConfig(mode, idle, layers_per_step=1)
    engine = open_engine(folders["llama"], model, config, optimizer=AdamWSettings(1e-3, weight_decay=0.1))
    parameters = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
    with selective_backward(model, config) as lcsb:
        for t in range(9):
            ids = tiny_packed.tokens(model, 1, 12, seed=t)
            lcsb.begin()
            model(input_ids=ids, labels=ids).loss.backward()
            theirs = lcsb.step(adamw, max_norm=0.5)
            ours = engine.step(ids, max_norm=0.5)
            assert ours.selected == theirs.selected and ours.block == theirs.block
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    for name, value in tiny_packed.adapters(model).items():
        # AdamW divides by sqrt(v), so rounding in a gradient near zero moves it by a share of the learning rate.
        assert relative(engine.adapter_tensors()[name], value) < 2e-4, name


RESIDENCIES = {
    "weights given back": {"weights": False},
    "head given back": {"head": False},
    "states in a file": {"states": False},
    "inputs in a file": {"inputs": "file"},
    "products of two layers kept": {"products": 2},
    "products of all layers kept": {"products": 99},
    "all on disk": {"weights": False, "head": False, "states": False, "inputs": "file"},
}


@pytest.mark.parametrize("change", RESIDENCIES.values(), ids=RESIDENCIES)
def test_where_things_lie_changes_no_bit(folders, tmp_path, change):
    def run(residency):
        engine = Engine(
            folders["gemma3"], LCSBConfig("exact", layers_per_step=2), lora=LORA, residency=residency
        )
        ids = [torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(t)) for t in range(7)]
        losses = []
        for batch in ids:
            engine.step(batch)
            losses.append(engine.loss)
        return losses, engine.adapter_tensors()

    losses, adapters = run(Residency())
    again, others = run(Residency(folder=tmp_path, **change))
    assert again == losses
    for name, value in adapters.items():
        assert torch.equal(others[name], value), name


def test_inputs_in_bfloat16_change_gradients_by_their_rounding(folders):
    model = tiny_packed.reference(folders["llama"])
    ids = tiny_packed.tokens(model, 1, 20)
    exact = open_engine(folders["llama"], model).loss_and_gradient(ids)
    rounded = open_engine(folders["llama"], model, residency=Residency(inputs="bfloat16")).loss_and_gradient(
        ids
    )
    assert rounded.loss == exact.loss
    errors = [relative(rounded.by_layer[i], exact.by_layer[i]) for i in exact.by_layer]
    assert 0 < max(errors) < 2e-2


def test_head_in_small_chunks(folders):
    model = tiny_packed.reference(folders["gemma3"])
    ids = tiny_packed.tokens(model, 1, 20)
    whole = open_engine(folders["gemma3"], model).loss_and_gradient(ids)
    chunked = open_engine(
        folders["gemma3"], model, residency=Residency(chunk_logits=64, head=False)
    ).loss_and_gradient(ids)
    assert chunked.loss == pytest.approx(whole.loss, rel=1e-6)
    for index, flat in whole.by_layer.items():
        assert relative(chunked.by_layer[index], flat) < 1e-5


def test_poisoned_tile(folders):
    """U10: the shared tile is overwritten with NaN after each use; three steps stay finite and equal."""
    model = tiny_packed.reference(folders["llama"])
    ids = tiny_packed.tokens(model, 1, 12)
    clean, poisoned = open_engine(folders["llama"], model), open_engine(folders["llama"], model)
    poisoned.buffer.poison = True
    for _ in range(3):
        a, b = clean.loss_and_gradient(ids), poisoned.loss_and_gradient(ids)
        assert a.loss == b.loss
        assert all(torch.equal(a.by_layer[i], b.by_layer[i]) for i in a.by_layer)


def test_evaluation_equals_the_training_loss(folders):
    model = tiny_packed.reference(folders["qwen2"])
    engine = open_engine(folders["qwen2"], model)
    ids = tiny_packed.tokens(model, 2, 12)
    total, count = engine.evaluate(ids)
    assert count == 22
    assert total / count == pytest.approx(engine.loss_and_gradient(ids).loss, rel=1e-6)


def test_batch_without_a_target_is_not_a_step(folders):
    """U30."""
    engine = Engine(folders["llama"], LCSBConfig(), lora=LORA)
    before = engine.adapter_tensors()
    record = engine.step(torch.arange(3, 13)[None], torch.full((1, 10), -100))
    assert not record.taken and engine.t == 0
    assert all(torch.equal(value, before[name]) for name, value in engine.adapter_tensors().items())


def test_nonfinite_step_changes_nothing(folders):
    """U09."""
    engine = Engine(folders["llama"], LCSBConfig("exact", layers_per_step=1), lora=LORA)
    ids = torch.arange(3, 13)[None]
    engine.step(ids)
    engine.final_norm.fill_(float("nan"))
    before = engine.adapter_tensors()
    with pytest.raises(NonFiniteError, match="step 1: not finite in"):
        engine.step(ids)
    assert engine.t == 1
    assert all(torch.equal(value, before[name]) for name, value in engine.adapter_tensors().items())


def test_folder_that_is_not_packed(folders):
    with pytest.raises(
        ValueError, match=r"q_proj\.weight is not packed, expected an NF4 matrix of 64 x 64; `lcsb con"
    ):
        Engine(folders["llama"].parent / "llama-plain")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LCSBConfig("certified", layers_per_step=1), "found backward 'certified' and schedule 'cyclic'"),
        (
            LCSBConfig("exact", schedule="importance", layers_per_step=1),
            "and schedule 'importance', expected other",
        ),
    ],
)
def test_what_would_have_to_be_measured_is_refused(folders, config, message):
    with pytest.raises(ValueError, match=message):
        Engine(folders["llama"], config, lora=LORA)


def test_eps_zero_is_refused_under_idle_momentum(folders):
    with pytest.raises(ValueError, match=r"eps: found 0\.0, idle momentum needs it above 0"):
        Engine(folders["llama"], LCSBConfig(), lora=LORA, optimizer=AdamWSettings(eps=0.0))


def test_adapter_of_another_model(folders):
    engine = Engine(folders["llama"], lora=LORA)
    tensors = engine.adapter_tensors()
    first = next(iter(tensors))
    with pytest.raises(ValueError, match=f"adapter: {first} has shape"):
        engine.load_adapter_tensors({**tensors, first: torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="adapter: 'x' belongs to no layer of this model"):
        engine.load_adapter_tensors({**tensors, "x": torch.zeros(2)})
    del tensors[first]
    with pytest.raises(ValueError, match=f"adapter: no tensor '{first}' in it"):
        engine.load_adapter_tensors(tensors)


def test_of_the_large_libraries_torch_alone_is_imported():
    code = (
        "import sys, lcsb.engine.engine\n"
        "print([m for m in ('transformers', 'peft', 'bitsandbytes', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
