from __future__ import annotations

import pytest

import simulations.implicit_update as module
from bcd_theory.momentum import shifted_iterate
from reports.records import RunFolder
from simulations.records import load_record


def rows_of(stage, *arguments):
    rows = []
    stage(*arguments, rows.append)
    return rows


def test_the_change_of_variable_holds_in_every_order():
    rows = rows_of(module._change_of_variable, 4, 3)
    assert {row["order"] for row in rows} == set(module.ORDERS) and max(row["worst"] for row in rows) < 1e-13


def test_a_wrong_shift_is_seen(monkeypatch):
    monkeypatch.setattr(
        module, "shifted_iterate", lambda x, m, eta, beta: shifted_iterate(x, m, 0.99 * eta, beta)
    )
    assert max(row["worst"] for row in rows_of(module._change_of_variable, 1, 3)) > 1e-6


def test_the_idle_displacement_of_the_runner_is_the_law():
    assert module._idle_decay.__doc__
    assert max(row["worst"] for row in rows_of(module._idle_decay, 1, 3)) < 1e-12


def test_the_energy_falls_up_to_the_limit_and_not_for_another_weight(monkeypatch):
    assert max(row["excess"] for row in rows_of(module._energy, 3, 3)) <= 1e-12
    monkeypatch.setattr(module, "block_energy", lambda loss, m, eta, beta: loss)
    assert max(row["excess"] for row in rows_of(module._energy, 3, 3)) > 1e-6


@pytest.mark.slow
def test_a_wrong_law_of_movement_is_refuted(monkeypatch, tmp_path):
    true = module.steady_movement
    monkeypatch.setattr(module, "steady_movement", lambda *a: 1.001 * true(*a))
    verdict, _ = module.EXPERIMENT.run("quick", 0, tmp_path)
    refuted = [part.name for part in verdict.parts if part.verdict == "refuted"]
    assert verdict.verdict == "refuted" and all(name.startswith("steady movement") for name in refuted)
    assert load_record(RunFolder(tmp_path / "implicit_update"), "implicit_update").of("movement")
