"""``python -m tests.benchmarks durable [--json] [--rounds N]``"""

from __future__ import annotations

import argparse

from . import durable


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("suite", choices=["durable"])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of 20 requests a case")
    arguments = parser.parse_args()
    durable.show(durable.run(arguments.rounds), as_json=arguments.json)


main()
