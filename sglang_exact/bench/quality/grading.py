# SPDX-License-Identifier: Apache-2.0
"""Grade mathematical answers with math-verify, in a process that may be lost.

math-verify bounds its time with SIGALRM, which works in a main thread alone, and an
alarm does not reach into a power of huge integers that a model may have written. So
grading has a process of its own: its main thread grades, and when it does not answer
in time it is ended and the answer counts as not graded.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import selectors
import subprocess
import sys
import time
from types import TracebackType
from typing import NamedTuple

import orjson

PACKAGE = "math-verify"
INSTALL = "pip install math-verify==0.9.0"
ALARM_S = 5
"""Seconds math-verify may take to parse or to compare; its own default."""
TIMEOUT_S = 30.0
"""Seconds after which the process is given up; more than the three alarms in it."""
START_S = 300.0
"""Seconds the process may take to import math-verify; no answer pays for them."""
MEMORY_BYTES = 4 * 2**30
SHOWN = 200

CORRECT, WRONG, NOT_GRADED = "correct", "wrong", "not graded"


class GraderMissing(RuntimeError):
    """math-verify is not installed."""


class Grade(NamedTuple):
    """`state` is CORRECT, WRONG or NOT_GRADED; `found` the answer as read, if any."""

    state: str
    found: str = ""
    why: str = ""


def version() -> str:
    """Version of math-verify. Raises GraderMissing with the command that adds it."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise GraderMissing(
            f"found no {PACKAGE} in {sys.executable}; expected it: it grades the "
            f"answers; fix: {INSTALL}"
        ) from error


def final_answer(text: str) -> str:
    """The part of an answer that is graded.

    What follows the last </think>, from its last \\boxed on: a model that corrects
    itself boxes twice, and math-verify would read both as one set.
    """
    text = text.rpartition("</think>")[2]
    at = text.rfind("\\boxed")
    return text if at < 0 else text[at:]


def grade_here(gold: str, answer: str) -> Grade:
    """Grade in this process; call it in the main thread only.

    Args:
        gold: the right answer as LaTeX without delimiters, as in MATH-500.
        answer: what the model wrote, all of it.
    """
    from math_verify import parse, verify

    alarm = ALARM_S
    try:
        want = parse(f"\\boxed{{{gold}}}", parsing_timeout=alarm, raise_on_error=True)
        have = parse(final_answer(answer), parsing_timeout=alarm, raise_on_error=True)
        if not want:
            return Grade(NOT_GRADED, "", f"math-verify cannot read {gold[:SHOWN]!r}")
        if not have:
            return Grade(WRONG, "", "no answer found in the text")
        same = verify(want, have, timeout_seconds=alarm, raise_on_error=True)
    # math-verify passes on whatever sympy and its LaTeX grammar raise.
    except (
        ArithmeticError, AttributeError, LookupError, MemoryError, NotImplementedError,
        RecursionError, RuntimeError, SyntaxError, TimeoutError, TypeError, ValueError,
    ) as error:  # fmt: skip
        return Grade(NOT_GRADED, "", f"math-verify: {type(error).__name__}")
    return Grade(CORRECT if same else WRONG, str(have[-1])[:SHOWN])


class Grader:
    """The grading process, started when it is first asked; a context manager.

    Raises:
        GraderMissing: math-verify is not installed.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.version = version()
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # What was not flushed into a dead process is lost, as it should be.
                with contextlib.suppress(OSError):
                    pipe.close()

    def grade(self, gold: str, answer: str) -> Grade:
        """Grade one answer; NOT_GRADED if that ends the process or takes too long."""
        try:
            process = self._started()
        except TimeoutError:
            self.close()
            return Grade(NOT_GRADED, "", f"no grader within {START_S:g} s")
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("found a grading process without pipes")
        try:
            process.stdin.write(orjson.dumps([gold, answer]) + b"\n")
            process.stdin.flush()
            line = _line(process.stdout.fileno(), self.timeout_s)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            self.close()
            why = f"no verdict within {self.timeout_s:g} s"
            return Grade(NOT_GRADED, "", why)
        try:
            return Grade(*orjson.loads(line))
        except (ValueError, TypeError):
            self.close()
            return Grade(NOT_GRADED, "", "the grading process ended")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # Ctrl-C is for the run, which then ends this process itself.
                start_new_session=True,
            )
            if self._process.stdout is not None:
                _line(self._process.stdout.fileno(), START_S)
        return self._process


def _line(source: int, timeout_s: float) -> bytes:
    """Read one line. Raises TimeoutError; empty where the other side has ended."""
    until = time.monotonic() + timeout_s
    found = b""
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while not found.endswith(b"\n"):
            if not selector.select(max(until - time.monotonic(), 0)):
                raise TimeoutError
            part = os.read(source, 65536)
            if not part:
                return b""
            found += part
    return found


def main() -> None:
    """Grade lines of [gold, answer] from stdin until it closes."""
    if importlib.util.find_spec("resource") is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    importlib.import_module("math_verify")
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        verdict = grade_here(*orjson.loads(line))
        sys.stdout.buffer.write(orjson.dumps(list(verdict)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
