"""An arm's checkpoint: everything comes back bit for bit, or nothing was written; damage is named."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from lcsb.checkpoint import load_checkpoint, save_checkpoint


def trained(seed=0, size=64):
    """Two parameters, the second never stepped, and an AdamW after two steps of the first."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {name: torch.nn.Parameter(torch.randn(size, size, generator=generator)) for name in "ab"}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    for _ in range(2):
        parameters["a"].grad = torch.randn(size, size, generator=generator)
        optimizer.step()
    return parameters, optimizer


def content(parameters, optimizer):
    tensors = {name: p.detach().clone() for name, p in parameters.items()}
    for name, p in parameters.items():
        tensors |= {
            f"{name}/{key}": torch.as_tensor(v).clone() for key, v in optimizer.state.get(p, {}).items()
        }
    return tensors


def test_everything_comes_back(tmp_path):
    parameters, optimizer = trained()
    torch.manual_seed(3)
    save_checkpoint(tmp_path / "c", parameters, optimizer, {"t": 2, "loss": 0.1 + 0.2})
    expected, drawn = content(parameters, optimizer), torch.rand(3)
    others, other = trained(seed=1)
    torch.manual_seed(4)
    assert load_checkpoint(tmp_path / "c", others, other) == {"t": 2, "loss": 0.1 + 0.2}
    assert torch.equal(torch.rand(3), drawn)
    found = content(others, other)
    assert found.keys() == expected.keys() and "a/exp_avg" in found and "b/exp_avg" not in found
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(tmp_path):
    parameters, optimizer = trained()
    save_checkpoint(tmp_path / "first", parameters, optimizer, {"t": 2})
    expected, limits = content(parameters, optimizer), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            OSError, match=r"second: the checkpoint cannot be written \(.+\); earlier ones are whole"
        ) as end:
            save_checkpoint(tmp_path / "second", parameters, optimizer, {"t": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(end.value)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    others, other = trained(seed=1)
    load_checkpoint(tmp_path / "first", others, other)
    found = content(others, other)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_read_only_disk_is_one_line():
    with pytest.raises(OSError, match=r"^/proc/lcsb: the checkpoint cannot be written \("):
        save_checkpoint(
            Path("/proc/lcsb"), *trained(), {"t": 0}
        )  # nobody may make a folder there, not even root


def test_damage_is_named(tmp_path):
    parameters, optimizer = trained()
    save_checkpoint(tmp_path / "c", parameters, optimizer, {"t": 2})
    state, facts = tmp_path / "c" / "state.safetensors", tmp_path / "c" / "state.json"
    whole = state.read_bytes()
    state.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"c/state\.safetensors: cannot be read"):
        load_checkpoint(tmp_path / "c", parameters, optimizer)
    state.write_bytes(whole)
    text = facts.read_text()
    facts.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"c/state\.json"):
        load_checkpoint(tmp_path / "c", parameters, optimizer)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    parameters, optimizer = trained()
    save_checkpoint(tmp_path / "c", parameters, optimizer, {"t": 2})
    with pytest.raises(ValueError, match="checkpoint of another model; 'b' is not in the model"):
        load_checkpoint(tmp_path / "c", {"a": parameters["a"]}, optimizer)
    smaller, other = trained(size=32)
    with pytest.raises(ValueError, match=r"'a' has shape \[64, 64\], expected \[32, 32\]"):
        load_checkpoint(tmp_path / "c", smaller, other)
