# SPDX-License-Identifier: Apache-2.0
"""The arms of the GPU proof: which servers are started and what each is asked.

An arm is one server at the 27B's width; a phase is one pass over the prompts on it.
The plain arm records the reference that every other arm is compared with.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_exact.rehearsal.drafters import DRAFT_KINDS, DRAFTERS, draft_flags
from tools.proof import prefix_arms
from tools.proof.arm import Arm as Arm
from tools.proof.arm import Phase as Phase

VOCAB = 248320
FAMILIES = {"qwen3": 151936, "llama": 128256}
"""Families of --family, and tokens of their vocabularies."""
FAMILY_ARMS = ("plain", "dflash8", "ngram", "stock", "attention-hook-off")
"""What they serve, and the controls that concern them."""
PROMPT_LENGTHS = (37, 128, 255, 256, 257, 300, 511, 700, 1023, 1500, 64, 2049)
"""Around tile, split and chunk edges."""
SHORT_LENGTHS = (
    3, 5, 9, 16, 17, 20, 24, 28, 31, 32, 33, 48,
    63, 64, 65, 100, 129, 200, 255, 300, 400, 511, 513, 700,
)  # fmt: skip
"""Into every kind of prefill graph: much padding, little, none, and past the last."""
EAGER = ("--disable-prefill-cuda-graph",)
CARD_RATE = 0.887
"""Keeps 5.46 of 8 tokens a verify: (1 - p**8) / (1 - p), the DFlash2 card's length."""
OLD_NGRAM = "ngram_chain,verify_chain_ngram"
"""Without these hooks NGRAM verifies the host's draft trees as if they were chains."""


REQUESTS = 8
"""In flight at most, where an arm says nothing."""
_ONE = (Phase(),)
_FEW = (Phase(0.8, 8, 8),)
_PLAIN_SPEED = (
    Phase(0, 1, 2, logprobs=False),
    Phase(0, 8, 16, logprobs=False),
    Phase(0, 32, 32),
)
_SPEED = (
    Phase(CARD_RATE, 1, 4, logprobs=False),
    Phase(CARD_RATE, 8, 24, logprobs=False),
    Phase(CARD_RATE, 32, 64, logprobs=False),
)
_DFLASH8 = (
    Phase(0.0),
    Phase(0.3),
    Phase(0.5),
    Phase(0.8),
    Phase(1.0),
    Phase(0.8, concurrency=1, prompts=4),
    Phase(0.8, logprobs=False),
)
_AT_MANY_WIDTHS = ("dflash", "dflash2")
"""Drafters with arms of their own; every other one has one arm."""
_SHORT = tuple(
    Phase(text=text, concurrency=n) for text in ("short", "penalties") for n in (8, 1)
)
CONTEXT = 262144
_CHATS = (Phase(CARD_RATE, 8, 8, whole=CONTEXT - max(PROMPT_LENGTHS)),)
# More than some machines have: no answer gets long enough to need it.
_CHATS_ROOM = ("SGLANG_EXACT_PREEMPT_GIB", "192")
_REPEATED = tuple(Phase(text=text) for text in ("repeated", "few"))
ARMS = (
    Arm(
        "plain",
        "plain decode, 1 in flight against 8",
        phases=(Phase(), Phase(concurrency=1, prompts=2)),
        records=("random",),
    ),
    Arm(
        "plain-32",
        "plain decode, 1 to 32 in flight against 8",
        phases=_PLAIN_SPEED,
        requests=32,
    ),
    Arm("dflash8", "DFLASH, 8 draft tokens", "dflash", phases=_DFLASH8),
    Arm("dflash2", "DFLASH, 2 draft tokens", "dflash", 2, phases=_ONE),
    Arm("dflash4", "DFLASH, 4 draft tokens", "dflash", 4, phases=_ONE),
    Arm("dflash16", "DFLASH, 16 draft tokens", "dflash", 16, phases=_ONE),
    Arm(
        "dflash2-shaped",
        "DFlash2-shaped draft, 8 draft tokens",
        "dflash2",
        phases=(Phase(), *_SPEED),
        requests=32,
    ),
    *(
        Arm(
            one.name,
            f"{one.title}, {one.tokens} draft tokens",
            one.name,
            one.tokens,
            phases=_ONE,
        )
        for one in DRAFTERS.values()
        if one.name not in _AT_MANY_WIDTHS
    ),
    Arm(
        "plain-repeated",
        "plain decode of repetitive prompts",
        phases=tuple(
            turn for one in _REPEATED for turn in (one, one._replace(prompts=8))
        ),
        records=("repeated", "few"),
    ),
    # The tries fill up: what the first turn answers, the later ones are drafted.
    Arm(
        "ngram-tries",
        "NGRAM, real tries and repetitive prompts, no oracle",
        "ngram",
        oracle=False,
        phases=tuple(
            turn
            for one in _REPEATED
            for turn in (one._replace(first=True), one._replace(prompts=48))
        ),
    ),
    Arm(
        "prefill-eager",
        "plain decode of short prompts without prefill graphs",
        phases=_SHORT,
        records=("short", "penalties"),
        requests=24,
        flags=EAGER,
    ),
    *(
        Arm(
            f"prefill-graphs{more}",
            f"{title} of short prompts with prefill graphs",
            drafter,
            phases=tuple(
                one._replace(concurrency=24) if one.concurrency > 1 else one
                for one in _SHORT
            ),
            requests=24,
        )
        for more, title, drafter in (
            ("", "plain decode", None),
            ("-dflash", "DFLASH, 8 draft tokens,", "dflash"),
            ("-mtp", "MTP, 8 draft tokens,", "mtp"),
        )
    ),
    *(
        Arm(
            f"chats-{drafter or 'plain'}",
            f"{title}, 8 chats without max_tokens at {CONTEXT:,} tokens of context",
            drafter,
            phases=_CHATS,
            flags=("--context-length", str(CONTEXT)),
            env=(_CHATS_ROOM,),
        )
        for title, drafter in (("plain decode", None), ("DFLASH", "dflash"))
    ),
    Arm(
        "stock",
        "control: stock deterministic mode",
        "dflash",
        mode="stock",
        equal=False,
        phases=_FEW,
    ),
    Arm(
        "gdn-hook-off",
        "control: GDN hook off",
        "dflash",
        disable="gdn_verify",
        equal=False,
        phases=_FEW,
    ),
    Arm(
        "attention-hook-off",
        "control: attention hook off",
        "dflash",
        disable="attention_verify",
        equal=False,
        phases=_FEW,
    ),
    Arm(
        "ngram-chain-off",
        "control: NGRAM's draft trees taken for chains",
        "ngram",
        disable=OLD_NGRAM,
        oracle=False,
        equal=False,
        phases=tuple(one._replace(prompts=48) for one in _REPEATED),
    ),
    Arm(
        "default-plain",
        "stock default mode, plain decode",
        mode="stock",
        equal=None,
        deterministic=False,
        requests=32,
        phases=_PLAIN_SPEED,
    ),
    Arm(
        "default-dflash2-shaped",
        "stock default mode, DFlash2-shaped draft",
        "dflash2",
        mode="stock",
        equal=None,
        deterministic=False,
        requests=32,
        phases=_SPEED,
    ),
    *prefix_arms.ARMS,
)
BY_NAME = {arm.name: arm for arm in ARMS}
# One width each, for `--arms widths`.
SERIES = "dflash-w"
"""First part of their names; the evidence puts them into one line."""
WIDTHS = tuple(
    Arm(f"{SERIES}{n}", f"DFLASH, {n} draft tokens", "dflash", n, phases=_ONE)
    for n in range(2, 17)
)
BY_NAME |= {arm.name: arm for arm in WIDTHS}


def make_prompts(
    count: int, vocab: int, lengths: Sequence[int] = PROMPT_LENGTHS
) -> list[list[int]]:
    """Seeded prompts whose lengths sit around tile and split edges."""
    rng = random.Random(20261129)
    return [
        [
            rng.randrange(1000, vocab - 1000)
            for _ in range(lengths[i % len(lengths)] + i // len(lengths))
        ]
        for i in range(count)
    ]


def make_repeated_prompts(
    count: int, vocab: int, lengths: Sequence[int] = PROMPT_LENGTHS
) -> list[list[int]]:
    """Seeded prompts of segments that come again, in one prompt and across prompts.

    Every second one ends alike: there an n-gram trie knows several ways on.
    """
    rng = random.Random(20261130)
    low, high = (1000, vocab - 1000) if vocab > 4000 else (3, vocab)

    def segment(size: int) -> list[int]:
        return [rng.randrange(low, high) for _ in range(size)]

    shared = [segment(3 + i) for i in range(8)]
    prompts = []
    for i in range(count):
        pool = [segment(5), *rng.sample(shared, 3)]
        ids: list[int] = []
        while len(ids) < lengths[i % len(lengths)]:
            ids += rng.choice(pool)
        prompts.append([*ids, *shared[i % 2]])
    return prompts


def few_tokens(vocab: int, count: int = 16) -> dict[str, Any]:
    """Sampling parameters under which a random model writes with `count` tokens."""
    step = vocab // (count + 1)
    return {"logit_bias": {str(step * (i + 1)): 100.0 for i in range(count)}}


class Text(NamedTuple):
    """Prompts, and the sampling parameters that go with them.

    `tokens` of every answer; 0 for the proof's own number.
    """

    prompts: list[list[int]]
    sampling: dict[str, Any]
    tokens: int = 0


def texts(count: int, vocab: int) -> dict[str, Text]:
    """What phases ask, by name: random, repeated, and repeated with few tokens; short
    ones, and short ones with penalties."""
    repeated = make_repeated_prompts(count, vocab)
    short = make_prompts(count, vocab, SHORT_LENGTHS)
    penalties = {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
    return {
        "random": Text(make_prompts(count, vocab), {}),
        "short": Text(short, {}),
        "penalties": Text(short, penalties),
        "repeated": Text(repeated, {}),
        "few": Text(repeated, few_tokens(vocab)),
    }


class Sizes(NamedTuple):
    """What all servers of a proof share.

    Attributes:
        layers: of the target.
        context: context length in tokens.
        mem_fraction: the host's --mem-fraction-static.
        total_tokens: KV pool in tokens; 0 for what fits. Plain and speculative pools
            differ in size without it, which must not matter.
        tp: ranks.
    """

    layers: int = 64
    context: int = 16384
    mem_fraction: float = 0.85
    total_tokens: int = 0
    tp: int = 1


def server_flags(arm: Arm, models_dir: Path, sizes: Sizes) -> list[str]:
    """Flags of an arm's server; the same graph sizes in all arms of one width."""
    requests = str(arm.requests or REQUESTS)
    flags = [
        "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16",
        "--max-running-requests", requests,
        "--cuda-graph-max-bs-decode", requests,
        "--chunked-prefill-size", "8192", "--context-length", str(sizes.context),
        "--mem-fraction-static", str(sizes.mem_fraction), "--skip-server-warmup",
        *(prefix_arms.CACHE if arm.cache else ["--disable-radix-cache"]),
    ]  # fmt: skip
    if arm.mode == "stock":
        flags += EAGER
    if arm.drafter or arm.deterministic:
        # The host's default without a drafter stays what it is.
        flags += ["--attention-backend", "triton"]
    if sizes.total_tokens:
        flags += ["--max-total-tokens", str(sizes.total_tokens)]
    if sizes.tp > 1:
        flags += ["--tp-size", str(sizes.tp)]
    if arm.drafter:
        draft = None
        if arm.drafter in DRAFT_KINDS:
            draft = models_dir / f"{arm.drafter}-{sizes.layers}"
        flags += draft_flags(arm.drafter, draft, arm.draft_tokens)
    return flags


def chosen(names: str) -> list[Arm]:
    """The arms of a comma-separated list; "widths" stands for every draft width.

    Raises:
        ValueError: an unknown name.
    """
    wanted: list[str] = []
    for name in names.split(","):
        wanted += [arm.name for arm in WIDTHS] if name == "widths" else [name]
    unknown = sorted(set(wanted) - set(BY_NAME))
    if unknown:
        raise ValueError(
            f"found arms {', '.join(unknown)}, expected widths or some of "
            f"{', '.join(BY_NAME)}"
        )
    return [BY_NAME[name] for name in wanted]
