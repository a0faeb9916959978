# SPDX-License-Identifier: Apache-2.0
"""Start a server in a subprocess, wait until it is ready, and be sure to stop it."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_exact.client.blocking import Client
from sglang_exact.client.process import Process, free_port
from sglang_exact.rehearsal import spares
from sglang_exact.rehearsal.drafters import draft_flags as draft_flags
from sglang_exact.rehearsal.environment import environment

MODES = ("exact", "stock", "plugin")

CPU_FLAGS = (
    "--device", "cpu",
    "--attention-backend", "triton",
    "--mem-fraction-static", "0.3",
    "--max-total-tokens", "8192",
    "--max-running-requests", "8",
    "--disable-overlap-schedule",
    "--cuda-graph-backend-decode", "disabled",
    "--skip-server-warmup",
    "--skip-tokenizer-init",
    "--sleep-on-idle",
    "--log-level", "warning",
)  # fmt: skip
"""What the host needs to run without a GPU, small enough for two cores."""

CACHE_SIZE = "--max-mamba-cache-size"


def cache_flags(given: Sequence[str]) -> list[str]:
    """No prefix cache under the overlay on a CPU, unless its room is given.

    Tests ask again to have it computed again, and memory is no GPU's.
    """
    return [] if CACHE_SIZE in given else ["--disable-radix-cache"]


DETERMINISTIC_FLAGS = (
    "--enable-deterministic-inference",
    "--mamba-ssm-dtype", "float32",
    "--disable-radix-cache",
)  # fmt: skip
"""The stock host's own best: what the overlay is compared with."""

_LOG_TAIL_LINES = 60
_POLL_S = 0.2
_STOP_S = 2.0


class Server:
    """A server in a process group of its own, as a context manager.

    The group also ends when this process does, even if it is killed.

    Args:
        model: model folder.
        mode: "exact" (`sglang_exact.launch_server`), "stock" (the host alone, in its
            deterministic mode) or "plugin" (the host's launcher, with the overlay
            turned on through the environment).
        flags: further flags of the host; a later flag overrules an earlier one.
        env: variables to set; a value of None removes one.
        device: "cpu" for a rehearsal, "cuda" for the real thing.
        deterministic: in mode "stock", whether to add `DETERMINISTIC_FLAGS`.
        log: file for the server's output; a temporary one if None.
        start_timeout_s, request_timeout_s: seconds.

    Raises:
        ValueError: unknown mode or device.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        mode: str = "exact",
        flags: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        device: str = "cpu",
        deterministic: bool = True,
        log: str | Path | None = None,
        start_timeout_s: float = 120.0,
        request_timeout_s: float = 300.0,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"found mode {mode!r}, expected one of {MODES}")
        if device not in ("cpu", "cuda"):
            raise ValueError(f"found device {device!r}, expected cpu or cuda")
        self.model, self.mode, self.device = Path(model), mode, device
        self.deterministic = deterministic
        self.flags = list(flags)
        self.env = dict(env or {})
        self.start_timeout_s = start_timeout_s
        self.request_timeout_s = request_timeout_s
        self.port = 0
        self.started_in_s = 0.0
        self._log_path = Path(log) if log is not None else None
        self._process: Process | None = None
        self._client: Client | None = None

    def command(self) -> list[str]:
        """Command line; the port is chosen when the server starts."""
        module = "sglang_exact.launch_server"
        if self.mode != "exact":
            module = "sglang.launch_server"
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        command = [sys.executable, "-m", module, "--model-path", str(self.model)]
        command += where
        if self.device == "cpu":
            command += CPU_FLAGS
            command += cache_flags(self.flags) if self.mode != "stock" else []
        if self.mode == "stock" and self.deterministic:
            command += DETERMINISTIC_FLAGS
        return command + self.flags

    def environment(self) -> dict[str, str]:
        """Environment of the server process."""
        env = dict(os.environ)
        if self.device == "cpu":
            # A rank or two, and the detokenizer.
            env = environment() | {spares.VARIABLE: "3"}
        if self.mode == "plugin":
            env["SGLANG_EXACT_ENABLE"] = "1"
        for name, value in self.env.items():
            env.pop(name, None)
            if value is not None:
                env[name] = value
        return env

    @property
    def client(self) -> Client:
        """The client of the running server.

        Raises:
            RuntimeError: the server is not running.
        """
        if self._client is None:
            raise RuntimeError("found no running server; use `with Server(...)`")
        return self._client

    @property
    def url(self) -> str:
        """Base URL of the running server."""
        return self.client.url

    @property
    def log_path(self) -> Path:
        """File with everything the server printed."""
        if self._log_path is None:
            handle, name = tempfile.mkstemp(
                prefix="sglang-exact-server-", suffix=".log"
            )
            os.close(handle)
            self._log_path = Path(name)
        return self._log_path

    def log_tail(self) -> str:
        """The last lines of the log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it is ready.

        Raises:
            RuntimeError: it ended before it was ready, or was not ready in time; the
                message ends with the tail of its log.
        """
        self.port = free_port()
        began = time.monotonic()
        self._process = Process(self.command(), self.log_path, env=self.environment())
        client = Client(f"http://127.0.0.1:{self.port}", self.request_timeout_s)
        try:
            self._wait_until_ready(client, began + self.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self._client = client
        self.started_in_s = time.monotonic() - began

    def _wait_until_ready(self, client: Client, deadline: float) -> None:
        process = self._process
        if process is None:
            raise RuntimeError("found no process, expected a started one")
        while not client.is_ready():
            found = ""
            if (status := process.status()) is not None:
                found = f"ended with status {status}"
            elif time.monotonic() > deadline:
                found = f"not ready after {self.start_timeout_s:.0f} s"
            if found:
                raise RuntimeError(
                    f"found the server {found}, expected it to become ready: "
                    f"{' '.join(self.command())}\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stop the server and every process it started. Idempotent."""
        process, self._process, self._client = self._process, None, None
        if process is None:
            return
        # A rehearsal has no memory of a GPU to hand back; the host's five seconds of
        # farewell are not waited for.
        process.stop(_STOP_S if self.device != "cpu" else 0.0)

    def generate(self, input_ids: Sequence[int], max_new_tokens: int, **kw: Any) -> Any:
        """See `Client.generate`; a dead server's log is part of the error."""
        return self._asked(
            lambda client: client.generate(input_ids, max_new_tokens, **kw)
        )

    def generate_many(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **kw: Any
    ) -> Any:
        """See `Client.generate_many`."""
        return self._asked(
            lambda client: client.generate_many(prompts, max_new_tokens, **kw)
        )

    def info(self) -> dict[str, Any]:
        """GET /server_info."""
        answer: dict[str, Any] = self._asked(lambda client: client.info())
        return answer

    def _asked(self, ask: Any) -> Any:
        try:
            return ask(self.client)
        except OSError as error:
            raise RuntimeError(
                f"found no answer from the server ({error}), expected one\n"
                f"{self.log_tail()}"
            ) from error
