"""The table that ``lcsb prove`` prints: what is checked is checked here and now, and what is not says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from proofs import check, derivations
from proofs.formulas import Formula


def test_every_claim_is_checked_and_rests_on_the_axioms_of_the_reals_alone(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the session's build, made a moment ago from these sources, stands for a second one
    monkeypatch.setattr(check, "build", lambda folder: shutil.copytree(built, folder, dirs_exist_ok=True))
    rows = check.prove()
    assert [row.claim for row in rows] == [claim.name for claim in check.claims()]
    assert all(row.checked for row in rows), [row for row in rows if not row.checked]
    # theorems about real numbers rest on some of the four: an empty answer would mean that nothing was read
    assert all(row.axioms and set(row.axioms) <= check.ALLOWED_AXIOMS for row in rows)


def test_without_coq_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "have_coq", lambda: False)
    rows = check.prove(gate=True)
    assert {row.coq for row in rows} == {check.NOT_CHECKED}
    assert {row.axioms for row in rows} == {None}
    assert not any(row.checked for row in rows)
    report = json.loads(check.rows_as_json(rows))
    assert report["all_checked"] is False
    columns = {"theorem", "claim", "statement", "file", "coq", "sympy", "axioms", "hypotheses"}
    assert set(report["rows"][0]) == columns


def test_json_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "have_coq", lambda: False)
    assert "\n" not in check.rows_as_json(check.prove())


@pytest.mark.parametrize("claim", sorted(derivations.DERIVATIONS))
def test_derivation_ends_in_the_proved_formula(claim: str) -> None:
    assert derivations.outcome(claim) == "checked"


def test_derivations_belong_to_claims() -> None:
    assert set(derivations.DERIVATIONS) <= {claim.name for claim in check.claims()}


def test_a_wrong_formula_fails_its_derivation(monkeypatch: pytest.MonkeyPatch) -> None:
    real = derivations._formulas()
    name = "momentum_edge"
    wrong = real | {name: Formula(name, real[name].arguments, real[name].body + 1)}
    assert derivations._verdict.__wrapped__(derivations.DERIVATIONS["claim_stable"]) == "checked"
    monkeypatch.setattr(derivations, "_formulas", lambda: wrong)
    assert derivations._verdict.__wrapped__(derivations.DERIVATIONS["claim_stable"]).startswith("failed")


def test_the_readme_shows_the_same_table() -> None:
    page = (Path(check.__file__).parent / "README.md").read_text(encoding="utf-8")
    assert check.markdown_table() in page


def test_every_theorem_of_the_list_has_a_row() -> None:
    expected = {f"T{n}" for n in range(1, 13)} | {"T6b"}
    assert {claim.theorem for claim in check.claims()} == expected


def test_every_formula_is_met_by_a_derivation() -> None:
    text = Path(derivations.__file__).read_text(encoding="utf-8")
    assert [name for name in derivations._formulas() if f'"{name}"' not in text] == []


def test_a_further_axiom_fails_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "have_coq", lambda: True)
    monkeypatch.setattr(check, "build", lambda folder: None)
    monkeypatch.setattr(
        check, "axioms_of", lambda built, groups: [set() for _ in groups[1:]] + [{"Sly.easy"}]
    )
    assert {row.coq for row in check.prove()} == {"failed: rests on Sly.easy"}
