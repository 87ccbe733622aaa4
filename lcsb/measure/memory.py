"""Peak memory of a fresh process, by backward mode (meters: VmHWM and RssAnon of /proc, pitfall U42).

`python -m lcsb.measure.memory` is the fresh process: it loads the model, takes one cycle of real training steps in one
mode and prints what it needed as one JSON line. `measure_memory` starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lcsb.engine.ram import STATUS as STATUS
from lcsb.engine.ram import read_status as read_status


class AnonymousPeak:
    """Samples RssAnon every few milliseconds while the context is open; `.bytes` is the largest value seen.

    What is held for less than the sampling period, or inside one call that keeps the interpreter's lock, can be missed:
    VmHWM, which the kernel keeps, misses nothing and is the figure that is judged.
    """

    def __init__(self, every_seconds: float = 0.005) -> None:
        self.bytes = 0
        self._every, self._stop = every_seconds, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, read_status("RssAnon"))
            time.sleep(self._every)

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, read_status("RssAnon"))


def measure_memory(config_path: Path, backward: str, threads: int = 1) -> dict[str, Any]:
    """Peak memory of one cycle of training steps in a process of its own.

    Args:
        config_path: a run's config.yaml.
        backward: backward mode.
        threads: CPU threads of the process.

    Returns:
        mode, peak_bytes (VmHWM), rss_anon_bytes (largest RssAnon), floor_bytes (VmHWM after the imports).

    Raises:
        RuntimeError: the process failed; its last line is in the message.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "lcsb.measure.memory", str(config_path), backward]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"memory measurement of mode {backward!r} failed (exit {done.returncode}): {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _fresh_process(config_path: str, backward: str) -> dict[str, Any]:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from lcsb.config import LCSBConfig
    from lcsb.prepare import language_batch, layers_per_step, make_optimizer, prepare
    from lcsb.selective import selective_backward
    from reports.records import RunConfig

    floor = read_status("VmHWM")
    with AnonymousPeak() as anonymous:
        config = RunConfig.read(Path(config_path))
        model, corpus = prepare(config, config.seeds[0], config.recompute)
        optimizer = make_optimizer(model, config, learning_rate=0.0)  # a diverging run needs as much
        lcsb_config = LCSBConfig(backward, layers_per_step=layers_per_step(model, config))  # type: ignore[arg-type]
        with selective_backward(model, lcsb_config) as lcsb:
            for step in range(lcsb.schedule.cycle_length):
                lcsb.begin()
                windows = corpus.batch(config.seeds[0], step, config.batch_size)
                model(**language_batch(windows, model)).loss.backward()
                lcsb.step(optimizer)
    return {
        "mode": backward,
        "peak_bytes": read_status("VmHWM"),
        "rss_anon_bytes": anonymous.bytes,
        "floor_bytes": floor,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_fresh_process(*sys.argv[1:])) + "\n")
