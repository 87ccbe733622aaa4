"""Build the Coq proofs in a temporary folder, audit them, and lay the result out as a table.

Four gates stand between a .v file and the word "checked": no hole in the text (:func:`holes`), no file left
out of the build (:func:`unbuilt_files`), no axiom beyond the four of the standard library's real numbers
(:func:`axioms_of`), and the independent checker ``coqchk`` (:func:`run_coqchk`). Nothing is read from a
former build: without Coq the table says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from proofs.formulas import COQ_FOLDER, strip_comments

INSTALL_HINT = "needs Coq: apt-get install coq libcoq-coquelicot"
NOT_CHECKED = "not checked here"
CHECKED = "checked"
NO_DERIVATION = "none"

ALLOWED_AXIOMS = frozenset(
    {
        "ClassicalDedekindReals.sig_forall_dec",
        "ClassicalDedekindReals.sig_not_dec",
        "FunctionalExtensionality.functional_extensionality_dep",
        "Classical_Prop.classic",
    }
)

_HOLE = re.compile(
    r"\b(Admitted|admit|give_up|Axioms?|Parameters?|Conjecture|bypass_check|"
    r"Unset\s+(?:Guard|Positivity|Universe)\s+Checking)\b"
)
_RESULT = re.compile(r"^\s*(?:Theorem|Lemma|Corollary|Example|Fact|Remark|Proposition)\s+([\w']+)", re.M)
_CLAIM = re.compile(
    r"\(\*\s*\[(T\d+b?)\]\s*(?P<words>.*?)\s*Met:\s*(?P<met>.*?)\s*\*\)\s*"
    r"Theorem\s+(?P<claim>claim_\w+)(?P<body>.*?)\bQed\.",
    re.S,
)
_SECONDS = 600


class ProofError(RuntimeError):
    """A proof did not compile, or an audit found something that it should not."""


@dataclass(frozen=True)
class Claim:
    """One theorem of Statements.v: id, name, words, file of its proof, where its hypotheses hold."""

    theorem: str
    name: str
    statement: str
    file: str
    met: str


@dataclass(frozen=True)
class Row:
    """One line of the table.

    ``coq``: "checked", "not checked here" or what failed. ``axioms``: those behind all claims of the theorem id;
    None if not audited. ``sympy``: "checked" (a symbolic derivation from the algorithm ends in the proved
    formula), "none", or what failed.
    """

    theorem: str
    claim: str
    statement: str
    file: str
    coq: str
    sympy: str
    axioms: tuple[str, ...] | None
    hypotheses: str

    @property
    def checked(self) -> bool:
        """True if Coq checked the claim here and no symbolic derivation contradicts it."""
        return self.coq == CHECKED and self.sympy in (CHECKED, NO_DERIVATION)


def have_coq() -> bool:
    """True if Coq's compiler, its makefile generator and its checker, and ``make``, are on the path."""
    return all(shutil.which(program) for program in ("coqc", "coq_makefile", "coqchk", "make"))


def coq_files() -> list[Path]:
    """Every .v file of the project, sorted."""
    return sorted(COQ_FOLDER.glob("*.v"))


def results() -> list[str]:
    """``File.name`` of every theorem, lemma and example in the project."""
    return [
        f"{path.stem}.{name}"
        for path in coq_files()
        for name in _RESULT.findall(strip_comments(path.read_text(encoding="utf-8")))
    ]


def claims() -> list[Claim]:
    """The claims of Statements.v, read from its text; raises :class:`ProofError` if one lacks its comment."""
    text = (COQ_FOLDER / "Statements.v").read_text(encoding="utf-8")
    home = {name.split(".")[1]: name.split(".")[0] for name in results()}
    found = []
    for match in _CLAIM.finditer(text):
        proof = re.findall(r"\b([a-z_]\w*)\b", match["body"].partition("Proof.")[2])
        files = {home[word] for word in proof if word in home} - {"Statements", "FinSum"}
        if not files:
            raise ProofError(f"{match['claim']}: its proof names no theorem of the project")
        words, met = (" ".join(match[part].split()) for part in ("words", "met"))
        found.append(Claim(match[1], match["claim"], words, ", ".join(sorted(f"{f}.v" for f in files)), met))
    stated = re.findall(r"^Theorem\s+(\w+)", strip_comments(text), re.M)
    if [claim.name for claim in found] != stated:
        bare = sorted(set(stated) ^ {claim.name for claim in found})
        raise ProofError(f"Statements.v: without a comment '[T..] words Met: ...': {', '.join(bare)}")
    return found


def holes() -> list[str]:
    """Gate 1: words in the .v files that would leave a proof open or add an axiom. Needs no Coq."""
    return [
        f"{path.name}: {match.group(0)}"
        for path in coq_files()
        for match in _HOLE.finditer(strip_comments(path.read_text(encoding="utf-8")))
    ]


def unbuilt_files() -> list[str]:
    """Gate 2: .v files that _CoqProject does not build, or names there that do not exist. Needs no Coq."""
    listed = set(re.findall(r"^(\w+\.v)$", (COQ_FOLDER / "_CoqProject").read_text(encoding="utf-8"), re.M))
    return sorted(listed ^ {path.name for path in coq_files()})


def _run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_SECONDS
    )
    if done.returncode:
        raise ProofError(f"{' '.join(command[:2])} failed:\n{done.stdout}")
    return done.stdout


def build(folder: Path) -> None:
    """Compile a copy of the proofs in ``folder``; raises :class:`ProofError` with coqc's words."""
    for path in [COQ_FOLDER / "_CoqProject", COQ_FOLDER / "Makefile", *coq_files()]:
        shutil.copyfile(path, folder / path.name)
    _run(["make", f"-j{min(4, os.cpu_count() or 1)}", "all"], folder)


def compile_text(built: Path, name: str, text: str) -> str:
    """Compile ``text`` as a file ``name``.v against a finished build and return what Coq printed."""
    (built / f"{name}.v").write_text(text, encoding="utf-8")
    return _run(["coqc", "-q", "-R", ".", "LCSB", f"{name}.v"], built)


def _axioms(printed: str) -> set[str]:
    if printed.startswith("Closed under the global context"):
        return set()
    head, _, body = printed.partition("\n")
    if head != "Axioms:":
        raise ProofError(f"cannot read the answer of Print Assumptions: {printed[:200]!r}")
    return set(re.findall(r"^([\w.']+) *(?::|$)", body, re.M))


def axioms_of(built: Path, groups: Sequence[Sequence[str]]) -> list[set[str]]:
    """Gate 3: the axioms behind each group of results (``File.name``), by Coq's own Print Assumptions."""
    files = sorted({name.split(".")[0] for group in groups for name in group})
    lines = [f"From LCSB Require {' '.join(files)}.", "Set Printing Width 1000."]
    for number, group in enumerate(groups):
        together = ", ".join("@" + name for name in group)
        lines += [
            f"Definition group_{number} := ({together}).",
            f"Print Assumptions group_{number}.",
        ]
    printed = compile_text(built, "Audit", "\n".join(lines) + "\n")
    answers = re.split(r"^(?=Axioms:|Closed under)", printed, flags=re.M)[1:]
    if len(answers) != len(groups):
        raise ProofError(f"Print Assumptions gave {len(answers)} answers for {len(groups)} questions")
    return [_axioms(answer) for answer in answers]


def run_coqchk(built: Path) -> None:
    """Gate 4: Coq's independent checker re-checks the project's files (the libraries are trusted)."""
    modules = [word for path in coq_files() for word in ("-norec", f"LCSB.{path.stem}")]
    _run(["coqchk", "-silent", "-R", ".", "LCSB", *modules], built)


def _coq_column(everything: bool) -> tuple[str, dict[str, set[str]]]:
    """What Coq says of the whole set of claims, and the axioms behind the claims of each theorem id."""
    open_ends = [*holes(), *(f"{name} is not in the build" for name in unbuilt_files())]
    if open_ends:
        return "failed: " + "; ".join(open_ends), {}
    if not have_coq():
        return NOT_CHECKED, {}
    by_theorem: dict[str, list[str]] = {}
    for claim in claims():
        by_theorem.setdefault(claim.theorem, []).append(f"Statements.{claim.name}")
    with tempfile.TemporaryDirectory(prefix="lcsb-proofs-") as temporary:
        built = Path(temporary)
        try:
            build(built)
            # the last group is every result of the project: an axiom must not hide outside the claims
            axioms = axioms_of(built, [*by_theorem.values(), results()])
            if everything:
                run_coqchk(built)
        except ProofError as error:
            return f"failed: {error}", {}
    own = dict(zip(by_theorem, axioms[:-1], strict=True))
    strange = sorted(axioms[-1] - ALLOWED_AXIOMS)
    return (f"failed: rests on {', '.join(strange)}" if strange else CHECKED), own


def prove(gate: bool = False) -> list[Row]:
    """Check everything here and now, and return one row per claim (several rows may carry one theorem id).

    ``gate=True`` also runs ``coqchk``. Whoever gates then asks for ``all(row.checked for row in rows)``:
    without Coq no row is checked.
    """
    from proofs.derivations import outcome

    coq, axioms = _coq_column(everything=gate)
    rows = []
    for claim in claims():
        own = tuple(sorted(axioms[claim.theorem])) if axioms else None
        sympy = outcome(claim.name)
        rows.append(Row(claim.theorem, claim.name, claim.statement, claim.file, coq, sympy, own, claim.met))
    return rows


def rows_as_json(rows: Sequence[Row]) -> str:
    """The table as one line of strict JSON: {"rows": [...], "all_checked": bool}."""
    table = {"rows": [asdict(row) for row in rows], "all_checked": all(row.checked for row in rows)}
    return json.dumps(table, allow_nan=False)


def markdown_table() -> str:
    """The claims as a Markdown table, for proofs/README.md (a test keeps the page and Statements.v equal)."""
    lines = ["| id | claim | in words | proof | hypotheses met or measured |", "|" + " --- |" * 5]
    for c in sorted(claims(), key=lambda claim: (int(re.sub(r"\D", "", claim.theorem)), claim.theorem)):
        words, met = (text.replace("|", "\\|") for text in (c.statement, c.met))
        lines.append(f"| {c.theorem} | `{c.name}` | {words} | {c.file} | {met} |")
    return "\n".join(lines)
