from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from typer.testing import CliRunner

from lcsb.cli import app
from reports.strict import read_json
from simulations.arms import Arm
from simulations.problems import coupled
from simulations.sweep import Kind, key_of, sweep
from simulations.sweep_kinds import EXPERIMENT, SIMULATION, alike, expand, run_simulations

# This module is no importable package in other processes, so its functions travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

_spec = importlib.util.spec_from_file_location(
    "loop_reference", Path(__file__).with_name("loop_reference.py")
)
assert _spec and _spec.loader
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

CONFIGURATIONS = [{"x": x} for x in range(5)]


def double(configurations):
    if any(c["x"] == 2 for c in configurations):
        raise ArithmeticError("two is refused")
    return [{"twice": 2 * c["x"]} for c in configurations]


def refuse(configurations):
    raise AssertionError("a finished run was computed again")


def deadly(configurations):
    (c,) = configurations
    if c["x"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return [{"twice": 2 * c["x"]}]


def held(configurations):
    """Names its process before a long run, and lets later tries of the same run pass quickly."""
    (c,) = configurations
    path = Path(c["folder"]) / f"started-{c['x']}"
    first = not path.exists()
    if first:
        path.write_text(str(os.getpid()))
    time.sleep(300 if first and c["x"] == 0 else 0.2)
    return [{"twice": 2 * c["x"], "pid": os.getpid()}]


@pytest.mark.parametrize(("jobs", "together"), [(1, None), (1, lambda c: "all"), (2, lambda c: "all")])
def test_one_failed_run_loses_no_other(tmp_path, together, jobs):
    found = sweep(CONFIGURATIONS, tmp_path, double, together=together, jobs=jobs)
    assert len(found.done) == 4 and found.failed == {key_of({"x": 2}): "ArithmeticError: two is refused"}
    assert read_json(tmp_path / f"{key_of({'x': 3})}.json")["result"] == {"twice": 6}
    runs = read_json(tmp_path / "results.json")["runs"]
    assert sorted(run["status"] for run in runs.values()) == ["done"] * 4 + ["failed"]
    assert runs[key_of({"x": 2})]["error"] == "ArithmeticError: two is refused"
    assert "in double" in read_json(tmp_path / f"{key_of({'x': 2})}.failed.json")["trace"]
    assert not list(tmp_path.glob("*.running"))


def test_a_run_that_kills_its_process_loses_no_other(tmp_path):
    found = sweep([{"x": x} for x in range(6)], tmp_path, deadly, jobs=2)
    assert len(found.done) == 5 and list(found.failed) == [key_of({"x": 2})]
    assert "died" in found.failed[key_of({"x": 2})]


def test_a_run_in_flight_when_the_sweep_died_is_done_in_a_process_of_its_own(tmp_path):
    (tmp_path / f"{key_of({'x': 2})}.running").touch()
    found = sweep(CONFIGURATIONS, tmp_path, deadly, jobs=1)
    assert len(found.done) == 4 and len(found.failed) == 1


def test_finished_runs_are_not_computed_again(tmp_path):
    sweep(CONFIGURATIONS, tmp_path, double)
    again = sweep(CONFIGURATIONS, tmp_path, refuse)
    assert len(again.reused) == 4 and len(again.failed) == 1


def test_a_run_that_failed_is_tried_again(tmp_path):
    sweep(CONFIGURATIONS, tmp_path, double)
    again = sweep(CONFIGURATIONS, tmp_path, lambda cs: [{"twice": 2 * c["x"]} for c in cs])
    assert len(again.reused) == 4 and not again.failed and not list(tmp_path.glob("*.failed.json"))


def test_a_damaged_result_is_computed_again(tmp_path):
    sweep([{"x": 1}], tmp_path, double)
    (tmp_path / f"{key_of({'x': 1})}.json").write_text("{")
    assert sweep([{"x": 1}], tmp_path, double).reused == ()
    assert read_json(tmp_path / f"{key_of({'x': 1})}.json")["result"] == {"twice": 2}


def test_a_result_that_is_no_strict_json_fails_its_run_alone(tmp_path):
    found = sweep(
        [{"x": 0}, {"x": 1}], tmp_path, lambda cs: [{"value": float("nan") if c["x"] else 1.0} for c in cs]
    )
    assert found.done == (key_of({"x": 0}),)
    assert found.failed == {key_of({"x": 1}): "ValueError: result.value is nan, expected a finite number"}


def test_the_key_knows_no_order_of_keys():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}) != key_of({"a": 2, "b": 1})


GRID = {
    "arms": [
        {"name": "full", "order": "full"},
        {"name": "lcsb", "optimizer": "sgd-ema", "momentum": 0.9},
        {"name": "adam", "optimizer": "adamw", "order": "random", "betas": [0.8, 0.9]},
    ],
    "problems": [{"n": 12, "p": 3, "condition": 10.0}, {"n": 12, "p": 4}],
    "learning_rates": [0.1, 0.2],
    "seeds": [3, 4],
    "steps": 24,
}


def test_every_combination_is_a_run_of_its_own():
    kind, found = expand(GRID, (EXPERIMENT, SIMULATION))
    assert kind is SIMULATION and len(found) == 3 * 2 * 2 * 2 == len({key_of(c) for c in found})
    longer = expand({**GRID, "seeds": [3, 4, 5]}, (SIMULATION,))[1]
    assert {key_of(c) for c in found} < {key_of(c) for c in longer}


def test_a_simulated_run_is_that_of_the_loop_alone_and_in_company():
    arm = {"name": "lcsb", "optimizer": "sgd-ema", "momentum": 0.9}
    _, found = expand({**GRID, "arms": [arm], "problems": GRID["problems"][:1]}, (SIMULATION,))
    company = run_simulations(found)
    problem = coupled(12, 3, 0.3, 10.0, np.random.default_rng(0))
    for configuration, result in zip(found, company, strict=True):
        start = np.random.default_rng([configuration["seed"], 1]).normal(size=12)
        _, losses, _ = reference.loop_run(
            problem.A, problem.partition.blocks, np.arange(24) % 3, start, configuration["learning_rate"],
            Arm("a", "sgd-ema", momentum=0.9),
        )  # fmt: skip
        assert result["at"] == list(range(0, 25, 3)) and result["status"] == "done"
        np.testing.assert_allclose(result["losses"][1:], losses[2::3], rtol=1e-10)
        np.testing.assert_allclose(
            run_simulations([configuration])[0]["losses"], result["losses"], rtol=1e-12
        )


def test_noise_belongs_to_the_run_and_not_to_its_company():
    _, found = expand(
        {**GRID, "noise": 0.1, "arms": GRID["arms"][1:2], "problems": GRID["problems"][:1]}, (SIMULATION,)
    )
    together = run_simulations(found)
    for configuration, result in zip(found, together, strict=True):
        np.testing.assert_allclose(
            run_simulations([configuration])[0]["losses"], result["losses"], rtol=1e-12
        )
    quiet = run_simulations([{**found[0], "noise": 0.0}])[0]
    assert abs(quiet["final_loss"] - together[0]["final_loss"]) > 1e-6


def test_a_diverged_run_is_a_result_with_the_step_at_which_it_began(tmp_path):
    settings = {
        "arms": [{"name": "full", "order": "full"}], "learning_rates": [0.5, 11.0, 1e200], "unit": "1/L",
        "problems": [{"n": 4, "p": 2, "coupling": 0.0, "condition": 1.0}], "steps": 40,
    }  # fmt: skip
    _, found = expand(settings, (SIMULATION,))
    done = sweep(found, tmp_path, run_simulations, together=alike)
    assert not done.failed
    results = [read_json(tmp_path / f"{key_of(c)}.json")["result"] for c in found]
    assert [r["status"] for r in results] == ["done", "diverged", "diverged"]
    # |x| is multiplied by 10 each step: exactly 1e6 after 6 steps up to rounding, above it after 7.
    assert results[1]["diverged_at"] in (6, 7) and results[2]["diverged_at"] == 1
    assert results[2]["final_loss"] is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seedz": [1]}, "did you mean 'seeds'"),
        ({"problems": [{"couplng": 0.1}]}, "did you mean 'coupling'"),
        ({"arms": [{"name": "a", "optimiser": "sgd"}]}, r"arms\.0\.optimiser; did you mean 'optimizer'"),
        ({"arms": [{"name": "a", "order": "cyclc"}]}, "nearest: cyclic"),
        ({"arms": [{"name": "a"}, {"name": "a"}]}, "'a' twice"),
        ({"learning_rates": []}, "learning_rates"),
        ({"problems": [{"n": 2, "p": 3}]}, "p is 3"),
        ({"kind": "simulations"}, "did you mean 'simulation'"),
        ({"kind": "experiment", "experiments": ["plantd"], "arms": []}, "did you mean 'experiments'"),
    ],
)
def test_a_wrong_setting_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        expand({**GRID, **changed}, (SIMULATION, EXPERIMENT))


def test_unknown_experiments_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'planted'"):
        expand({"kind": "experiment", "experiments": ["plantd"]}, (EXPERIMENT,))


def command(*words):
    found = CliRunner().invoke(app, ["sweep", *map(str, words)])
    return found.exit_code, found.stdout.splitlines()[-1] if found.stdout else "", found


def test_the_command(tmp_path):
    file, out = tmp_path / "grid.yaml", tmp_path / "out"
    file.write_text(json.dumps(GRID))
    code, line, _ = command(file, "--out", out, "--dry-run", "--json")
    assert code == 0 and json.loads(line) == {"kind": "simulation", "total": 24, "finished": 0, "to_run": 24}
    assert not out.exists()
    code, line, _ = command(file, "--out", out, "--json")
    found = json.loads(line)
    assert code == 0 and (found["done"], found["reused"], found["failed"]) == (24, 0, {})
    runs = read_json(out / "results.json")["runs"]
    assert len(runs) == 24 and {run["configuration"]["arm"]["name"] for run in runs.values()} == {
        "full",
        "lcsb",
        "adam",
    }
    code, line, _ = command(file, "--out", out, "--json")
    assert code == 0 and json.loads(line)["reused"] == 24
    assert json.loads(command(file, "--out", out, "--dry-run", "--json")[1])["to_run"] == 0


def test_the_help_shows_whole_examples():
    """A list of names in square brackets is not taken for markup."""
    text = CliRunner().invoke(app, ["sweep", "--help"]).stdout
    for line in (
        "experiments: [limits, rates]",
        "arms: [full, exact-momentum]",
        "learning_rates: [0.5, 1.0, 1.5]",
    ):
        assert line in text


def test_the_command_reports_a_failed_run(tmp_path, monkeypatch):
    import simulations.sweep_kinds as module

    monkeypatch.setattr(module, "SIMULATION", Kind("simulation", lambda settings: CONFIGURATIONS, double))
    (tmp_path / "grid.yaml").write_text("steps: 1")
    code, line, found = command(tmp_path / "grid.yaml", "--out", tmp_path / "out", "--json")
    assert code == 1 and json.loads(line)["failed"] == {key_of({"x": 2}): "ArithmeticError: two is refused"}
    assert "two is refused" in found.stderr


def test_a_wrong_file_is_bad_input(tmp_path):
    (tmp_path / "grid.yaml").write_text("kind: train\nrun: nowhere\n")
    _, _, found = command(tmp_path / "grid.yaml")
    assert isinstance(found.exception, ValueError)
    assert "grid.yaml: run: " in str(found.exception) and "predictions.json is not there" in str(
        found.exception
    )


def test_a_killed_sweep_goes_on_where_it_was(tmp_path):
    """SIGKILL of the sweep itself, in mid-run: what was finished is not done again, and the rest is done."""
    script = tmp_path / "killed.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\nfrom simulations.sweep import sweep\n"
        "def task(configurations):\n"
        "    (c,) = configurations\n"
        "    if c['x'] == 3 and not Path(sys.argv[1], 'again').exists():\n"
        "        time.sleep(60)\n"
        "    with open(Path(sys.argv[1], 'log'), 'a') as log: log.write(f\"{c['x']}\\n\")\n"
        "    return [{'twice': 2 * c['x']}]\n"
        "if __name__ == '__main__':\n"
        "    found = sweep([{'x': x} for x in range(6)], Path(sys.argv[1], 'out'), task)\n"
        "    print(len(found.done), len(found.reused), len(found.failed))\n"
    )
    words = [sys.executable, str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    first = subprocess.Popen(words, env=environment)
    running = tmp_path / "out" / f"{key_of({'x': 3})}.running"
    try:
        deadline = time.monotonic() + 60
        while not running.exists():
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.05)
    finally:
        first.kill()
    assert first.wait() == -signal.SIGKILL and running.exists()
    (tmp_path / "again").touch()
    second = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert second.stdout.split() == ["6", "3", "0"]
    assert sorted((tmp_path / "log").read_text().split()) == list("012345")  # each once
    assert not list((tmp_path / "out").glob("*.running"))


@pytest.fixture
def cluster():
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
    ) as found:
        yield found


def test_a_cluster_survives_a_killed_worker(tmp_path, cluster):
    """Two worker processes; one is killed while it surely holds a run, which is then done elsewhere."""
    from distributed import Client

    with Client(cluster.scheduler_address) as client:
        pids = set(client.run(os.getpid).values())
    assert len(pids) == 2
    killed: list[int] = []
    held_by: list[str] = []

    def kill():
        started = tmp_path / "started-0"
        while not (started.exists() and started.read_text()):
            time.sleep(0.05)
        with Client(cluster.scheduler_address) as client:
            held_by.extend(key for keys in client.processing().values() for key in keys)
        killed.append(int(started.read_text()))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    out = tmp_path / "out"
    configurations = [{"x": x, "folder": str(tmp_path)} for x in range(8)]
    began = time.monotonic()
    found = sweep(configurations, out, held, cluster=cluster.scheduler_address)
    killer.join(10)
    # It had begun a run of five minutes: the sweep took less, so it was held at that moment.
    assert len(killed) == 1 and killed[0] in pids and held_by and time.monotonic() - began < 300
    assert len(found.done) == 8 and not found.failed
    results = [read_json(out / f"{key_of(c)}.json")["result"] for c in configurations]
    assert [result["twice"] for result in results] == [2 * x for x in range(8)]
    assert results[0]["pid"] != killed[0] == int((tmp_path / "started-0").read_text())


@pytest.mark.slow
def test_the_command_on_a_cluster(tmp_path, cluster):
    (tmp_path / "grid.yaml").write_text(json.dumps(GRID))
    words = (tmp_path / "grid.yaml", "--out", tmp_path / "out", "--json")
    code, line, found = command(*words, "--cluster", cluster.scheduler_address, "--batch", 2)
    assert code == 0 and json.loads(line)["done"] == 24, found.output
    alone = tmp_path / "alone"
    assert command(tmp_path / "grid.yaml", "--out", alone, "--json")[0] == 0
    here, there = (read_json(place / "results.json")["runs"] for place in (alone, tmp_path / "out"))
    assert here.keys() == there.keys()
    for key, run in here.items():
        np.testing.assert_allclose(run["result"]["losses"], there[key]["result"]["losses"], rtol=1e-12)
