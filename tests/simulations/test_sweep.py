from __future__ import annotations

import os
import signal
import time

import pytest

from reports.strict import read_json
from simulations.sweep import key_of, simulate, sweep


def double(configuration):
    if configuration["x"] == 2:
        raise ArithmeticError("two is refused")
    return {"twice": 2 * configuration["x"]}


def slow_double(configuration):
    time.sleep(0.3)
    return {"twice": 2 * configuration["x"], "pid": os.getpid()}


def refuse(configuration):
    raise AssertionError("a finished run was computed again")


CONFIGURATIONS = [{"x": x} for x in range(5)]


def test_one_failed_run_loses_no_other(tmp_path):
    found = sweep(CONFIGURATIONS, tmp_path, task=double)
    assert len(found.done) == 4 and found.failed == {key_of({"x": 2}): "ArithmeticError: two is refused"}
    assert read_json(tmp_path / f"{key_of({'x': 3})}.json")["result"] == {"twice": 6}


def test_finished_runs_are_not_computed_again(tmp_path):
    sweep(CONFIGURATIONS, tmp_path, task=double)
    again = sweep(CONFIGURATIONS, tmp_path, task=refuse)
    assert len(again.reused) == 4 and len(again.failed) == 1


def test_a_damaged_result_is_computed_again(tmp_path):
    sweep([{"x": 1}], tmp_path, task=double)
    (tmp_path / f"{key_of({'x': 1})}.json").write_text("{")
    assert sweep([{"x": 1}], tmp_path, task=double).reused == ()
    assert read_json(tmp_path / f"{key_of({'x': 1})}.json")["result"] == {"twice": 2}


def test_the_key_knows_no_order_of_keys():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}) != key_of({"a": 2, "b": 1})


def test_unknown_fields_are_refused():
    with pytest.raises(ValueError, match="sise"):
        simulate({"experiment": "planted", "sise": "quick"})


def test_a_cluster_survives_a_killed_worker(tmp_path):
    distributed = pytest.importorskip("distributed")
    # The test module is no importable package on the workers, so its functions travel by value.
    import sys
    import threading

    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
        ) as cluster,
        distributed.Client(cluster.scheduler_address) as client,
    ):
        pids = list(client.run(os.getpid).values())
        timer = threading.Timer(1.0, os.kill, (pids[0], signal.SIGKILL))
        timer.start()
        found = sweep(
            [{"x": x} for x in range(12)], tmp_path, task=slow_double, cluster=cluster.scheduler_address
        )
        timer.join()
    assert len(found.done) == 12 and not found.failed
    results = [read_json(tmp_path / f"{key_of({'x': x})}.json")["result"] for x in range(12)]
    assert [result["twice"] for result in results] == [2 * x for x in range(12)]
    assert {result["pid"] for result in results} - {pids[0]}
