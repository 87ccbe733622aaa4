"""SIGKILL at any instant, also inside a save: the run resumes to the same weights, bit for bit (U37)."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
from safetensors.torch import load_file

SERVER = Path(__file__).parent / "kill_server.py"
#: where a save can be hit: before and after each thing that it writes, in the middle of a file, after the renaming
TRAINER_POINTS = ("begin", "adapter", "half", "optimizer", "random", "state", "end")
ARM_POINTS = ("begin", "half", "tensors", "facts", "renamed")


class Server:
    """kill_server.py at the other end of two pipes."""

    def __init__(self, log):
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        assert self.answer() == "ready"

    def answer(self):
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-3000:]
        return json.loads(line)

    def run(self, what, folder, after=None, point=None):
        """Train in `folder` until done or killed; seconds of training, None if it was killed."""
        order = {"what": what, "folder": str(folder), "after": after, "point": point}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.answer()
        assert answer["killed"] or answer["code"] == 0, self.log.read_text()[-3000:]
        return None if answer["killed"] else answer["seconds"]


@pytest.fixture(scope="module")
def server(tmp_path_factory, model_cache):
    server = Server(tmp_path_factory.mktemp("server") / "log")
    yield server
    server.process.stdin.close()
    assert server.process.wait(timeout=60) == 0


def trainer_result(folder):
    assert not list(folder.glob(".*"))  # the temporary folder of a save
    return json.loads((folder / "trace.json").read_text()), load_file(folder / "outcome.safetensors")


def arm_result(folder):
    place = folder / "arms" / "exact-momentum" / "seed-0"
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    assert not list(place.glob("*.partial"))
    return [row for row in rows if row.get("event") != "resumed"], load_file(
        place / "adapter" / "adapter_model.safetensors"
    )


class Straight:
    """An uninterrupted run of one kind, and others that are killed and taken up again."""

    def __init__(self, server, what, folder, fill, result):
        self.server, self.what, self.fill, self.result = server, what, fill, result
        fill(folder)
        self.seconds = server.run(what, folder)
        self.rows, self.tensors = result(folder)

    def killed(self, folder, **how):
        """Kill a run so; False if it was done before. Then let it go on to its end and compare."""
        self.fill(folder)
        seconds = self.server.run(self.what, folder, **how)
        if seconds is not None:
            # the machine was busier when the straight run was timed
            self.seconds = min(self.seconds, seconds)
            return False
        self.server.run(self.what, folder)
        rows, tensors = self.result(folder)
        assert rows == self.rows
        assert tensors.keys() == self.tensors.keys()
        assert all((tensors[key] == self.tensors[key]).all() for key in tensors)
        shutil.rmtree(folder)
        return True

    def killed_at_random(self, base, times):
        """Kill `times` runs at instants drawn uniformly over the length of a run."""
        generator, done, tries = random.Random(0), 0, 0
        while done < times:
            tries += 1
            assert tries < 5 * times, "the runs end before they can be killed"
            done += self.killed(base / str(tries), after=generator.uniform(0, self.seconds))


@pytest.fixture(scope="module")
def trainer(server, tmp_path_factory):
    return Straight(
        server, "trainer", tmp_path_factory.mktemp("trainer") / "straight", Path.mkdir, trainer_result
    )


@pytest.fixture(scope="module")
def arm(server, tmp_path_factory):
    base = tmp_path_factory.mktemp("arm")
    model = tiny_run.write_model(base)
    config = tiny_run.settings(model, steps=8, eval_every=4)
    ready = tiny_run.start(base, config)
    text = ready.config.read_text()
    assert "dropout: 0.0" in text
    ready.config.write_text(text.replace("dropout: 0.0", "dropout: 0.1"))  # measuring refuses dropout
    return Straight(
        server, "arm", base / "straight", lambda folder: shutil.copytree(ready.root, folder), arm_result
    )


def test_the_trainer_killed_three_times(trainer, tmp_path):
    assert trainer.killed(tmp_path / "half", point="half")
    assert trainer.killed(tmp_path / "state", point="state")
    trainer.killed_at_random(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_trainer_killed_twenty_times(trainer, tmp_path):
    for point in TRAINER_POINTS:
        assert trainer.killed(tmp_path / point, point=point), point
    trainer.killed_at_random(tmp_path, 20 - len(TRAINER_POINTS))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_an_arm_killed_twenty_times(arm, tmp_path):
    for point in ARM_POINTS:
        assert arm.killed(tmp_path / point, point=point), point
    arm.killed_at_random(tmp_path, 20 - len(ARM_POINTS))
