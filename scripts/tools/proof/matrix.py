# SPDX-License-Identifier: Apache-2.0
"""One run of any proof: its servers, its budget, its rows and its result on disk.

What `scripts/gpu_proof`, `gpu_traffic`, `gpu_verify` and `gpu_bench` have in common. A
row is the outcome of one phase of an arm: `arm`, `title`, `tally` and `as_expected` are
in every one, and a result is written anew after each, so that a run that is ended keeps
what it has.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sglang_exact.bench.exactness import Tally
from sglang_exact.client import machine
from sglang_exact.client.answer import Sample
from sglang_exact.client.blocking import Completion
from sglang_exact.hooks.testing import oracle
from sglang_exact.host import source as host
from sglang_exact.rehearsal import models
from sglang_exact.rehearsal.drafters import DRAFT_KINDS
from sglang_exact.rehearsal.server import Server
from tools.proof.arms import Arm

DISABLE_VARIABLE = "SGLANG_EXACT_TEST_DISABLE_HOOKS"
WEIGHTS_VARIABLE = "SGLANG_EXACT_TEST_DUMMY_WEIGHTS"
# Where each compiler and tuner of the stack keeps what it made.
CACHES = (
    "TRITON_CACHE_DIR", "SGLANG_CACHE_DIR", "SGLANG_DG_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TVM_FFI_CACHE_DIR",
    "CUDA_CACHE_PATH",
)  # fmt: skip
INTERRUPTED = 130
BREAKS = (RuntimeError, OSError, LookupError, ValueError)
"""What costs one phase, or one arm, and not the run."""
Row = dict[str, Any]
_SAY = threading.Lock()


def say(text: str) -> None:
    """Progress, at once; one line at a time, whatever the thread."""
    with _SAY:
        print(text, flush=True)


def stop(*_: object) -> NoReturn:
    """For SIGTERM, with which schedulers end jobs: servers must not outlive this."""
    raise KeyboardInterrupt


def gpu() -> str:
    """Name, driver and memory of the GPUs as nvidia-smi prints them, or "none"."""
    rows = machine.query(("name", "driver_version", "memory.total"))
    return "; ".join(", ".join(row.values()) for row in rows) or "none"


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result in one step."""
    new = path.with_name(f".{path.name}")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(path)


def make_models(
    folder: Path,
    layers: int,
    rehearsal: bool = False,
    kinds: Collection[str] = DRAFT_KINDS,
    family: str = "",
    scheme: str = "",
) -> None:
    """Model folders "target-LAYERS" and "DRAFTER-LAYERS"; of a family, or 27B-wide.

    `scheme` quantises the 27B-wide target; drafts are bfloat16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if family:
        models.make_wide_target(folder / f"target-{layers}", layers, family=family)
        path = folder / f"dflash-{layers}"
        models.make_wide_draft(path, "dflash", layers, family=family)
        return
    if rehearsal:
        models.make_target(folder / f"target-{layers}", layers)
    else:
        models.make_27b_target(folder / f"target-{layers}", layers, scheme=scheme)
    for kind in kinds:
        path = folder / f"{kind}-{layers}"
        if rehearsal:
            models.make_draft(path, kind, target_layers=layers)
        else:
            models.make_27b_draft(path, kind, layers)


def server(
    arm: Arm,
    model: Path,
    *,
    plan: Path,
    log: Path,
    device: str = "cuda",
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    gpus: str | None = None,
    kind: type[Server] | None = None,
    **options: Any,
) -> Server:
    """An arm's server, not started.

    Args:
        arm: whose hooks, drafts, mode and variables it has.
        model: folder of the target.
        plan: file of the oracle, written empty where one draws the drafts.
        log: of the server.
        device: "cuda", with random weights, or "cpu".
        flags: all of them.
        env: further variables.
        gpus: indices that it sees; None for all.
        kind: another class of server.
        options: further arguments of `Server`.
    """
    made = dict(env or {}) | dict(arm.env)
    if device == "cuda":
        made[WEIGHTS_VARIABLE] = "1"
        if gpus is not None:
            made["CUDA_VISIBLE_DEVICES"] = gpus
    if arm.drawn:
        made[oracle.VARIABLE] = str(plan)
        oracle.write_plan(plan, 0.0, [])
    if arm.disable:
        made[DISABLE_VARIABLE] = arm.disable
    if arm.fresh:
        fresh = log.parent / f"empty-{arm.name}-{time.monotonic_ns()}"
        made |= {name: str(fresh / name.lower()) for name in CACHES}
    return (kind or Server)(
        model, mode=arm.mode, device=device, deterministic=arm.deterministic,
        flags=list(flags), env=made, log=log, **options,
    )  # fmt: skip


def sample(found: Completion) -> Sample:
    """Ids and logprob bits as the verifier compares them."""
    bits = (None if x is None else x & 0xFFFFFFFF for x in found.logprobs)
    return Sample(tuple(found.ids), tuple(bits))


def judge(reference: Sequence[Completion], found: Sequence[Completion]) -> Tally:
    """Compare answers with the reference's, one by one, as the verifier does.

    Raises:
        ValueError: not one answer for each of the reference's.
    """
    if len(found) != len(reference):
        raise ValueError(
            f"found {len(found)} answers, expected {len(reference)}; fix: compare "
            "answers to the same prompts"
        )
    tally = Tally()
    for number, (want, got) in enumerate(zip(reference, found, strict=True)):
        tally.add(str(number), sample(got), sample(want))
    return tally


def is_equal(tally: Tally, logprobs: bool) -> bool:
    """Whether every bit that was asked for is equal; a logprob that is missing or no
    number is not."""
    ids = tally.ids_equal == tally.compared
    return ids and (not logprobs or tally.logprobs_equal == tally.compared)


def tallied(tally: Tally, logprobs: bool) -> Row:
    """A tally as it stands in a row; no figure for logprobs that were not asked for."""
    found = tally.to_json()
    if not logprobs:
        found["logprobs_equal"] = None
    return found


def rounded(tokens: int, verifies: int) -> float | None:
    """Tokens a verify; None without any."""
    return round(tokens / verifies, 2) if verifies else None


def used_drafts(
    arm: Arm, answers: int, tokens: int, verifies: int, first: bool = False
) -> bool:
    """Whether an arm speculated as it says, and kept drafts that were its own.

    first: its drafter had nothing to draft from yet.
    """
    if arm.drafter is None or not verifies:
        return bool(verifies) == (arm.drafter is not None)
    # The first token is the prefill's, each verify gives one more of its own.
    return arm.oracle or first or tokens > answers + verifies


class Matrix:
    """All arms of one call of a proof.

    Args:
        program: name of the command below scripts/.
        args: its command line, of `options`.
        path: of the result; kept, so that later calls can go on.

    Attributes:
        rows: by arm and phase, see `key`.
        failed: arm, or arm and phase -> why there is no row.
        not_run: what --budget left no time for.
        starts: seconds until an arm's server was ready.
        info: attestation of a whole arm under the overlay.
    """

    def __init__(self, program: str, args: argparse.Namespace, path: Path) -> None:
        self.args = args
        # Compilers change folders: nothing named below must depend on it.
        self.state, self.path = Path(args.state).resolve(), path.resolve()
        self.models = self.state / "models"
        self.rows: dict[str, Row] = {}
        self.failed: dict[str, str] = {}
        self.not_run: list[str] = []
        self.starts: dict[str, float] = {}
        self.info: Row = {}
        self.commands = [shlex.join([f"scripts/{program}", *sys.argv[1:]])]
        self.began = time.monotonic()
        self._lock = threading.Lock()

    @property
    def rehearsal(self) -> bool:
        """Whether it runs on the CPU, for its logic."""
        return bool(getattr(self.args, "rehearsal", False))

    @property
    def device(self) -> str:
        """Of every server."""
        return "cpu" if self.rehearsal else "cuda"

    @property
    def bad(self) -> list[str]:
        """Rows that are not as expected."""
        return [key for key, row in self.rows.items() if not row["as_expected"]]

    def left(self) -> float:
        """Seconds of --budget that are left."""
        return float(self.args.budget - (time.monotonic() - self.began))

    @staticmethod
    def key(row: Mapping[str, Any]) -> str:
        """What tells a row from another: what is asked again replaces it."""
        return f"{row['arm']} {row.get('ask', row.get('phase', ''))}"

    def keep_earlier(self, again: Collection[str] = ()) -> None:
        """Take over what earlier calls found, but for the arms `again`."""
        if not self.path.exists():
            return
        found = json.loads(self.path.read_text())
        rows = [row for row in found["rows"] if row["arm"] not in again]
        self.rows = {self.key(row): row for row in rows}
        failed = found["failed"].items()
        self.failed = {k: why for k, why in failed if k.partition(" ")[0] not in again}
        left = found.get("not_run", [])
        self.not_run = [k for k in left if k.partition(" ")[0] not in again]
        self.starts, self.info = found.get("start_s", {}), found["attestation"]
        self.commands = [*found["commands"], *self.commands]

    def fail(self, key: str, error: BaseException) -> None:
        """Note what went wrong, and write it down."""
        self.failed[key] = str(error)[-3000:]
        say(f"{key}: FAILED\n{str(error)[-2500:]}")
        self.write()

    def facts(self) -> Row:
        """What a reader needs beside figures; each proof adds its own."""
        return {
            "command": self.commands[-1],
            "commands": self.commands,
            "date": time.strftime("%Y-%m-%d"),
            "gpu": "none: rehearsal, interpreted kernels" if self.rehearsal else gpu(),
            "weights": "random, seeded per parameter",
            "versions": {"sglang": host.version("sglang"), **host.stack_versions()},
        }

    def result(self) -> Row:
        """Everything so far."""
        return {
            **self.facts(),
            "start_s": self.starts,
            "attestation": self.info,
            "rows": list(self.rows.values()),
            "failed": self.failed,
            "not_run": self.not_run,
        }

    def write(self) -> None:
        """The result so far; kept whole if this call is ended."""
        with self._lock:
            write(self.path, self.result())

    def finish(self) -> int:
        """The last line and the exit status; 0 if all was run and is as expected."""
        self.write()
        say(
            f"{len(self.rows)} rows; unexpected: {self.bad}; "
            f"without a result: {list(self.failed)}; not run: {self.not_run}; "
            f"{time.monotonic() - self.began:.0f} s"
        )
        return 1 if self.bad or self.failed or self.not_run or not self.rows else 0
