"""The type and the device that the memory engine computes in."""

from __future__ import annotations

import pytest
import tiny_packed
import torch

from lcsb import LCSBConfig
from lcsb.engine import compute
from lcsb.engine.engine import Engine, LoRASettings, Residency
from lcsb.engine.kernels import kernel, look_up
from lcsb.engine.packed import pack

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_packed.write(tmp_path_factory.mktemp("packed"), "llama", intermediate_size=128)


def gradients(folder, **settings):
    engine = Engine(folder, LCSBConfig("exact", layers_per_step=2), lora=LoRASettings(r=4), **settings)
    generator = torch.Generator().manual_seed(3)
    engine.load_adapter_tensors(
        {
            name: torch.randn(v.shape, generator=generator) * 0.1
            for name, v in engine.adapter_tensors().items()
        }
    )
    ids = torch.randint(3, 90, (2, 20), generator=generator)
    found = engine.loss_and_gradient(ids)
    return found.loss, torch.cat([found.by_layer[i].cpu() for i in sorted(found.by_layer)])


@pytest.mark.parametrize(
    ("narrow_seconds", "expected"), [(0.5, "bfloat16"), (0.9, "float32"), (3.0, "float32")]
)
def test_the_faster_type_is_taken(monkeypatch, narrow_seconds, expected):
    """bfloat16 is slower than float32 on CPUs that compute it by conversion; it must not be taken there."""
    monkeypatch.setattr(
        compute, "product_seconds", lambda dtype, *shape: narrow_seconds if dtype == torch.bfloat16 else 1.0
    )
    assert compute.compute_dtype("auto", CPU, 64, 64) == getattr(torch, expected)


def test_seconds_are_measured():
    assert 0 < compute.product_seconds(torch.float32, CPU, 64, 64) < 1


def test_another_type_is_refused(folder):
    with pytest.raises(
        ValueError, match="compute_dtype: found 'float16', expected auto, float32 or bfloat16"
    ):
        Engine(folder, compute_dtype="float16")


def test_products_in_bfloat16(folder):
    """Each product is rounded to 8 bits: loss within 1e-2, gradients within 10 %."""
    loss, exact = gradients(folder, compute_dtype="float32")
    rounded_loss, rounded = gradients(folder, compute_dtype="bfloat16")
    assert rounded_loss == pytest.approx(loss, rel=1e-2) and rounded_loss != loss
    error = float((rounded - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1


def test_kernels_agree():
    """Every kernel gives the float32 weights, rounded once to the tile's type."""
    codes, scales = pack(torch.randn(64, 192, generator=torch.Generator().manual_seed(0)))
    exact = torch.empty(64, 192)
    look_up(codes, scales, 64, exact)
    for dtype in (torch.float32, torch.bfloat16):
        tile = torch.empty(64, 192, dtype=dtype)
        kernel(dtype, "cpu")(codes, scales, 64, tile)
        assert torch.equal(tile, exact.to(dtype))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "change", [{}, {"inputs": "file"}, {"products": 99}, {"weights": False, "head": False}]
)
def test_gpu_computes_what_the_cpu_computes(folder, tmp_path, change):
    loss, exact = gradients(folder, compute_dtype="float32")
    residency = Residency(folder=tmp_path, **change)
    gpu_loss, ours = gradients(folder, compute_dtype="float32", device="cuda", residency=residency)
    assert gpu_loss == pytest.approx(loss, rel=1e-5)
    assert float((ours - exact).norm() / exact.norm()) < 1e-4
