"""`python -m tests.model`: explore everything, and exit with 1 if anything is not as expected."""

import argparse
import sys
import time

from .check import check_all, trace_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--trace", metavar="RULE", help="the shortest way to what a rule prevents, or to what is open")
    parser.add_argument("--rules", action="store_true", help="where each rule lives, and what noticed its absence")
    parser.add_argument("--write-docs", action="store_true", help="write docs/model.md")
    options = parser.parse_args()
    if options.trace:
        return show_trace(options.trace)
    if options.rules or options.write_docs:
        from .page import PAGE, page, table

        if options.rules:
            print(table())
        if options.write_docs:
            PAGE.write_text(page(), "utf-8")
        return 0
    return check()


def check() -> int:
    began, failed, lines = time.perf_counter(), 0, 0
    for line in check_all():
        print(line, flush=True)
        lines += 1
        if not line.ok:
            failed += 1
            if line.outcome is not None:
                show_steps(line.outcome.trace)
    print(f"{lines} checked, {failed} not as expected, {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


def show_trace(name: str) -> int:
    try:
        where, outcome = trace_of(name)
    except KeyError:
        print(f"no run notices {name!r} alone, or there is no such rule", file=sys.stderr)
        return 1
    print(f"{where}: {outcome.violation}")
    show_steps(outcome.trace)
    return 0


def show_steps(trace: tuple[str, ...]) -> None:
    for number, label in enumerate(trace, 1):
        print(f"    {number:2}. {label}")


if __name__ == "__main__":
    sys.exit(main())
