"""Mutation testing: makes small mistakes in the package, one at a time, and runs the tests that should fail.

    python tests/mutate.py --jobs 14
    python tests/mutate.py --only blockwise          an area, or part of a file's name
    python tests/mutate.py --list

The mutations are in `tests/mutations/`, one file an area:

    == ops/reference.py                                  a file of the package
    ? test_definition.py -k equation                     arguments of pytest, for the mutations that follow
    - step = -angles                                     a text that the file has exactly once
    + step = angles                                      what it becomes; several lines of either sort are one text

Every worker has a copy of the repository. All selected tests must pass there before anything is changed. A mutation is
caught if its tests fail or take five times as long. Exit code: 0 if 95% are caught, 1 if fewer, 2 if nothing could be
measured.
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENOUGH = 0.95
PATIENCE, LEAST = 5.0, 60.0  # a run may take so many times as long as without a mistake, and so many seconds at least
QUIET = ("__pycache__", ".hypothesis", ".pytest_cache")


class MutationError(Exception):
    """The mutations cannot be run: a text is not there, or a test fails without any."""


@dataclass(frozen=True)
class Mutation:
    """One mistake: `before` becomes `after` in a file of the package, and `tests` should fail."""

    area: str
    file: str
    before: str
    after: str
    tests: str

    def __str__(self) -> str:
        before, after = (" ⏎ ".join(line.strip() for line in x.splitlines()) for x in (self.before, self.after))
        return f"{self.area}  {self.file}  {before}  →  {after or '(nothing)'}"

    def apply(self, root: Path) -> Callable[[], Any]:
        """Makes the mistake below a folder, and returns what undoes it."""
        path = root / "deadreckon" / self.file
        text = path.read_text() if path.exists() else ""
        if text.count(self.before) != 1 or self.before == self.after:
            raise MutationError(f"expected its text exactly once, found it {text.count(self.before)} times: {self}")
        path.write_text(text.replace(self.before, self.after))
        return lambda: path.write_text(text)


def read(path: Path) -> Iterator[Mutation]:
    """Parses the mutations of an area."""
    file = tests = ""
    before: list[str] = []
    after: list[str] = []
    for line in [*path.read_text().splitlines(), ""]:
        sign, text = line[:1], line[2:]
        if before and after and sign != "+":
            yield Mutation(path.stem, file, "\n".join(before), "\n".join(after), tests)
            before, after = [], []
        if sign == "=":
            file = line.strip("= ")
        elif sign == "?":
            tests = text
        elif sign in ("-", "+"):
            (before if sign == "-" else after).append(text)
        elif sign not in ("", "#"):
            raise MutationError(f"{path.name}: expected a line that begins with =, ?, -, + or #, got {line!r}")
    if before or after:
        raise MutationError(f"{path.name}: expected + after -, got {before} and {after}")


def copy_of(root: Path, folder: Path) -> Path:
    """Copies what tests need of the repository."""
    for name in ("deadreckon", "tests"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns(*QUIET))
    shutil.copy(root / "pyproject.toml", folder)
    return folder


@dataclass(frozen=True)
class Result:
    """The result of a run of tests."""

    passed: bool
    seconds: float
    output: str


def run_tests(folder: Path, tests: str, timeout: float | None = None) -> Result:
    """Runs some tests in a copy of the repository. One that does not end in time has failed."""
    arguments = [f"tests/{part}" if ".py" in part else part for part in shlex.split(tests)]
    # The C library is cached by a hash of its source, byte code by the source's time: both caches would outlive a run.
    environment = os.environ | {
        "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(folder / "cache"),
        "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        output, _ = process.communicate()
    return Result(process.returncode == 0, time.monotonic() - start, output)


@contextmanager
def workers(jobs: int) -> Iterator[queue.SimpleQueue[Path]]:
    """Copies of the repository, to be taken and put back."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as place:
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            free.put(copy_of(ROOT, Path(place, f"{number}")))
        yield free


def unmutated(tests: Iterable[str], jobs: int, free: queue.SimpleQueue[Path]) -> dict[str, float]:
    """Seconds that each selection of tests takes without mutations."""
    seconds: dict[str, float] = {}

    def measure(chosen: str) -> Result:
        folder = free.get()
        try:
            return run_tests(folder, chosen)
        finally:
            free.put(folder)

    with ThreadPoolExecutor(jobs) as pool:
        pending = {pool.submit(measure, chosen): chosen for chosen in tests}
        for done in as_completed(pending):
            chosen, result = pending[done], done.result()
            if not result.passed:
                pool.shutdown(cancel_futures=True)
                raise MutationError(f"these tests fail without any mistake: {chosen}\n{result.output[-3000:]}")
            print(f"passes    {result.seconds:6.1f} s  {chosen}", flush=True)
            seconds[chosen] = result.seconds
    return seconds


def sweep(mutations: list[Mutation], jobs: int) -> list[Mutation]:
    """Tries all of them, and returns those that survive."""
    survivors = []
    with workers(jobs) as free:
        seconds = unmutated(dict.fromkeys(mutation.tests for mutation in mutations), jobs, free)

        def attempt(mutation: Mutation) -> Result:
            folder = free.get()
            try:
                undo = mutation.apply(folder)
                try:
                    return run_tests(folder, mutation.tests, max(LEAST, PATIENCE * seconds[mutation.tests]))
                finally:
                    undo()
            finally:
                free.put(folder)

        with ThreadPoolExecutor(jobs) as pool:
            longest_first = sorted(mutations, key=lambda mutation: -seconds[mutation.tests])
            pending = {pool.submit(attempt, mutation): mutation for mutation in longest_first}
            for done in as_completed(pending):
                result, mutation = done.result(), pending[done]
                print(f"{'SURVIVED' if result.passed else 'caught  '}  {result.seconds:6.1f} s  {mutation}", flush=True)
                if result.passed:
                    survivors.append(mutation)
    return survivors


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="workers, each with one thread")
    parser.add_argument("--only", default="", metavar="TEXT", help="an area, or part of a file's name")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of the chosen ones the first of each N")
    parser.add_argument("--list", action="store_true", help="show the mistakes and the tests that should notice")
    options = parser.parse_args()
    try:
        found = [mutation for path in sorted((ROOT / "tests" / "mutations").glob("*.txt")) for mutation in read(path)]
        chosen = [
            mutation for mutation in found if options.only in (mutation.area, "") or options.only in mutation.file
        ]
        if not chosen:
            raise MutationError(f"no area and no file is named {options.only!r}")
        chosen = chosen[:: options.every]
        with tempfile.TemporaryDirectory(prefix="mutate-") as place:
            copy = copy_of(ROOT, Path(place))
            for mutation in chosen:  # before any test is run: are all texts there?
                mutation.apply(copy)()
        if options.list:
            for mutation in chosen:
                print(f"{mutation}\n    {mutation.tests}")
            print(f"{len(chosen)} mutations")
            return 0
        survivors = sweep(chosen, options.jobs)
    except MutationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} caught")
    for mutation in survivors:
        print(f"SURVIVED  {mutation}\n    {mutation.tests}")
    return 0 if len(chosen) - len(survivors) >= ENOUGH * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
