"""`python -m lcsb.bench.worker`: one process of a benchmark. The first line it reads says what it is to be."""

from __future__ import annotations

import sys

from lcsb.bench.channel import Channel, fail


def main() -> int:
    channel = Channel()
    spec = channel.receive()
    if spec is None:
        return 0
    try:
        if spec["kind"] == "engine":
            from lcsb.bench.engine_process import serve
        elif spec["kind"] == "products":
            from lcsb.bench.products import serve
        else:
            from lcsb.bench.peers import serve
        serve(spec, channel)
    except Exception as error:
        # The traceback helps whoever reads standard error; its last line is what the benchmark reports.
        import traceback

        traceback.print_exc()
        fail(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
