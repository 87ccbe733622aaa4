"""lcsb.doctor: a sound installation passes, and each planted fault is found with the line that mends it."""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from lcsb import doctor, gguf_files
from lcsb.doctor import Check

GIB = 2**30


@pytest.fixture(scope="module")
def findings() -> list[Check]:
    return doctor.diagnose()


def test_this_installation_has_no_failure(findings: list[Check]) -> None:
    assert [one for one in findings if one.status == "fail"] == []
    assert len({one.name for one in findings}) == len(findings)


def test_findings_hold_no_host_user_or_path(findings: list[Check]) -> None:
    text = json.dumps([asdict(one) for one in findings])
    for secret in (platform.node(), str(Path.home()), str(Path(doctor.__file__).parent), sys.prefix):
        assert secret not in text
    if getpass.getuser() != "root":
        assert getpass.getuser() not in text


def test_loading_the_module_brings_no_torch() -> None:
    code = "import lcsb.doctor, sys; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
    )


def test_a_broken_check_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise RuntimeError("cannot read /home/somebody/secret/file.so\nsecond line")

    monkeypatch.setattr(doctor, "check_torch", broken)
    found = {one.name: one for one in doctor.diagnose()}["torch"]
    assert found.status == "fail"
    assert found.found == "RuntimeError: cannot read file.so"


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10, 12), "fail"), ((3, 11, 0), "ok"), ((4, 0, 0), "ok")]
)
def test_python(version: tuple[int, ...], status: str) -> None:
    assert doctor.check_python(version).status == status


def test_versions_names_what_is_missing_and_what_does_not_fit() -> None:
    numpy = importlib.metadata.version("numpy")
    requirements = ["numpy<1", "a-package-nobody-has>=2", "scipy", "nothing-either; extra == 'dev'"]
    found = doctor.check_versions(requirements)
    assert found.status == "fail"
    assert f"numpy {numpy} (needed: numpy<1)" in found.found
    assert "a-package-nobody-has is missing" in found.found
    assert "scipy" not in found.found and "nothing-either" not in found.found
    assert doctor.check_versions(["scipy"]).status == "ok"


def test_torchvision_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    found = doctor.check_torchvision()
    assert found == Check(
        "torchvision",
        "fail",
        "operator torchvision::nms does not exist",
        found.expected,
        "pip uninstall torchvision",
    )


def test_a_folder_that_shadows_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "reports"]:
        monkeypatch.delitem(sys.modules, name)
    found = doctor.check_project()
    assert found.status == "fail" and found.found.startswith("reports: ")


def test_threads_beyond_the_cores() -> None:
    assert doctor.check_threads(threads=2, cores=2).status == "ok"
    found = doctor.check_threads(threads=64, cores=2)
    assert (found.status, found.mend) == ("warn", "export OMP_NUM_THREADS=2")


@pytest.mark.parametrize(
    ("affinity", "cpu_max", "cores"),
    [
        (64, "max 100000", 64),
        (64, "200000 100000", 2),
        (2, "800000 100000", 2),
        (8, "50000 100000", 1),
        (8, "", 8),
    ],
)
def test_usable_cores(affinity: int, cpu_max: str, cores: int) -> None:
    assert doctor.usable_cores(affinity, cpu_max) == cores


@pytest.mark.parametrize(
    ("meminfo", "limit", "used", "expected"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    8388608 kB\n", "max", "5", 8 * GIB),
        ("MemAvailable:    8388608 kB\n", str(2 * GIB), str(GIB), GIB),
        ("MemAvailable:    1024 kB\n", str(2 * GIB), str(GIB), 2**20),
        ("", "max", "", None),
    ],
)
def test_available_memory(meminfo: str, limit: str, used: str, expected: int | None) -> None:
    assert doctor.available_memory(meminfo, limit, used) == expected


def test_little_memory_is_a_warning() -> None:
    assert doctor.check_memory(4 * GIB).status == "ok"
    assert doctor.check_memory(1 * GIB).status == "warn"


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        ("flags : fpu avx2 avx512f avx512_bf16 amx_bf16", "ok", "avx512f; bf16 by amx_bf16, avx512_bf16"),
        ("flags : fpu avx2", "ok", "avx2; no bf16 instructions"),
        ("Features : fp asimd bf16", "ok", "asimd; bf16 by bf16"),
        ("flags : fpu sse2", "warn", "no vector instructions"),
    ],
)
def test_processor(flags: str, status: str, says: str) -> None:
    found = doctor.check_processor(flags)
    assert found.status == status and found.found.startswith(says)


def test_bitsandbytes_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional as functional

    right = functional.dequantize_4bit
    monkeypatch.setattr(functional, "dequantize_4bit", lambda packed, state: right(packed, state) * 1.5)
    assert doctor.check_bitsandbytes().status == "fail"


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("LCSB_CACHE", str(tmp_path / "file" / "cache"))
    found = doctor.check_cache()
    assert found.status == "fail" and "LCSB_CACHE" in found.mend
    monkeypatch.setenv("LCSB_CACHE", str(tmp_path / "fresh"))
    assert doctor.check_cache().status == "ok"
    assert list((tmp_path / "fresh").iterdir()) == []


def test_demo_model_absent_or_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builtin = gguf_files.BUILTIN_MODELS["smollm2-135m"]
    absent = type(builtin)(
        (("a_package_nobody_has", "file.gguf"),), builtin.sha256, builtin.install, builtin.licence
    )
    monkeypatch.setitem(gguf_files.BUILTIN_MODELS, "smollm2-135m", absent)
    found = doctor.check_demo_model()
    assert (found.status, found.mend) == ("warn", builtin.install)

    (tmp_path / "planted_model").mkdir()
    (tmp_path / "planted_model" / "__init__.py").write_text("")
    (tmp_path / "planted_model" / "file.gguf").write_bytes(b"GGUF but not the right one")
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = type(builtin)((("planted_model", "file.gguf"),), builtin.sha256, builtin.install, builtin.licence)
    monkeypatch.setitem(gguf_files.BUILTIN_MODELS, "smollm2-135m", wrong)
    assert doctor.check_demo_model().status == "fail"


def test_coq_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = doctor.check_coq()
    assert found.status == "warn" and "libcoq-coquelicot" in found.mend


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cannot open /usr/lib/x/libfoo.so: no such file", "cannot open libfoo.so: no such file"),
        ("nothing to hide", "nothing to hide"),
        ("C:\\Users\\me\\model.gguf is bad", "model.gguf is bad"),
        ("'/home/me/a.b' or 3/4", "'a.b' or 3/4"),
        ("", ""),
    ],
)
def test_without_paths(text: str, expected: str) -> None:
    assert doctor.without_paths(text) == expected
