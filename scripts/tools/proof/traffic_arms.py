# SPDX-License-Identifier: Apache-2.0
"""The arms of the GPU traffic proof: which servers are started, what each is asked."""

from __future__ import annotations

from typing import NamedTuple

from tools.proof.arms import EAGER, OLD_NGRAM, VOCAB, Arm

REQUEST_HOOKS = "accept_dflash,accept_dflash_adjust,penalties_count"
"""Without them the host drops penalties and draws seeded tokens by coins."""


ALONE = ("alone", "kinds_alone", "repeats_alone", "crowd_alone")
"""Phases in which the plain server answers what all others are compared with."""


DRAFTED = ("dflash", "mtp")
"""Drafters of the arms whose drafts are a model's."""


class Shape(NamedTuple):
    """Sizes of prompts and servers: `chunks` are the sizes that arms set.

    `repeats` are the repetitive prompts and how many requests are made of them; `crowd`
    are requests, tokens of each answer, and the KV pool and context that they share.
    """

    lengths: tuple[int, ...]
    vocab: int
    new: int
    context: int
    rows: int
    chunks: tuple[int, int]
    many: int
    repeats: tuple[int, int]
    crowd: tuple[int, int, int, int]


GPU = Shape(
    (37, 64, 65, 200, 256, 257, 511, 700, 1023, 1500, 2049, 3100),
    VOCAB, 48, 8192, 16, (512, 2048), 32, (30, 300),
    (12, 256, 1024, 512),
)  # fmt: skip
REHEARSAL = Shape(
    (12, 70, 140), 512, 5, 512, 2, (64, 128), 4, (6, 12), (6, 40, 160, 64)
)


def arms_of(shape: Shape) -> list[Arm]:
    """Every arm, the reference first."""
    small, large = (str(x) for x in shape.chunks)
    captured = ("--cuda-graph-bs-decode", *(str(n + 1) for n in range(shape.rows)))
    chunk = "--chunked-prefill-size"
    pool = (
        "--max-total-tokens", str(shape.crowd[2]),
        "--context-length", str(shape.crowd[3]),
        "--schedule-conservativeness", "0.1",
    )  # fmt: skip
    settings = (
        "--enable-metrics", "--log-requests", "--log-level", "info",
        "--mem-fraction-static", "0.9", "--decode-log-interval", "1",
        "--context-length", str(shape.context // 2),
    )  # fmt: skip
    return [
        Arm(
            "plain",
            "plain decoding",
            phases=(*ALONE, "flow", "kinds"),
            records=("everything",),
        ),
        Arm(
            "restart-1",
            "plain, started with empty caches",
            fresh=True,
            phases=("flow",),
        ),
        Arm(
            "restart-2",
            "plain, started with empty caches again",
            fresh=True,
            phases=("flow",),
        ),
        Arm(
            "restart-3",
            "DFLASH, started with empty caches",
            "dflash",
            fresh=True,
            phases=("flow",),
        ),
        Arm("dflash", "DFLASH", "dflash", phases=("flow", "kinds")),
        Arm(
            "rows-plain",
            "plain, batches of 1, 2, ... 16, a graph for each",
            flags=captured,
            phases=("rows",),
        ),
        Arm(
            "rows-dflash",
            "DFLASH, batches of 1, 2, ... 16, a graph for each",
            "dflash",
            flags=captured,
            phases=("rows",),
        ),
        Arm(
            "chunk-small-plain",
            "plain, chunks of 512",
            flags=(chunk, small),
            phases=("flow",),
        ),
        Arm(
            "chunk-small",
            "DFLASH, chunks of 512",
            "dflash",
            flags=(chunk, small),
            phases=("flow",),
        ),
        Arm(
            "chunk-large",
            "DFLASH, chunks of 2,048",
            "dflash",
            flags=(chunk, large),
            phases=("flow",),
        ),
        Arm(
            "chunk-off-plain",
            "plain, prompts in one piece",
            flags=(chunk, "-1"),
            phases=("flow",),
        ),
        Arm(
            "chunk-off",
            "DFLASH, prompts in one piece",
            "dflash",
            flags=(chunk, "-1"),
            phases=("flow",),
        ),
        Arm(
            "running-1",
            "DFLASH, 1 running request",
            "dflash",
            requests=1,
            phases=("flow",),
        ),
        Arm(
            "running-many",
            "DFLASH, 32 running requests",
            "dflash",
            requests=shape.many,
            phases=("many",),
        ),
        Arm(
            "settings",
            "DFLASH, metrics, logs, memory, context length",
            "dflash",
            flags=settings,
            phases=("flow",),
        ),
        Arm(
            "no-overlap",
            "DFLASH, no overlap scheduling",
            "dflash",
            overlap=False,
            phases=("flow", "kinds"),
        ),
        Arm(
            "no-graphs",
            "DFLASH, no CUDA graphs",
            "dflash",
            flags=("--disable-cuda-graph",),
            phases=("flow",),
        ),
        Arm(
            "prefill-eager",
            "plain, no prefill graphs",
            flags=EAGER,
            phases=("flow", "kinds"),
        ),
        Arm("mtp", "MTP (EAGLE, topk 1)", "mtp", phases=("flow", "kinds")),
        Arm("ngram", "NGRAM", "ngram", phases=("flow", "kinds")),
        Arm(
            "ngram-tries",
            "NGRAM, real tries, no oracle",
            "ngram",
            oracle=False,
            phases=("repeats",),
        ),
        Arm(
            "crowd-plain",
            "plain, a pool for a third of what is asked at once",
            flags=pool,
            phases=("crowd",),
        ),
        Arm(
            "crowd-dflash",
            "DFLASH, a pool for a third of what is asked at once",
            "dflash",
            flags=pool,
            phases=("crowd",),
        ),
        Arm(
            "control-retract",
            "control: the host takes requests back from a full pool",
            flags=pool,
            disable="preemption,reservation,retraction",
            equal=False,
            phases=("crowd",),
        ),
        Arm(
            "control-chain",
            "control: NGRAM's draft trees taken for chains",
            "ngram",
            disable=OLD_NGRAM,
            equal=False,
            oracle=False,
            phases=("repeats",),
        ),
        Arm(
            "control-grid",
            "control: chunk grid off",
            flags=(chunk, small),
            disable="prefill_grid",
            equal=False,
            phases=("flow",),
        ),
        Arm(
            "control-requests",
            "control: hooks of penalties and seeds off",
            "dflash",
            disable=REQUEST_HOOKS,
            equal=False,
            phases=("kinds",),
        ),
    ]
