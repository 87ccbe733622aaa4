"""Data parallel training in two processes (gloo): one process with the doubled batch; only selected layers are sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import parallel_worker
import pytest
import tiny
from safetensors.torch import load_file

from lcsb.cli import main
from lcsb.distributed import Replicas
from lcsb.launch import refuse_unsupported_launch

WORKER = Path(parallel_worker.__file__)
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"],
    # On a machine without GPUs this flag means: start the processes as torchrun does.
    "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
                   "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"],
}  # fmt: skip


def launch(out, batch, accumulation, config, variant="nothing", launcher="torchrun", check=True):
    out.mkdir(exist_ok=True)
    arguments = [str(WORKER), str(out), str(batch), str(accumulation), json.dumps(config), variant]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], *arguments], env=environment, capture_output=True, text=True
    )
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def read(out, rank):
    return json.loads((out / f"rank-{rank}.json").read_text()), load_file(out / f"rank-{rank}.safetensors")


CASES = {
    "exact": {"layers_per_step": 1},
    "shuffled, frozen, mlp": {
        "backward": "mlp",
        "idle": "frozen",
        "schedule": "shuffled",
        "layers_per_step": 2,
    },
    "importance": {"schedule": "importance", "layers_per_step": 2, "refresh_every": 3},
}


@pytest.mark.parametrize(
    "case", [c if c == "exact" else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_two_processes_are_one_with_the_doubled_batch(tmp_path, case):
    """U51."""
    launcher, accumulation = ("accelerate", 2) if case == "exact" else ("torchrun", 1)
    launch(tmp_path / "two", 1, accumulation, CASES[case], launcher=launcher)
    (tmp_path / "one").mkdir()
    parallel_worker.main(tmp_path / "one", 2, accumulation, json.dumps(CASES[case]))
    (first, weights), (second, others) = read(tmp_path / "two", 0), read(tmp_path / "two", 1)
    alone, expected = read(tmp_path / "one", 0)
    assert first["selected"] == second["selected"] == alone["selected"]
    assert first["wrapped"] == "PeftModelForCausalLM"
    assert first["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    for name, value in expected.items():
        assert float((weights[name] - value).norm() / value.norm()) < 1e-6, name
        assert (others[name] == weights[name]).all(), name
    sizes = [
        sum(
            p.numel() * 4
            for n, p in tiny.with_lora(tiny.llama()).named_parameters()
            if f"layers.{i}." in n and "lora_" in n
        )
        for i in range(4)
    ]
    sent = sum(sizes[int(layer)] for step in first["selected"] for layer in step.split(","))
    assert first["bytes"] == second["bytes"] == sent
    assert alone["bytes"] == 0


@pytest.mark.slow
def test_certified_plans_hold_on_every_process(tmp_path):
    """A plan must keep the cosine on each process's batch, so it may differ from one process's on the whole batch."""
    launch(tmp_path / "two", 1, 1, {"backward": "certified", "layers_per_step": 1, "refresh_every": 3})
    (first, weights), (second, others) = read(tmp_path / "two", 0), read(tmp_path / "two", 1)
    assert first["selected"] == second["selected"] and first["norms"] == second["norms"]
    assert all((others[name] == value).all() for name, value in weights.items())


def test_callback_in_two_processes_is_refused(tmp_path):
    done = launch(tmp_path / "two", 1, 1, {"layers_per_step": 1}, "callback", check=False)
    assert done.returncode != 0
    assert "LCSBCallback in 2 processes, expected 1" in done.stderr


@pytest.mark.slow
def test_processes_with_other_seeds_are_refused(tmp_path):
    done = launch(
        tmp_path / "two", 1, 1, {"schedule": "random", "layers_per_step": 1}, "other-seed", check=False
    )
    assert done.returncode != 0
    assert "has another schedule than rank" in done.stderr


@pytest.mark.parametrize(
    ("variable", "name"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")]
)
def test_sharding_is_refused(monkeypatch, variable, name):
    """U51."""
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=f"{name} .{variable} is set.: not supported"):
        refuse_unsupported_launch()


def test_what_runs_in_one_process_says_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse_unsupported_launch()
    with pytest.raises(ValueError, match="lcsb validate was started in 2 processes, expected 1"):
        refuse_unsupported_launch("lcsb validate")


ONE_PROCESS = {
    "validate": [],
    "measure": ["run"],
    "run": ["run"],
    "evaluate": ["--task", "gsm8k"],
    "merge": ["--adapter", "adapter", "--out", "merged"],
    "sweep": ["grid.yaml"],
}


def refusal(arguments, monkeypatch, capsys):
    """The one line with which `lcsb ARGUMENTS` ends."""
    monkeypatch.setattr(sys, "argv", ["lcsb", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    output = capsys.readouterr()
    assert (stop.value.code, output.out) == (2, "")
    (line,) = output.err.splitlines()
    return line


@pytest.mark.parametrize("command", ONE_PROCESS)
def test_commands_of_one_process_say_so(tmp_path, monkeypatch, capsys, command):
    """U51. Before anything is read: neither the run folder nor the adapter is there, and that is not what is said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refusal([command, *ONE_PROCESS[command]], monkeypatch, capsys)
    assert line.startswith(
        f"lcsb: lcsb {command} was started in 2 processes, expected 1; data parallel training"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "name"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")]
)
def test_the_command_refuses_sharding_before_anything_is_read(tmp_path, monkeypatch, capsys, variable, name):
    """U51."""
    monkeypatch.setenv(variable, "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refusal(["train", str(tmp_path / "absent"), "--arm", "full"], monkeypatch, capsys)
    assert line.startswith(f"lcsb: {name} ({variable} is set): not supported")


def test_a_refused_launch_has_imported_no_torch(tmp_path):
    code = (
        "import sys\n"
        "sys.argv = ['lcsb', 'train', 'absent', '--arm', 'full']\n"
        "from lcsb.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert stop.code == 2, stop.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "ACCELERATE_USE_FSDP": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("lcsb: FSDP"), done.stderr


def test_alone_nothing_happens():
    replicas = Replicas()
    assert (replicas.rank, replicas.size, replicas.bytes_sent) == (0, 1, 0)
    replicas.average_gradients({})
    replicas.wait()
