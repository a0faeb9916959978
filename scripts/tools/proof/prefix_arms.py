# SPDX-License-Identifier: Apache-2.0
"""The arms of the GPU proof that a cached prefix has the bits of a computed one.

`plain-cold` and `stock-cold` have no cache and record; the others ask the same with it
on. What is stock is compared with stock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sglang_exact.rehearsal.drafters import DRAFTERS
from tools.proof.arm import Arm, Phase

CACHE = ("--mamba-radix-cache-strategy", "extra_buffer")
NEW = 72
"""Tokens of every answer: past a multiple of 64, where decode could keep a state."""
TAIL = 70
"""A prompt's tokens past its length: it ends six behind the last state that is kept,
which lies inside a prefill step, and few enough that a rounded state shows."""
MORE = 512
"""Room for what stands behind a prompt's length, its answer, and blocks of drafts."""
SHORT = 640
PREFIXES, ANSWERS = "prefixes", "answers"
STOCK = "stock-cold"
REQUESTS = 8
DETERMINISTIC = (
    *("--enable-deterministic-inference", "--mamba-ssm-dtype", "float32"),
    *("--attention-backend", "triton"),
)
"""The stock host's own best, as `rehearsal.server` has it, but with its cache."""


def _random(seed: str, size: int, vocab: int) -> list[int]:
    rng = random.Random(seed)
    low, high = (1000, vocab - 1000) if vocab > 4000 else (3, vocab)
    return [rng.randrange(low, high) for _ in range(size)]


def _bases(lengths: Sequence[int], vocab: int) -> list[list[int]]:
    return [_random(f"base {n}", n + TAIL, vocab) for n in (SHORT, *lengths)]


def make_prefixes(lengths: Sequence[int], vocab: int) -> list[list[int]]:
    """Of each length a prompt, a longer one, and three that leave it half way."""
    prompts = []
    for base in _bases(lengths, vocab):
        half = base[: len(base) // 2]
        ends = [_random(f"end {len(base)} {i}", 5 + 30 * i, vocab) for i in range(4)]
        prompts += [base, base + ends[0], *(half + end for end in ends[1:])]
    return prompts


def make_answers(
    lengths: Sequence[int], vocab: int, answers: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The first prompt of each length, and one that goes on behind its answer.

    answers: to all of `make_prefixes`, in its order.
    """
    bases = _bases(lengths, vocab)
    said = answers[:: len(answers) // len(bases)]
    return [
        prompt
        for base, answer in zip(bases, said, strict=True)
        for prompt in (base, [*base, *answer, *_random(f"more {len(base)}", 9, vocab)])
    ]


_ALONE = Phase(concurrency=1, text=PREFIXES, prompts=0)
_TALKS = Phase(concurrency=1, text=ANSWERS, prompts=0)
_ALL = tuple(
    one._replace(concurrency=n) for one in (_ALONE, _TALKS) for n in (1, REQUESTS)
)
_BEHIND = "behind cached prefixes"
_NAMES = {"dflash": "dflash8", "dflash2": "dflash2-shaped"}
ARMS = (
    *(
        Arm(
            name,
            f"{title}, no prefix cache",
            mode=mode,
            phases=(_ALONE, _TALKS),
            records=(PREFIXES, ANSWERS),
            equal=None,
            reference=reference,
        )
        for name, title, mode, reference in (
            ("plain-cold", "plain decode", "exact", "plain"),
            ("stock-cold", "stock deterministic mode, plain decode", "stock", STOCK),
        )
    ),
    Arm("plain-cache", f"plain decode {_BEHIND}", phases=_ALL, cache=True),
    *(
        Arm(
            f"{_NAMES.get(one.name, one.name)}-cache",
            f"{one.title}, {one.tokens} draft tokens, {_BEHIND}",
            one.name,
            one.tokens,
            phases=_ALL,
            cache=True,
        )
        for one in DRAFTERS.values()
    ),
    Arm(
        "plain-cache-small",
        f"plain decode {_BEHIND}, room for two more states than run",
        phases=(_ALONE, _ALONE._replace(concurrency=2)),
        requests=2,
        flags=("--max-mamba-cache-size", "12"),
        cache=True,
    ),
    Arm(
        "cache-decoded",
        "control: states and keys of decode are cached as well",
        disable="prefix_interval,prefix_insert",
        phases=(_TALKS,),
        equal=False,
        flags=("--mamba-track-interval", "64"),
        cache=True,
    ),
    Arm(
        "cache-rounded",
        "control: cached states are rounded to bf16",
        disable="prefix_snapshot,gdn_prefill_graph",
        phases=(_ALONE,),
        equal=False,
        cache=True,
    ),
    Arm(
        "stock-cache",
        f"control: stock deterministic mode {_BEHIND}, against itself without",
        mode="stock",
        deterministic=False,
        phases=(_ALONE, _TALKS),
        reference=STOCK,
        equal=False,
        flags=DETERMINISTIC,
        cache=True,
    ),
)
