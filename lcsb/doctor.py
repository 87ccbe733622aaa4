"""What is wrong with this installation, and the line that mends it.

`diagnose()` runs every check and never raises: a check that breaks is itself a failed check. Results hold no host name,
user name or path, so they may be pasted into a bug report. torch is imported inside the checks, not with this module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

PACKAGES = ("bcd_theory", "lcsb", "simulations", "reports", "proofs")
MINIMUM_PYTHON = (3, 11)
# Two arms side by side at about 1.1 GiB each, the coordinating process, and a little air.
NEEDED_MEMORY = 3 * 2**30
# The demo model as it comes and converted, twice over.
NEEDED_DISK = 2**30
NEEDED_COQ = "8.16"
# The largest gap of the NF4 table, between -1 and -0.696: a rounding error is at most half of it times absmax.
NF4_LARGEST_ERROR = 0.1520


@dataclass(frozen=True)
class Check:
    """One finding.

    status: `ok`; `warn`: works, but slower or with a part missing; `fail`: the main job will not run.
    mend: one command or sentence, empty where nothing need be done.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    expected: str
    mend: str = ""


def diagnose() -> list[Check]:
    """All checks, in the order in which they are best mended."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", check_python),
        ("this project", check_project),
        ("versions", check_versions),
        ("torch", check_torch),
        ("torchvision", check_torchvision),
        ("imports", check_imports),
        ("bitsandbytes", check_bitsandbytes),
        ("processor", check_processor),
        ("threads", check_threads),
        ("thread pools", check_thread_pools),
        ("memory", check_memory),
        ("cache", check_cache),
        ("demo model", check_demo_model),
        ("coq", check_coq),
    ]
    return [_guarded(name, check) for name, check in checks]


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a diagnosis must go on whatever is broken
        return Check(
            name, "fail", without_paths(f"{type(error).__name__}: {error}"), "the check runs", _REINSTALL
        )


_REINSTALL = "make install, or: pip install -c constraints.txt -e '.[demo]'"


def without_paths(text: str) -> str:
    """The first line of a message, absolute paths cut down to their last part."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    return re.sub(r"(?<![\w.])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\",]+)*[/\\](?=[^\s/\\])", "", first)


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Python's version."""
    found, expected = ".".join(map(str, version)), f"{'.'.join(map(str, MINIMUM_PYTHON))} or newer"
    if version[:2] < MINIMUM_PYTHON:
        return Check("python", "fail", found, expected, "make clean-all install PYTHON=python3.11")
    return Check("python", "ok", found, expected)


def check_project() -> Check:
    """All five packages come from one place: `reports` and `proofs` are names that another folder may well have."""
    expected = "all five packages from one installation"
    home = Path(__file__).resolve().parent.parent
    strangers = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or Path(spec.origin).resolve().parent.parent != home:
            strangers.append(name)
    if strangers:
        found = f"{', '.join(strangers)}: missing, or shadowed by something else of that name"
        return Check(
            "this project", "fail", found, expected, "run from another folder, or rename yours; " + _REINSTALL
        )
    return Check("this project", "ok", f"version {importlib.metadata.version('lcsb')}", expected)


def check_versions(requirements: list[str] | None = None) -> Check:
    """Installed versions of the core dependencies against this project's metadata."""
    lines = importlib.metadata.requires("lcsb") or [] if requirements is None else requirements
    core = [
        one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"extra": ""})
    ]
    wrong = []
    for one in core:
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{one.name} is missing (needed: {one})")
            continue
        if not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{one.name} {version} (needed: {one})")
    expected = f"{len(core)} packages within their declared ranges"
    if wrong:
        return Check("versions", "fail", "; ".join(wrong), expected, _REINSTALL)
    return Check("versions", "ok", f"{len(core)} of {len(core)}", expected)


def check_torch() -> Check:
    """CPU or CUDA build, and whether it suits the machine."""
    import torch

    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    device = "a CUDA device" if torch.cuda.is_available() else "no CUDA device"
    found, expected = f"{torch.__version__}, {build}, {device} in reach", "a build that suits the machine"
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        mend = "check nvidia-smi, then install a CUDA build of the same torch version (pytorch.org/get-started/locally)"
        return Check("torch", "warn", found + ", though an NVIDIA driver is installed", expected, mend)
    return Check("torch", "ok", found, expected)


def check_torchvision() -> Check:
    """A torchvision built for another torch makes `from peft import LoraConfig` fail."""
    expected = "absent, or built for the installed torch"
    if importlib.util.find_spec("torchvision") is None:
        return Check("torchvision", "ok", "absent", expected)
    try:
        importlib.import_module("torchvision")
    except (
        Exception
    ) as error:  # it raises RuntimeError, OSError or ImportError according to what does not fit
        return Check("torchvision", "fail", without_paths(str(error)), expected, "pip uninstall torchvision")
    return Check("torchvision", "ok", importlib.metadata.version("torchvision"), expected)


def check_imports() -> Check:
    """The libraries that a training run imports."""
    names = ("numpy", "scipy", "transformers", "peft", "safetensors", "accelerate")
    broken = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # any failure here is what is being looked for
            broken.append(without_paths(f"{name}: {error}"))
    expected = ", ".join(names)
    if broken:
        return Check("imports", "fail", "; ".join(broken), expected, _REINSTALL)
    return Check("imports", "ok", "all", expected)


def check_bitsandbytes() -> Check:
    """The native CPU library, by an NF4 round trip whose error is bounded by the table's largest gap."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    expected = f"NF4 round trip on the CPU with an error of at most {NF4_LARGEST_ERROR} absmax"
    values = torch.linspace(-1.0, 1.0, 4096)
    packed, state = quantize_4bit(values, blocksize=64, quant_type="nf4")
    scales = values.view(-1, 64).abs().amax(dim=1, keepdim=True)
    error = float(((dequantize_4bit(packed, state).view(-1, 64) - values.view(-1, 64)) / scales).abs().max())
    found = f"{importlib.metadata.version('bitsandbytes')}, error {error:.4f} absmax"
    if not 0 < error <= NF4_LARGEST_ERROR:
        mend = "pip install -c constraints.txt --force-reinstall --no-deps bitsandbytes"
        return Check("bitsandbytes", "fail", found, expected, mend)
    return Check("bitsandbytes", "ok", found, expected)


def check_processor(cpuinfo: str | None = None) -> Check:
    """Vector and bf16 instructions, from the text of /proc/cpuinfo."""
    expected = "AVX2 or NEON; bf16 instructions are a bonus"
    text = _read("/proc/cpuinfo") if cpuinfo is None else cpuinfo
    flags = set(text.split())
    if not flags:
        return Check("processor", "ok", f"{platform.machine()}, flags not readable here", expected)
    bf16 = sorted(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    tail = f"bf16 by {', '.join(bf16)}" if bf16 else "no bf16 instructions: float32 compute is the faster"
    wide = next((name for name in ("avx512f", "avx2", "asimd", "neon") if name in flags), None)
    if wide is None:
        return Check(
            "processor", "warn", f"no vector instructions found; {tail}", expected, "use a newer machine"
        )
    return Check("processor", "ok", f"{wide}; {tail}", expected)


def usable_cores(affinity: int | None = None, cpu_max: str | None = None) -> int:
    """Cores this process may use: its affinity, cut by the container's CPU quota (text of cgroup's cpu.max)."""
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (
        (_read("/sys/fs/cgroup/cpu.max") if cpu_max is None else cpu_max).strip().partition(" ")
    )
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return max(1, min(affinity, round(int(quota) / int(period))))
    return affinity


def check_threads(threads: int | None = None, cores: int | None = None) -> Check:
    """torch's threads against the cores there are: more threads than cores is slower than one thread."""
    if threads is None:
        import torch

        threads = torch.get_num_threads()
    cores = usable_cores() if cores is None else cores
    found, expected = f"{threads} on {cores} usable cores", "no more threads than usable cores"
    if threads > cores:
        return Check("threads", "warn", found, expected, f"export OMP_NUM_THREADS={cores}")
    return Check("threads", "ok", found, expected)


def check_thread_pools() -> Check:
    """BLAS libraries and OpenMP runtimes loaded beside each other."""
    import numpy
    import torch

    expected = "one OpenMP runtime"
    numpy_blas = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    found = f"numpy {numpy_blas}, torch {'MKL' if torch.backends.mkl.is_available() else 'without MKL'}"
    if importlib.util.find_spec("threadpoolctl") is None:
        return Check(
            "thread pools", "ok", f"{found}; threadpoolctl is absent, so runtimes were not counted", expected
        )
    pools = importlib.import_module("threadpoolctl").threadpool_info()
    runtimes = sorted({str(pool["prefix"]) for pool in pools if pool["user_api"] == "openmp"})
    found = f"{found}; OpenMP: {', '.join(runtimes) or 'none'}"
    if len(runtimes) > 1:
        return Check(
            "thread pools",
            "warn",
            found,
            expected,
            "reinstall torch and numpy from one source (pip or conda)",
        )
    return Check("thread pools", "ok", found, expected)


def available_memory(
    meminfo: str | None = None, limit: str | None = None, used: str | None = None
) -> int | None:
    """Bytes that can still be used: MemAvailable, cut by the container's limit; None where neither can be read."""
    match = re.search(
        r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo") if meminfo is None else meminfo, re.MULTILINE
    )
    candidates = [int(match[1]) * 1024] if match else []
    limit = (_read("/sys/fs/cgroup/memory.max") if limit is None else limit).strip()
    used = (_read("/sys/fs/cgroup/memory.current") if used is None else used).strip()
    if limit.isdigit() and used.isdigit():
        candidates.append(max(0, int(limit) - int(used)))
    return min(candidates, default=None)


def check_memory(available: int | None = None) -> Check:
    """Memory for the main job."""
    available = available_memory() if available is None else available
    expected = f"{NEEDED_MEMORY / 2**30:.0f} GiB available, for two arms side by side"
    if available is None:
        return Check("memory", "ok", "not readable on this system", expected)
    found = f"{available / 2**30:.1f} GiB available"
    if available < NEEDED_MEMORY:
        return Check("memory", "warn", found, expected, "lcsb validate --set workers=1")
    return Check("memory", "ok", found, expected)


def check_cache() -> Check:
    """The folder for converted models can be written and has room."""
    from lcsb.cache import cache_root

    expected = f"writable, {NEEDED_DISK / 2**30:.0f} GiB free"
    mend = "export LCSB_CACHE=<a folder that can be written and has room>"
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root) as file:
            file.write(b"lcsb")
            file.flush()
        free = shutil.disk_usage(root).free
    except OSError as error:
        return Check("cache", "fail", f"not writable: {error.strerror}", expected, mend)
    found = f"writable, {free / 2**30:.1f} GiB free"
    if free < NEEDED_DISK:
        return Check("cache", "fail", found, expected, mend)
    return Check("cache", "ok", found, expected)


def check_demo_model() -> Check:
    """The built-in default model's file, by its sha256."""
    from lcsb.gguf_files import BUILTIN_MODELS, builtin_gguf

    name, expected = "smollm2-135m", "present, with the known sha256"
    install = BUILTIN_MODELS[name].install
    try:
        with builtin_gguf(name) as path:
            size = path.stat().st_size
    except ModuleNotFoundError:
        return Check("demo model", "warn", f"{name} is absent", expected, install)
    except ValueError as error:
        return Check(
            "demo model", "fail", without_paths(str(error)), expected, f"{install} --force-reinstall"
        )
    return Check("demo model", "ok", f"{name}, {size / 2**20:.0f} MiB", expected)


def check_coq() -> Check:
    """Coq, which only re-checking the proofs needs."""
    expected = f"Coq {NEEDED_COQ} (only re-checking the proofs needs it)"
    mend = "apt-get install --no-install-recommends coq libcoq-coquelicot"
    compiler = shutil.which("coqc")
    if compiler is None:
        return Check("coq", "warn", "absent", expected, mend)
    done = subprocess.run(
        [compiler, "--print-version"], capture_output=True, text=True, timeout=30, check=True
    )
    version = done.stdout.split()[0]
    if not version.startswith(NEEDED_COQ + "."):
        return Check("coq", "warn", f"Coq {version}, not tried", expected)
    return Check("coq", "ok", f"Coq {version}", expected)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
