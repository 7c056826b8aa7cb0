"""``python -m tests.crash --trials N --seed S`` or ``python -m tests.crash --matrix``"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from types import FrameType

from . import trials
from .report import show
from .site import DATABASES
from .worker import KINDS

STOPPING = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=trials.__doc__)
    parser.add_argument("--matrix", action="store_true", help="every point at which a process can die, one by one")
    parser.add_argument("--trials", type=int, default=300, help="how many keys, over all databases")
    parser.add_argument("--seed", default="1", help="makes the plan: which faults, when, which requests")
    parser.add_argument("--database", choices=DATABASES, help="on this one alone")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of routes, with commas between")
    parser.add_argument("--batch", type=int, default=60, help="keys under fire at once, for each database")
    parser.add_argument("--workers", type=int, default=4, help="processes that serve, for each database")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    if arguments.matrix:
        from . import matrix

        return int(matrix.main() or 0)

    stops: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        # A run on one database looks itself where it can break off; one on several only waits for them.
        if len(stops) == 1 and not arguments.database:
            raise KeyboardInterrupt

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for each in STOPPING:
        signal.signal(each, stop)
    logging.disable(logging.ERROR)  # what the app says of short leases and of cut wires
    kinds = tuple(arguments.kinds.split(","))
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    options = trials.Options(
        arguments.trials,
        arguments.seed,
        kinds,
        batch=arguments.batch,
        workers=arguments.workers,
        stopped=lambda: bool(stops),
    )
    try:
        if arguments.database:
            report = trials.run(arguments.database, options, tell)
        else:
            report = trials.run_beside(DATABASES, options, tell)
    except KeyboardInterrupt:
        return 130
    print(report.to_json() if arguments.json else show(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
