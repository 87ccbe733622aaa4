"""Probe steps on a tiny model: against a plain loop with the dense Hessian, and through the stage."""

from __future__ import annotations

import tiny
import tiny_run
import torch

from lcsb import stages
from lcsb.local import inner
from lcsb.measure.curvature import Curvature
from lcsb.measure.fidelity import cyclic_gradients
from lcsb.measure.probes import measure_probes
from lcsb.train import train_arm
from reports.claims import PROBE_SHARE
from reports.evidence import ProbeEvidence, ProbeStep
from reports.judge import judge
from reports.records import RunConfig, read_json, read_record
from reports.rules.descent import holds


def small():
    """A two-layer model with adapters that have moved off B = 0."""
    model = tiny.with_lora(
        tiny.llama(num_hidden_layers=2), r=1, target_modules=["q_proj", "down_proj"]
    ).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return model, tiny.batch(model, rows=1, tokens=12)


def test_steps_are_those_of_the_formula_and_are_taken_back():
    model, batch = small()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    found = measure_probes(model, batch, 1, seed=0, tolerance=1e-5)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert len(found.steps) == 2 * 2 * 3 and not found.skipped and found.products > 0
    names = [[n for n in before if f"layers.{i}." in n and "lora" in n] for i in range(2)]
    parameters = dict(model.named_parameters())
    for block in range(2):
        mine = {n: parameters[n] for n in names[block]}
        with Curvature(lambda: model(**batch).loss, mine) as curvature:
            dense = torch.stack([curvature.product(row) for row in torch.eye(curvature.size)]).double()
        largest = float(torch.linalg.eigvalsh((dense + dense.T) / 2)[-1])
        gradient = torch.autograd.grad(model(**batch).loss, list(mine.values()))
        step = next(s for s in found.steps if (s["block"], s["mode"], s["multiple"]) == (block, "exact", 2.0))
        assert abs(step["smoothness"] / largest - 1) < 1e-2
        squared = sum(float(g.double().square().sum()) for g in gradient)
        assert abs(step["gradient_squared"] / squared - 1) < 1e-4
        with torch.no_grad():
            for p, g in zip(mine.values(), gradient, strict=True):
                p.sub_(g, alpha=2.0 / step["smoothness"])
            expected = float(model(**batch).loss)
            for n, p in mine.items():
                p.copy_(before[n])
        assert abs(step["loss_after"] - expected) < 1e-5 * expected


def test_the_inequality_holds_at_the_step_and_uphill_breaks_it():
    """T1 on a smooth loss; the same step uphill must fail, so the test can."""
    model, batch = small()
    found = measure_probes(model, batch, 1, seed=0, modes=("exact",), multiples=(1.0, -1.0))
    downhill = [step for step in found.steps if step["multiple"] > 0]
    uphill = [{**step, "multiple": 1.0} for step in found.steps if step["multiple"] < 0]
    assert len(downhill) == len(uphill) == 2
    assert all(holds(ProbeStep(point="start", seed=0, **step)) for step in downhill)
    assert not any(holds(ProbeStep(point="start", seed=0, **step)) for step in uphill)


def test_the_surrogate_carries_its_angle():
    model, batch = small()
    found = measure_probes(model, batch, 1, seed=0, modes=("identity",), multiples=(1.0,))
    truth, field = (cyclic_gradients(model, batch, mode, 1) for mode in ("exact", "identity"))
    for step in found.steps:
        g, s = truth[step["block"]], field[step["block"]]
        assert abs(step["cosine"] - inner(g, s) / (inner(g, g) * inner(s, s)) ** 0.5) < 1e-6
        assert abs(step["norm_ratio"] - (inner(s, s) / inner(g, g)) ** 0.5) < 1e-6
        assert holds(ProbeStep(point="start", seed=0, **step))
    assert abs(found.steps[-1]["cosine"] - 1) < 1e-6  # nothing lies above the top block


def test_the_stage_writes_evidence_that_the_judge_reads(tmp_path, model_cache):
    config = tiny_run.settings(
        tiny_run.write_model(tmp_path), seeds=[0, 1, 2], steps=3, fidelity_batches=3, arms=["exact-momentum"]
    )
    folder = tiny_run.start(tmp_path / "run", config)
    for seed in config.seeds:
        train_arm(folder, "exact-momentum", seed)
        for point in stages.POINTS:
            stages._measure_probes(folder.root, point, seed)
    stages._collect_probes(folder, config)
    evidence = read_record(folder.evidence("probes"), ProbeEvidence)
    assert {step.point for step in evidence.steps} == {"start", "exact-momentum, step 3"}
    assert len(evidence.steps) == 2 * 3 * 2 * 2 * 3 - 6 * len(read_json(folder.evidence("probes"))["skipped"])
    verdict = judge(folder, ["C3"]).verdicts[0]
    part = verdict.ours.parts[0]
    assert part.effect is not None and part.effect >= PROBE_SHARE and part.n == 3


def test_needs_are_those_of_the_claims():
    config = RunConfig.preset("standard")
    assert stages.needs_of(["C4"], config) == stages.Needs(frozenset({"timing"}), frozenset())
    assert stages.needs_of(["C1", "C6"], config) == stages.Needs(frozenset({"fidelity"}), frozenset({"full"}))
    three = stages.needs_of(["C3"], config)
    assert three.evidence == {"probes", "fidelity"} and three.arms == {"full", "exact-momentum"}
    assert stages.needs_of(["C5"], config).arms == {arm.name for arm in config.arms}
