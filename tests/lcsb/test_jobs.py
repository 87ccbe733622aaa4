"""Jobs side by side: one failure does not stop the others, a killed process is said, progress ends at 1."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest

from lcsb.jobs import Job, JobError, run_jobs


def write(path, text="done"):
    path.write_text(text)
    return text


def fail(message):
    raise ValueError(message)


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def threads():
    import torch

    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_results_in_order_and_progress(tmp_path):
    shares = []
    jobs = [Job(f"job {i}", write, (tmp_path / str(i), str(i)), 1.0) for i in range(3)]
    results = run_jobs(jobs, 2, lambda share, left, running: shares.append((share, left)), poll_seconds=0.1)
    assert results == ["0", "1", "2"]
    assert shares[-1] == (1.0, 0.0)
    assert all(later[0] >= earlier[0] for earlier, later in itertools.pairwise(shares))
    assert run_jobs([], 2) == []


def test_a_failure_does_not_stop_the_others(tmp_path):
    jobs = [Job("bad one", fail, ("no such layer",), 1.0), Job("good one", write, (tmp_path / "file",), 1.0)]
    with pytest.raises(JobError, match=r"^bad one: ValueError: no such layer$") as caught:
        run_jobs(jobs, 1, poll_seconds=0.1)
    assert caught.value.bad_input
    assert (tmp_path / "file").read_text() == "done"


def test_a_killed_process_is_said():
    with pytest.raises(JobError, match="victim: its process was killed") as caught:
        run_jobs([Job("victim", kill_myself, (), 1.0)], 1, poll_seconds=0.1)
    assert not caught.value.bad_input


def test_one_thread_each_and_the_environment_comes_back():
    before = os.environ.get("OMP_NUM_THREADS")
    assert run_jobs([Job("threads", threads, (), 1.0)], 1, poll_seconds=0.1) == [(1, "1")]
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_a_job_without_its_own_count_is_estimated():
    shares = []
    job = Job("sleep", time.sleep, (3.0,), 6.0)
    run_jobs([job], 1, lambda share, left, running: shares.append(share), poll_seconds=0.2)
    assert any(0.1 < share < 0.96 for share in shares) and shares[-1] == 1.0
