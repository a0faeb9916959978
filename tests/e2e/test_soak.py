# SPDX-License-Identifier: Apache-2.0
"""Mixed traffic against a speculative server: every answer is the plain one.

Requests of every kind arrive at random, wait for memory, are cut in chunks, are
rejected half of the time, or are aborted. SGLANG_EXACT_TEST_SOAK=300 sets how many.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from request_cases import TextServer
from traffic import Bits, bits, outcome, prompt

from sglang_exact.rehearsal import models, oracle, tokenizer
from sglang_exact.rehearsal.client import Completion
from sglang_exact.rehearsal.server import Server, draft_flags

SIZE_VARIABLE = "SGLANG_EXACT_TEST_SOAK"
REPORT_VARIABLE = "SGLANG_EXACT_TEST_SOAK_REPORT"
SIZE = int(os.environ.get(SIZE_VARIABLE, "24"))
SEED = 7
MEAN_PAUSE_S = 0.4
# Servers refuse variables that they do not know.
CLEAN: dict[str, str | None] = {SIZE_VARIABLE: None, REPORT_VARIABLE: None}

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300 + 30 * SIZE),
]


class Request(NamedTuple):
    """One request of the soak; `abort_after_s` is None if it may end."""

    kind: str
    ids: list[int]
    tokens: int
    sampling: dict[str, Any]
    pause_s: float
    abort_after_s: float | None


def _greedy(rng: random.Random) -> dict[str, Any]:
    return {}


def _stop(rng: random.Random) -> dict[str, Any]:
    # About one token in eight ends the answer.
    return {"ignore_eos": False, "stop_token_ids": rng.sample(range(3, 512), 64)}


def _string(rng: random.Random) -> dict[str, Any]:
    # The host takes at most 32 strings.
    tokens = rng.sample(range(3, 512), 32)
    return {"ignore_eos": False, "stop": [tokenizer.piece(x) for x in tokens]}


def _grammar(rng: random.Random) -> dict[str, Any]:
    return {"regex": "([a-f][a-z]){4,20}"}


def _penalty(rng: random.Random) -> dict[str, Any]:
    name, value = rng.choice(
        [
            ("frequency_penalty", 1.5),
            ("presence_penalty", 1.0),
            ("repetition_penalty", 1.7),
        ]
    )
    return {name: value}


def _minimum(rng: random.Random) -> dict[str, Any]:
    return {**_stop(rng), "min_new_tokens": 3}


def _bias(rng: random.Random) -> dict[str, Any]:
    return {"logit_bias": {str(rng.randrange(3, 512)): 4.0 for _ in range(8)}}


def _seeded(rng: random.Random) -> dict[str, Any]:
    cut = rng.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
    seed = rng.randrange(1 << 30)
    return {"temperature": rng.choice([0.7, 1.0]), "sampling_seed": seed, **cut}


KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "greedy": _greedy,
    "stop": _stop,
    "string": _string,
    "penalty": _penalty,
    "minimum": _minimum,
    "bias": _bias,
    "seeded": _seeded,
    "grammar": _grammar,
}


def draw(seed: int, size: int) -> list[Request]:
    """`size` requests, the same for the same seed; one in six is aborted."""
    rng = random.Random(seed)
    found = []
    for i in range(size):
        kind = list(KINDS)[i % len(KINDS)]
        # One prompt in eight is cut at a chunk border.
        length = 90 if rng.random() < 0.125 else rng.randint(4, 24)
        aborted = rng.random() < 1 / 6
        found.append(
            Request(
                kind,
                prompt(seed * 1000 + i, length),
                rng.randint(3, 9),
                KINDS[kind](rng),
                rng.expovariate(1 / MEAN_PAUSE_S),
                rng.uniform(0.0, 6.0) if aborted else None,
            )
        )
    return found


def serve(server: Server, requests: list[Request]) -> list[Any]:
    """Every request at its time; its Completion, or the server's error text."""
    with ThreadPoolExecutor(max_workers=2 * len(requests)) as pool:
        futures: list[Future[Any]] = []
        for i, request in enumerate(requests):
            time.sleep(request.pause_s)
            rid = f"soak-{i}-end"
            futures.append(
                pool.submit(
                    outcome,
                    server,
                    request.ids,
                    request.tokens,
                    extra={"rid": rid},
                    **request.sampling,
                )
            )
            if request.abort_after_s is not None:
                pool.submit(_abort, server, rid, request.abort_after_s)
        return [future.result() for future in futures]


def _abort(server: Server, rid: str, after_s: float) -> None:
    time.sleep(after_s)
    server.client.request("/abort_request", {"rid": rid})


def wrong(request: Request, answer: Any, plain: Bits) -> bool:
    """Whether an answer is not the plain one, or not its start if aborted."""
    if not isinstance(answer, Completion):
        return request.abort_after_s is None
    if answer.finish_reason != "abort":
        return bits(answer) != plain
    if request.abort_after_s is None:
        return True
    ids, logprobs = bits(answer)
    return (ids, logprobs) != (plain[0][: len(ids)], plain[1][: len(logprobs)])


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return draw(SEED, SIZE)


@pytest.fixture(scope="module")
def text_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, and a draft."""
    folder = tmp_path_factory.mktemp("soak-models")
    tokenizer.make_tokenizer(models.make_target(folder / "target"))
    models.make_draft(folder / "dflash", "dflash")
    return folder


@pytest.fixture(scope="module")
def plain(text_models: Path, requests: list[Request]) -> list[Bits]:
    """What plain decoding answers to each request alone."""
    flags = ("--context-length", "256")
    with TextServer(text_models / "target", flags=flags, env=CLEAN) as server:
        return [bits(server.generate(r.ids, r.tokens, **r.sampling)) for r in requests]


def test_every_answer_is_the_plain_one(
    text_models: Path, tmp_path: Path, requests: list[Request], plain: list[Bits]
) -> None:
    plan = tmp_path / "oracle.json"
    pairs = [(r.ids, ids) for r, (ids, _) in zip(requests, plain, strict=True)]
    oracle.write_plan(plan, 0.5, pairs, seed=SEED)
    flags = [
        "--context-length", "256", "--max-total-tokens", "320",
        "--chunked-prefill-size", "64", "--max-running-requests", "6",
        *draft_flags("dflash", text_models / "dflash"),
    ]  # fmt: skip
    env = {**CLEAN, oracle.VARIABLE: str(plan)}
    began = time.monotonic()
    with TextServer(
        text_models / "target", flags=flags, env=env, request_timeout_s=120 + 10 * SIZE
    ) as server:
        answers = serve(server, requests)
        took = time.monotonic() - began
        # Idle again: nothing is stuck and no slot is lost.
        server.client.flush_cache()
        again = bits(server.generate(requests[0].ids, requests[0].tokens))
    found = _report(requests, answers, plain, took)
    assert found["wrong"] == []
    assert found["answered"] == len(requests)
    assert again == plain[0]
    assert found["drafts_kept"]
    assert found["kinds"] == dict(Counter(r.kind for r in requests))


def _report(
    requests: list[Request], answers: list[Any], plain: list[Bits], took_s: float
) -> dict[str, Any]:
    """Counts of what happened; written to a file if a variable names one."""
    done = [a for a in answers if isinstance(a, Completion)]
    found = {
        "requests": len(requests),
        "answered": len(answers),
        "completed": sum(a.finish_reason != "abort" for a in done),
        "aborted": sum(a.finish_reason == "abort" for a in done),
        "stopped": sum(a.finish_reason == "stop" for a in done),
        "refused": [a for a in answers if not isinstance(a, Completion)],
        "tokens": sum(len(a.ids) for a in done),
        "drafts_kept": any((a.accept_length or 0) > 1.5 for a in done),
        "kinds": dict(Counter(r.kind for r in requests)),
        "wrong": [
            (i, r.kind)
            for i, (r, a, p) in enumerate(zip(requests, answers, plain, strict=True))
            if wrong(r, a, p)
        ],
        "seed": SEED,
        "seconds": round(took_s, 1),
    }
    path = os.environ.get(REPORT_VARIABLE)
    if path:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")
    return found


def test_the_judge_can_fail() -> None:
    """Control: another token, another bit, an end too early and an error are wrong."""
    request = draw(SEED, 1)[0]._replace(abort_after_s=None)

    def answer(ids: tuple[int, ...], logprobs: tuple[int, ...], end: str) -> Any:
        return Completion(ids, logprobs, end, 1, len(ids), None, {})

    good = ((5, 6), (7, 8))
    assert not wrong(request, answer((5, 6), (7, 8), "length"), good)
    for bad in (
        answer((5, 9), (7, 8), "length"),
        answer((5, 6), (7, 9), "length"),
        answer((5,), (7,), "stop"),
        answer((5,), (7,), "abort"),
        "HTTP 500",
    ):
        assert wrong(request, bad, good)
    aborted = request._replace(abort_after_s=1.0)
    assert not wrong(aborted, answer((5,), (7,), "abort"), good)
    assert wrong(aborted, answer((6,), (7,), "abort"), good)
