"""The four gates between a .v file and the word "checked", each of them tried against a deliberate break.

That no result rests on a further axiom is asserted in test_table, on the rows that ``prove`` returns.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from proofs import check
from proofs.formulas import COQ_FOLDER, load_formulas, strip_comments


def copy_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sources = folder / "coq"
    built_files = shutil.ignore_patterns("*.vo*", "*.glob", ".*", "CoqMakefile*")
    shutil.copytree(COQ_FOLDER, sources, ignore=built_files)
    monkeypatch.setattr(check, "COQ_FOLDER", sources)
    return sources


def test_no_holes() -> None:
    assert check.holes() == []


@pytest.mark.parametrize("hole", ["Admitted.", "Axiom a : 0 = 1.", "admit.", "Unset Guard Checking."])
def test_a_hole_is_seen(hole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = copy_sources(tmp_path, monkeypatch)
    with (sources / "DescentStep.v").open("a") as file:
        file.write(f"\n{hole}\n(* Axiom in a comment is no hole *)\n")
    assert len(check.holes()) == 1
    assert all(row.coq.startswith("failed") for row in check.prove())


def test_every_file_is_built() -> None:
    assert check.unbuilt_files() == []


def test_an_unbuilt_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = copy_sources(tmp_path, monkeypatch)
    (sources / "Forgotten.v").write_text("Theorem wrong : False.\n")
    assert check.unbuilt_files() == ["Forgotten.v"]


def test_a_top_level_hypothesis_is_an_axiom_and_is_seen(built: Path) -> None:
    sly = "Hypothesis easy : 0 = 1.\nTheorem sly : 0 = 1. Proof. exact easy. Qed.\n"
    check.compile_text(built, "Sly", sly)
    (axioms,) = check.axioms_of(built, [["Sly.sly"]])
    assert axioms - check.ALLOWED_AXIOMS == {"Sly.easy"}


def test_the_independent_checker_agrees(built: Path) -> None:
    check.run_coqchk(built)


def test_a_wrong_constant_does_not_compile(built: Path) -> None:
    statements = strip_comments((COQ_FOLDER / "Statements.v").read_text())
    statement = re.search(r"Theorem claim_descent.*?Qed\.", statements, re.S)
    assert statement is not None
    broken = (
        "From Coq Require Import Reals.\nFrom LCSB Require Import DescentStep.\nOpen Scope R_scope.\n"
        "Definition descent_coeff (eta L : R) : R := eta * (1 - eta * L / 3).\n" + statement[0] + "\n"
    )
    with pytest.raises(check.ProofError, match="cannot unify"):
        check.compile_text(built, "Broken", broken)
    check.compile_text(built, "Broken", broken.replace("/ 3", "/ 2"))


def test_every_formula_is_claimed() -> None:
    text = strip_comments((COQ_FOLDER / "Statements.v").read_text() + (COQ_FOLDER / "Formulas.v").read_text())
    used_once = [name for name in load_formulas() if len(re.findall(rf"\b{name}\b", text)) < 2]
    assert used_once == []


def test_every_claim_has_an_example_that_meets_its_hypotheses() -> None:
    text = strip_comments("".join(p.read_text() for p in check.coq_files() if p.stem.startswith("Examples")))
    for claim in check.claims():
        found = re.search(rf"Example {claim.name}_met\b(.*?)Qed\.", text, re.S)
        assert found is not None, f"{claim.name} has no Example"
        proof = found[1].partition("Proof.")[2]
        assert re.search(rf"\b{claim.name}\b", proof), f"{claim.name}_met does not apply {claim.name}"
