"""Runs trainings in processes that are to be killed: a script, so that it can fork before torch has threads.

Reads one JSON object a line: {"what": "trainer" or "arm", "folder": ..., "after": seconds or null,
"point": name or null}. Forks; the child trains in that folder, from its newest checkpoint if there is one, and is
killed by SIGKILL `after` seconds into the training, or kills itself at a `point` inside a save. Answers one JSON
object a line: {"killed": bool, "code": exit code, "seconds": of training}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import test_resume
import torch
from safetensors.torch import save_file

import lcsb.checkpoint
import lcsb.train
from lcsb.trainer import LCSBTrainer
from reports.records import RunFolder

STEPS, EVERY = 9, 2


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class KilledInSave(LCSBTrainer):
    """Kills its own process at `point` of the third save that it makes."""

    point, saves = None, 0

    def at(self, point):
        if self.saves == 3 and self.point == point:
            die()

    def _save_checkpoint(self, model, trial):
        self.saves += 1
        self.at("begin")
        super()._save_checkpoint(model, trial)
        self.at("end")

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        self.at("adapter")

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.saves == 3 and self.point == "half":
            file = Path(output_dir) / "optimizer.pt"
            os.truncate(file, file.stat().st_size // 2)
            die()
        self.at("optimizer")

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        self.at("random")
        write = self.state.save_to_json

        def write_and_die(path):
            write(path)
            self.at("state")

        self.state.save_to_json = write_and_die


def train(folder, point, begun):
    trainer = test_resume.make(
        folder,
        test_resume.config_of("importance"),
        trainer_class=KilledInSave,
        max_steps=STEPS,
        save_steps=EVERY,
    )
    trainer.point = point
    begun()
    trainer.train(resume_from_checkpoint=True if any(folder.glob("checkpoint-*")) else None)
    tensors, trace = test_resume.outcome(trainer)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "outcome.safetensors")
    (folder / "trace.json").write_text(json.dumps(trace))


def train_arm(folder, point, begun):
    saves = [0]

    def hooked(function, name, before=False):
        def hook(*args, **kwargs):
            saves[0] += name == "begin"
            hit = saves[0] == 2 and name == point
            if hit and before:
                die()
            result = function(*args, **kwargs)
            if hit:
                die()
            return result

        return hook

    def half(tensors, path):
        save_file(tensors, path)
        if saves[0] == 2 and point == "half":
            os.truncate(path, Path(path).stat().st_size // 2)
            die()

    lcsb.train.save_checkpoint = hooked(lcsb.train.save_checkpoint, "begin", before=True)
    lcsb.checkpoint.save_file = hooked(half, "tensors")
    lcsb.checkpoint.write_json = hooked(lcsb.checkpoint.write_json, "facts")
    remove = lcsb.train.shutil.rmtree

    def remove_half(path, *args, **kwargs):
        if saves[0] == 2 and point == "renamed" and Path(path).name == "checkpoint-2":
            next(Path(path).iterdir()).unlink()  # the older checkpoint is on its way out
            die()
        remove(path, *args, **kwargs)

    lcsb.train.shutil.rmtree = remove_half
    begun()
    lcsb.train.train_arm(RunFolder(folder), "exact-momentum", 0)


def run(order):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 1
        try:
            work = {"trainer": train, "arm": train_arm}[order["what"]]
            work(Path(order["folder"]), order["point"], lambda: os.write(write, b"."))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    start = time.monotonic()
    if order["after"] is not None:
        while time.monotonic() - start < order["after"]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.002)
        else:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
    else:
        _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    code = os.waitstatus_to_exitcode(status)
    return {"killed": killed, "code": code, "seconds": time.monotonic() - start}


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a Trainer prints does not belong among the answers
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)
