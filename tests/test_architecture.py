"""Imports point down only: `lcsb/cli.py` -> {lcsb, simulations, proofs} -> reports -> bcd_theory; no circles.

Every import statement of the five packages is read from the syntax tree (inside functions and `if TYPE_CHECKING` too)
and so is `importlib.import_module("...")`. The checker itself is tested on planted sources that each break one rule.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("bcd_theory", "lcsb", "simulations", "reports", "proofs")

# What a package may import of the others; a name stands for that module and all below it.
ARROWS: dict[str, tuple[str, ...]] = {
    "bcd_theory": (),
    "reports": ("bcd_theory",),
    "proofs": ("reports", "bcd_theory"),
    "simulations": ("reports", "bcd_theory", "lcsb.selective", "lcsb.optim"),
    "lcsb": ("reports", "bcd_theory"),
    "lcsb.cli": ("simulations", "proofs", "reports", "bcd_theory"),
}
# The only modules that may import the top.
ABOVE_CLI = ("lcsb.__main__",)

# Third-party packages: what bcd_theory may import, and what is closed to reports, which loads without torch.
THEORY_MAY_IMPORT = {"numpy", "scipy", "sympy"}
THEORY_LAZY = {"bcd_theory.certificates": {"PEPit"}}
CLOSED_TO_REPORTS = {"torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl"}

# Import names that are not the distribution's normalised name.
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow", "PEPit": "pepit", "lm_eval": "lm-eval"}


@dataclass(frozen=True)
class Import:
    """`target`: the module meant. `runs`: not under TYPE_CHECKING. `lazy`: inside a function or a try.

    `called`: by `import_module`, which is for a package that may be absent and about which nothing is promised.
    """

    importer: str
    target: str
    line: int
    runs: bool
    lazy: bool
    called: bool = False


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_imports(sources: Mapping[str, str], packages: set[str]) -> list[Import]:
    """Imports of all modules. `sources` maps module name to text, `packages` are those that are `__init__` files."""
    found = []
    for name, text in sources.items():
        for target, node, runs, lazy in _walk(
            ast.parse(text, filename=name), name, name in packages, sources
        ):
            found.append(Import(name, target, node.lineno, runs, lazy, isinstance(node, ast.Call)))
    return found


def _imports_by_call(node: ast.Call) -> bool:
    named = ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
    return named and bool(node.args) and isinstance(node.args[0], ast.Constant)


def _walk(
    tree: ast.AST,
    name: str,
    is_package: bool,
    sources: Mapping[str, str],
    runs: bool = True,
    lazy: bool = False,
) -> Iterator[tuple[str, ast.stmt | ast.expr, bool, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node, runs, lazy
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".")[: len(name.split(".")) - node.level + is_package]
                base = ".".join([*above, base]).rstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in sources else base), node, runs, lazy
        elif isinstance(node, ast.Call) and _imports_by_call(node):
            yield ast.literal_eval(node.args[0]), node, runs, True
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _walk(ast.Module(node.body, []), name, is_package, sources, False, lazy)
            yield from _walk(ast.Module(node.orelse, []), name, is_package, sources, runs, lazy)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Try))
            yield from _walk(node, name, is_package, sources, runs, lazy or inside)


def within(module: str, names: tuple[str, ...] | set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def broken_arrows(imports: list[Import], packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """One line for every import that points the wrong way."""
    problems = []
    for one in imports:
        package, target = one.importer.partition(".")[0], one.target.partition(".")[0]
        if target in packages:
            allowed = ARROWS.get(one.importer, ARROWS[package])
            if within(one.target, ("lcsb.cli",)) and one.importer not in ABOVE_CLI:
                reason = "nothing imports the command line"
            elif target == package or within(one.target, allowed):
                continue
            else:
                who = one.importer if one.importer in ARROWS else package
                reason = f"{who} may import of the others only {allowed}"
        elif target in ("tests", "benchmarks"):
            reason = "no package imports tests or benchmarks"
        elif package == "bcd_theory" and target not in sys.stdlib_module_names | THEORY_MAY_IMPORT:
            if one.lazy and target in THEORY_LAZY.get(one.importer, ()):
                continue
            reason = f"bcd_theory imports only {sorted(THEORY_MAY_IMPORT)} and the standard library"
        elif package == "reports" and target in CLOSED_TO_REPORTS:
            reason = "reports loads no torch"
        else:
            continue
        problems.append(f"{one.importer}:{one.line} imports {one.target}: {reason}")
    return problems


def find_circles(imports: list[Import]) -> list[list[str]]:
    """Circles among modules, each as the list of its modules, by Tarjan's strongly connected components."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        if one.runs:
            graph.setdefault(one.importer, set()).add(one.target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1 or node in graph.get(node, ()):
                circles.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return circles


def undeclared(imports: list[Import], core: set[str], extras: set[str]) -> list[str]:
    """Third-party imports that pyproject.toml does not promise: core at module level, core or an extra if lazy."""
    problems = []
    for one in imports:
        top = one.target.partition(".")[0]
        if top in sys.stdlib_module_names or top in PACKAGES or not one.runs or one.called:
            continue
        distribution = DISTRIBUTIONS.get(top, top.lower().replace("_", "-"))
        if distribution not in (core | extras if one.lazy else core):
            where = (
                "a dependency or an extra"
                if one.lazy
                else "a core dependency (an extra is imported inside a function)"
            )
            problems.append(f"{one.importer}:{one.line} imports {top}, which is not {where}")
    return problems


def read_packages() -> list[Import]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert {path.relative_to(ROOT).parts[0] for path in paths} == set(PACKAGES)
    sources = {module_name(path, ROOT): path.read_text(encoding="utf-8") for path in paths}
    packages = {module_name(path, ROOT) for path in paths if path.name == "__init__.py"}
    return read_imports(sources, packages)


def planted(sources: Mapping[str, str]) -> list[Import]:
    """Imports of planted modules; names without a dot are packages."""
    return read_imports(sources, {name for name in sources if "." not in name})


WRONG_ARROWS = {
    "theory knows no torch": {"bcd_theory.linear": "import torch"},
    "theory knows no torch, even lazily": {"bcd_theory.linear": "def f():\n    import torch.nn"},
    "theory knows no torch, even for types": {
        "bcd_theory.linear": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"
    },
    "theory knows no file format": {"bcd_theory.predictions": "from pydantic import BaseModel"},
    "theory knows no report": {"bcd_theory.predictions": "from reports import records"},
    "PEPit only in certificates": {"bcd_theory.linear": "def f():\n    import PEPit"},
    "PEPit only lazily": {"bcd_theory.certificates": "import PEPit"},
    "reports knows no torch": {"reports.records": "from torch import nn"},
    "reports knows no torch by import_module": {
        "reports.records": "import importlib\nx = importlib.import_module('torch')"
    },
    "reports reads folders, not lcsb": {"reports.judge": "import lcsb.models"},
    "reports reads folders, not simulations": {
        "reports.judge": "def f():\n    from simulations import runner"
    },
    "simulations knows no trainer": {"simulations.runner": "from lcsb.trainer import LCSBTrainer"},
    "simulations knows not the package itself": {
        "simulations.runner": "from lcsb import LCSBConfig",
        "lcsb": "",
    },
    "simulations knows no proofs": {"simulations.runner": "import proofs"},
    "a longer name is not a prefix": {"simulations.runner": "import lcsb.optimistic"},
    "lcsb knows no simulations": {"lcsb.trainer": "import simulations.runner"},
    "lcsb knows no proofs": {"lcsb.doctor": "def f():\n    import proofs.check"},
    "proofs knows no lcsb": {"proofs.check": "from lcsb.selective import selective_backward"},
    "nothing imports the top": {"lcsb.trainer": "from lcsb.cli import main", "lcsb.cli": ""},
    "nothing imports the top, relatively": {"lcsb.trainer": "from . import cli", "lcsb.cli": ""},
    "no package imports tests": {"lcsb.trainer": "from tests.lcsb import tiny"},
}

RIGHT_ARROWS = {
    "theory": {
        "bcd_theory.linear": "import numpy as np\nimport scipy.linalg\nfrom bcd_theory.partition import Blocks"
    },
    "certificates": {"bcd_theory.certificates": "def f():\n    import PEPit"},
    "reports": {
        "reports.judge": "from bcd_theory import predict\nfrom . import records\nimport pydantic, matplotlib"
    },
    "simulations": {
        "simulations.runner": "import torch\nfrom lcsb import optim\nfrom lcsb.selective import selective_backward",
        "lcsb": "",
        "lcsb.optim": "",
    },
    "command line": {
        "lcsb.cli": "import simulations.runner, proofs.check, reports.judge\nfrom lcsb import models",
        "lcsb": "",
    },
    "python -m lcsb": {"lcsb.__main__": "from lcsb.cli import main", "lcsb.cli": ""},
}


@pytest.mark.parametrize("name", WRONG_ARROWS)
def test_checker_finds_a_wrong_arrow(name: str) -> None:
    assert len(broken_arrows(planted(WRONG_ARROWS[name]))) == 1


@pytest.mark.parametrize("name", RIGHT_ARROWS)
def test_checker_lets_right_arrows_pass(name: str) -> None:
    assert broken_arrows(planted(RIGHT_ARROWS[name])) == []


def test_checker_finds_circles() -> None:
    two = planted({"lcsb.a": "from lcsb.b import x", "lcsb.b": "def f():\n    import lcsb.a"})
    assert find_circles(two) == [["lcsb.a", "lcsb.b"]]
    through_package = planted(
        {"lcsb": "from lcsb.a import x", "lcsb.a": "from lcsb.b import y", "lcsb.b": "from lcsb import x"}
    )
    assert find_circles(through_package) == [["lcsb", "lcsb.a", "lcsb.b"]]
    relative = planted({"lcsb": "", "lcsb.a": "from . import b", "lcsb.b": "from .a import x"})
    assert find_circles(relative) == [["lcsb.a", "lcsb.b"]]
    for_types_only = planted({"lcsb.a": "import lcsb.b", "lcsb.b": "if TYPE_CHECKING:\n    import lcsb.a"})
    assert find_circles(for_types_only) == []
    diamond = planted(
        {
            "lcsb.a": "import lcsb.b, lcsb.c",
            "lcsb.b": "import lcsb.d",
            "lcsb.c": "import lcsb.d",
            "lcsb.d": "",
        }
    )
    assert find_circles(diamond) == []


def test_checker_finds_undeclared_imports() -> None:
    imports = planted(
        {
            "lcsb.a": "import numpy, os, reports\nimport gguf",
            "lcsb.b": "def f():\n    import gguf\n    import trl",
        }
    )
    problems = undeclared(imports, core={"numpy"}, extras={"gguf"})
    assert [line.split(",")[0] for line in problems] == ["lcsb.a:2 imports gguf", "lcsb.b:3 imports trl"]


def test_arrows() -> None:
    assert broken_arrows(read_packages()) == []


def test_no_circles() -> None:
    assert find_circles(read_packages()) == []


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^A-Za-z0-9._-]", line)[0].lower().replace("_", "-") for line in requirements}

    extras = names([line for lines in project["optional-dependencies"].values() for line in lines])
    assert undeclared(read_packages(), names(project["dependencies"]), extras) == []


@pytest.mark.parametrize("package", ["bcd_theory", "reports"])
def test_loading_brings_no_torch(package: str) -> None:
    modules = [module_name(path, ROOT) for path in sorted((ROOT / package).rglob("*.py"))]
    loading = "\n".join(f"import {name}" for name in modules if not name.endswith("__main__"))
    code = f"{loading}\nimport sys\nprint(sorted({CLOSED_TO_REPORTS!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
