# SPDX-License-Identifier: Apache-2.0
"""Helper processes that answer questions, one line of JSON per question and per answer.

Peers need their own environment, and a slow accountant must be stopped from outside, so each
runs in a process that reads its standard input.  While one works, all others sleep, and its
allocations and compilations stay its own.  `Worker` is the asking side, `serve` the answering
one.  An answer with ``refused`` has the reason why a figure is missing: an unsupported layer is a
finding, not an error.  Only the standard library is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
NOT_RUN = "peers: not run; `make bench-peers` sets them up"


class Worker:
    """A process of one module, asked and answered in lines of JSON; `env` is added to its own."""

    def __init__(
        self, python: str | os.PathLike[str], script: str, *words: str, **env: str
    ) -> None:
        self._process = subprocess.Popen(
            [python, "-m", f"experiments.benchmarks.{script}", *words],
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, question: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """The answer, or why there is none; stops the worker after ``seconds``."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds or threading.TIMEOUT_MAX, stop)
        timer.daemon = True
        timer.start()
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
        answer = stdout.readline()
        timer.cancel()
        if late.is_set():
            return {"refused": f"> {seconds:g} s", "late": True}
        if not answer:
            return {"refused": f"ended with status {self._process.wait()}"}
        return json.loads(answer)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answers every question on the standard input until it is closed."""
    # Libraries print too, so their output goes to the standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = handle(json.loads(line))
        except ModuleNotFoundError as error:
            answer = {"refused": f"{error.name} is not installed there"}
        except Exception as error:  # any error of a peer is its answer
            answer = {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:100]}
        print(json.dumps(answer), file=answers, flush=True)
