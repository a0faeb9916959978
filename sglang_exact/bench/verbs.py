# SPDX-License-Identifier: Apache-2.0
"""The verbs of `sglang-exact bench`: one record each, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sglang_exact.bench.accept import tables as accept
from sglang_exact.bench.accept.command import accept as run_accept
from sglang_exact.bench.cost_model import tables as cost_model
from sglang_exact.bench.cost_model.command import cost_model as run_cost_model
from sglang_exact.bench.decode_table import tables as decode_table
from sglang_exact.bench.decode_table.command import decode_table as run_decode_table
from sglang_exact.bench.leaderboard import tables as leaderboard
from sglang_exact.bench.leaderboard.command import leaderboard as run_leaderboard
from sglang_exact.bench.memory import tables as memory
from sglang_exact.bench.memory.command import memory as run_memory
from sglang_exact.bench.quality import tables as quality
from sglang_exact.bench.quality.command import quality as run_quality
from sglang_exact.bench.run import BenchRun
from sglang_exact.bench.sweep import tables as sweep
from sglang_exact.bench.sweep.command import sweep as run_sweep
from sglang_exact.view.tables import TableData

Plot = Callable[[Sequence[dict[str, Any]]], dict[str, Any] | None]


class Verb(NamedTuple):
    """A measurement: what it is called, how its record is shown, what runs it."""

    name: str
    title: str
    tables: Callable[[BenchRun], list[TableData]]
    plots: tuple[Plot, ...]
    command: Callable[..., None]


VERBS = (
    Verb(
        "accept",
        "Speed-up and acceptance length",
        accept.tables,
        (accept.speed_plot, accept.length_plot),
        run_accept,
    ),
    Verb(
        "sweep",
        "Speed over context length",
        sweep.tables,
        (sweep.speed_plot,),
        run_sweep,
    ),
    Verb(
        "leaderboard",
        "Speed against draft length",
        leaderboard.tables,
        (leaderboard.speed_plot,),
        run_leaderboard,
    ),
    Verb(
        "decode-table",
        "Decode speed and time to first token",
        decode_table.tables,
        (decode_table.speed_plot,),
        run_decode_table,
    ),
    Verb(
        "quality",
        "Quality, problem by problem",
        quality.tables,
        (quality.subject_plot,),
        run_quality,
    ),
    Verb("memory", "GPU memory", memory.tables, (memory.memory_plot,), run_memory),
    Verb(
        "cost-model",
        "Cost model",
        cost_model.tables,
        (cost_model.speed_plot, cost_model.drafter_plot),
        run_cost_model,
    ),
)
BY_NAME = {verb.name: verb for verb in VERBS}
