# SPDX-License-Identifier: Apache-2.0
"""What a prefix cache saves: stage prefix-cache of `scripts/gpu_bench`.

A prompt that is asked again, a conversation, questions behind one prefix; plain
decoding with the cache, without, and the host's own. Each row has the hash of its
answers: where it is that of another row, so are all ids.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from sglang_exact.bench.drive import CannotRun, drive
from sglang_exact.bench.servers import Served
from sglang_exact.client.answer import IDS_ONLY, STREAMED, Options, Request, Sample
from tools.proof.speed_arms import SEED, PrefixScale, Scale

Row = dict[str, Any]
AGAIN = 2
"""How often a prompt is asked again: one of a whole number of 64s finds its last state
the second time."""


def ids(scale: Scale, name: str, length: int) -> tuple[int, ...]:
    """Seeded token ids."""
    rng, low = random.Random(f"{SEED}-{name}"), min(1000, scale.vocab // 8)
    return tuple(rng.randrange(low, scale.vocab - low) for _ in range(length))


async def _ask(
    served: Served, prompt: Sequence[int], tokens: int, options: Options = IDS_ONLY
) -> Sample:
    request = Request("prefix", tokens, ids=tuple(prompt), ignore_eos=True)
    answer = await served.client.ask(request, options)
    if answer.sample is None:
        raise CannotRun(f"{served.name}: {answer.error}")
    return answer.sample


def _row(served: Served, title: str, samples: Sequence[Sample], **found: Any) -> Row:
    said = hashlib.sha256(repr([sample.ids for sample in samples]).encode())
    return {
        "server": served.name,
        "title": title,
        "requests": len(samples),
        "prompt_tokens": sum(sample.prompt_tokens or 0 for sample in samples),
        "cached_tokens": sum(sample.cached_tokens or 0 for sample in samples),
        "answers": said.hexdigest()[:16],
        **found,
    }


async def _again(served: Served, scale: Scale, length: int) -> Row:
    """Seconds to the first token, with an empty cache and then asked again."""
    prompt = ids(scale, f"again-{length}", length)
    asked = [await _ask(served, prompt, 8, STREAMED) for _ in range(1 + AGAIN)]
    first = [round(one.ttft_s or one.latency_s, 4) for one in asked]
    return _row(served, f"{length:,} tokens, asked again", asked, first_token_s=first)


async def _chat(served: Served, scale: Scale, size: PrefixScale) -> Row:
    """A conversation: each prompt holds all that was said before."""
    prompt: tuple[int, ...] = ()
    asked, began = [], time.monotonic()
    for turn in range(size.turns):
        prompt += ids(scale, f"turn-{turn}", size.question)
        asked.append(await _ask(served, prompt, size.answer))
        prompt += asked[-1].ids
    title = f"{size.turns} turns, {size.question} + {size.answer} tokens"
    return _row(served, title, asked, seconds=round(time.monotonic() - began, 3))


async def _questions(served: Served, scale: Scale, size: PrefixScale) -> Row:
    """Short questions behind one prefix, many at once."""
    shared = ids(scale, "shared", size.shared)
    requests = [
        Request(
            f"{i}", size.short, ids=shared + ids(scale, f"question-{i}", size.short),
            ignore_eos=True,
        )
        for i in range(size.questions)
    ]  # fmt: skip
    load = await drive(served.client, requests, size.in_flight)
    if load.errors:
        raise CannotRun(f"{served.name}: {load.errors[0]}")
    title = f"{size.questions} questions behind {size.shared:,} tokens"
    return _row(
        served, title, load.samples, seconds=round(load.wall_s, 3),
        requests_s=round(len(requests) / load.wall_s, 2), in_flight=size.in_flight,
    )  # fmt: skip


async def measure(served: Served, scale: Scale) -> AsyncIterator[Row]:
    """Each row as it is done; the cache is empty before it.

    Raises CannotRun where an answer or the empty cache is missing.
    """
    size = scale.prefix
    # Whatever is compiled or tuned for the first prompt is not timed.
    await _ask(served, ids(scale, "warm-up", min(size.lengths)), 2)
    works: list[Callable[[], Awaitable[Row]]] = [
        *(partial(_again, served, scale, length) for length in size.lengths),
        partial(_chat, served, scale, size),
        partial(_questions, served, scale, size),
    ]
    for work in works:
        if (why := await served.client.flush()) is not None:
            raise CannotRun(f"{served.name}: the prefix cache was not emptied: {why}")
        yield await work()
