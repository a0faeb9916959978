# SPDX-License-Identifier: Apache-2.0
"""Mixed traffic against a speculative server: every answer is the plain one.

Requests of every kind arrive at random, wait for memory, are cut in chunks, are
rejected half of the time, or are aborted. SGLANG_EXACT_TEST_SOAK=300 sets how many,
SGLANG_EXACT_TEST_SOAK_SEED which ones, SGLANG_EXACT_TEST_SOAK_DRAFTER the drafter:
`ngram-tries` is NGRAM without the oracle, with prompts that repeat themselves and one
another. SGLANG_EXACT_TEST_SOAK_REPORT names a JSON file for what came out, and a log of
the progress is kept beside it.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from request_cases import OverlapServer, TextServer, follow
from traffic import outcome, prompt, small_models

from sglang_exact.client.blocking import Completion
from sglang_exact.hooks.testing import oracle
from sglang_exact.host import source as host
from sglang_exact.rehearsal import tokenizer
from sglang_exact.rehearsal.server import Server, draft_flags
from tools.proof import arms as proof_arms

SIZE_VARIABLE = "SGLANG_EXACT_TEST_SOAK"
SEED_VARIABLE = "SGLANG_EXACT_TEST_SOAK_SEED"
DRAFTER_VARIABLE = "SGLANG_EXACT_TEST_SOAK_DRAFTER"
REPORT_VARIABLE = "SGLANG_EXACT_TEST_SOAK_REPORT"
SIZE = int(os.environ.get(SIZE_VARIABLE, "24"))
DRAFTER = os.environ.get(DRAFTER_VARIABLE, "dflash")
TRIES = DRAFTER == "ngram-tries"
REPORT = os.environ.get(REPORT_VARIABLE)
SEED = int(os.environ.get(SEED_VARIABLE, "7"))
MEAN_PAUSE_S = 0.4
# More than run at once, so that some always wait and their aborts come early.
IN_FLIGHT = 10
# One in so many is also asked of the plain server alone.
ALONE_EVERY = 12
# States of six running requests, and of two prefixes.
CACHE = ("--max-mamba-cache-size", "32")
# How the host ends a request that is aborted before it starts: a 400.
WAITING = "Aborted by AbortReq"
# Servers refuse variables that they do not know.
CLEAN: dict[str, str | None] = dict.fromkeys(
    (SIZE_VARIABLE, SEED_VARIABLE, DRAFTER_VARIABLE, REPORT_VARIABLE)
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600 + 30 * SIZE),
]


class Request(NamedTuple):
    """One request; aborted after so many mean latencies unless that is None."""

    kind: str
    ids: list[int]
    tokens: int
    sampling: dict[str, Any]
    pause_s: float
    abort_after: float | None

    @property
    def extra(self) -> dict[str, Any]:
        """Fields of the request beside its sampling parameters."""
        asks = "custom_params" in self.sampling
        return {"custom_logit_processor": follow()} if asks else {}


class Answer(NamedTuple):
    """What has to be equal: ids, float32 bits of their logprobs, text."""

    ids: tuple[int, ...]
    logprobs: tuple[int, ...]
    text: str


def answer(completion: Completion) -> Answer:
    """The comparable part of a completion."""
    text = completion.raw.get("text", "")
    return Answer(completion.ids, completion.logprobs, text)


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
    # Some end before the budget does.
    return {"regex": rng.choice(["([a-f][a-z]){4,20}", "([a-f][a-z]){1,3}"])}


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


def _processor(rng: random.Random) -> dict[str, Any]:
    return {"custom_params": {"any": rng.randrange(9)}}


def _mixed(rng: random.Random) -> dict[str, Any]:
    """Three kinds in one request."""
    asked: dict[str, Any] = {}
    for kind in rng.sample([k for k in KINDS if k not in ("greedy", "mixed")], 3):
        asked |= KINDS[kind](rng)
    return asked


KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "greedy": _greedy,
    "stop": _stop,
    "string": _string,
    "penalty": _penalty,
    "minimum": _minimum,
    "bias": _bias,
    "seeded": _seeded,
    "grammar": _grammar,
    "processor": _processor,
    "mixed": _mixed,
}


def repetitive(seed: int, size: int, rng: random.Random) -> list[Request]:
    """Requests whose prompts, n-grams and answers come again; one in six is aborted.

    Half of them are greedy, most of these with few tokens to write with.
    """
    prompts = proof_arms.make_repeated_prompts(12, 512, (6, 10, 17, 24))
    few = proof_arms.few_tokens(512)
    found = []
    for i in range(size):
        ids = prompts[rng.randrange(len(prompts))]
        kind = list(KINDS)[i // 2 % len(KINDS)] if i % 2 else "greedy"
        sampling = KINDS[kind](random.Random(seed + i % 20))
        if kind == "greedy" and rng.random() < 0.7:
            sampling = few
        found.append(
            Request(
                kind,
                ids,
                rng.randint(6, 16),
                sampling,
                rng.expovariate(1 / MEAN_PAUSE_S),
                rng.uniform(0.0, 1.0) if rng.random() < 1 / 6 else None,
            )
        )
    return found


def draw(seed: int, size: int, shared: bool = False) -> list[Request]:
    """`size` requests, the same for the same seed; one in six is aborted.

    Two of three `shared` ones begin like others.
    """
    rng = random.Random(seed)
    if TRIES:
        return repetitive(seed, size, rng)
    found = []
    for i in range(size):
        kind = list(KINDS)[i % len(KINDS)]
        # One prompt in sixteen is cut at a chunk border.
        length = 90 if rng.random() < 1 / 16 else rng.randint(4, 24)
        aborted = rng.random() < 1 / 6
        before = prompt(rng.randrange(3), 70) if shared and i % 3 else []
        found.append(
            Request(
                kind,
                before + prompt(seed * 1000 + i, length),
                rng.randint(3, 9),
                KINDS[kind](rng),
                rng.expovariate(1 / MEAN_PAUSE_S),
                rng.uniform(0.0, 1.0) if aborted else None,
            )
        )
    return found


class Log:
    """A line for every answer, on the terminal (pytest -s) and beside the report."""

    def __init__(self, total: int) -> None:
        self._total, self._lock, self._done = total, threading.Lock(), Counter[str]()
        self._began = time.monotonic()
        self._file = Path(REPORT).with_suffix(".log") if REPORT else None
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.unlink(missing_ok=True)

    def line(self, phase: str, request: Request, found: Any) -> None:
        """Count one answer and write it down."""
        end = found.finish_reason if isinstance(found, Completion) else "error"
        with self._lock:
            self._done[phase] += 1
            text = (
                f"{time.monotonic() - self._began:7.1f} s {phase} "
                f"{self._done[phase]}/{self._total} {request.kind} {end}"
            )
            print(text, flush=True)  # noqa: T201
            if self._file:
                with self._file.open("a") as file:
                    file.write(text + "\n")


class Traffic:
    """Requests at their times against one server, at most IN_FLIGHT at once."""

    def __init__(self, server: Server, log: Log, prefix: str) -> None:
        self._server, self._log, self._prefix = server, log, prefix
        self._room = threading.Semaphore(IN_FLIGHT)
        self._ended, self._seconds = 0, 0.0

    def serve(self, requests: list[Request]) -> list[Any]:
        """Every request's Completion, or the server's error text."""
        with (
            ThreadPoolExecutor(max_workers=IN_FLIGHT) as pool,
            ThreadPoolExecutor(max_workers=len(requests)) as aborts,
        ):
            futures: list[Future[Any]] = []
            for i, request in enumerate(requests):
                time.sleep(request.pause_s)
                self._room.acquire()
                rid = f"{self._prefix}-{i}-end"
                futures.append(pool.submit(self._one, rid, request))
                if request.abort_after is not None:
                    aborts.submit(self._abort, rid, request.abort_after)
            return [future.result() for future in futures]

    def _one(self, rid: str, request: Request) -> Any:
        began = time.monotonic()
        found = outcome(
            self._server,
            request.ids,
            request.tokens,
            extra={"rid": rid, **request.extra},
            **request.sampling,
        )
        self._ended += 1
        self._seconds += time.monotonic() - began
        self._room.release()
        self._log.line(self._prefix, request, found)
        return found

    def _abort(self, rid: str, after: float) -> None:
        # In units of the latency so far: some wait, some run, on any machine.
        time.sleep(after * (self._seconds / self._ended if self._ended else 2.0))
        self._server.client.request("/abort_request", {"rid": rid})


def wrong(request: Request, found: Any, plain: Answer) -> bool:
    """Whether an answer is not the plain one, or not its start if aborted."""
    if not isinstance(found, Completion):
        return request.abort_after is None or WAITING not in str(found)
    got = answer(found)
    if found.finish_reason != "abort":
        return got != plain
    if request.abort_after is None:
        return True
    return (got.ids, got.logprobs) != (
        plain.ids[: len(got.ids)],
        plain.logprobs[: len(got.logprobs)],
    )


@pytest.fixture(scope="module", params=[False, True], ids=["computed", "cached"])
def cached(request: pytest.FixtureRequest) -> bool:
    """Whether the speculative server keeps prefixes."""
    if request.param and TRIES:
        pytest.skip("prompts of tries end before the first state that is kept")
    return bool(request.param)


@pytest.fixture(scope="module")
def requests(cached: bool) -> list[Request]:
    return draw(SEED, SIZE, cached)


@pytest.fixture(scope="module")
def log(cached: bool) -> Log:
    return Log(SIZE)


@pytest.fixture(scope="module")
def text_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_models(tmp_path_factory.mktemp("soak-models"))


@pytest.fixture(scope="module")
def plain(text_models: Path, requests: list[Request], log: Log) -> list[Answer]:
    """What plain decoding answers; a sample of it is asked again, alone."""
    flags = ["--context-length", "256", "--max-running-requests", "12"]
    flags += ["--disable-radix-cache"]
    unaborted = [r._replace(pause_s=0.0, abort_after=None) for r in requests]
    with TextServer(text_models / "target", flags=flags, env=CLEAN) as server:
        found = Traffic(server, log, "plain").serve(unaborted)
        answers = [answer(completion) for completion in found]
        for i in range(0, SIZE, ALONE_EVERY):
            alone = outcome(
                server,
                requests[i].ids,
                requests[i].tokens,
                extra=requests[i].extra,
                **requests[i].sampling,
            )
            log.line("alone", requests[i], alone)
            assert answer(alone) == answers[i], i
    return answers


def test_every_answer_is_the_plain_one(
    text_models: Path,
    tmp_path: Path,
    requests: list[Request],
    plain: list[Answer],
    log: Log,
    cached: bool,
) -> None:
    env, drafter = dict(CLEAN), DRAFTER.removesuffix("-tries")
    if not TRIES:
        plan = tmp_path / "oracle.json"
        pairs = [(r.ids, a.ids) for r, a in zip(requests, plain, strict=True)]
        oracle.write_plan(plan, 0.5, pairs, seed=SEED)
        env[oracle.VARIABLE] = str(plan)
    flags = [
        "--context-length", "256", "--max-total-tokens", "640" if cached else "320",
        "--chunked-prefill-size", "64", "--max-running-requests", "6",
        *(CACHE if cached else ["--disable-radix-cache"]),
        *draft_flags(drafter, text_models / drafter),
    ]  # fmt: skip
    began = time.monotonic()
    # A request that is lost ends in the client's timeout, as an error.
    with OverlapServer(
        text_models / "target", flags=flags, env=env, request_timeout_s=600
    ) as server:
        answers = Traffic(server, log, "exact").serve(requests)
        took = time.monotonic() - began
        # Idle again: nothing is stuck and no slot is lost.
        server.client.flush_cache()
        left = _load(server)
        again = answer(
            server.generate(requests[0].ids, requests[0].tokens, **requests[0].sampling)
        )
        attested = server.info()["sglang_exact"]
    found = _report(requests, answers, plain, took, attested, left)
    assert found["wrong"] == []
    assert found["errors"] == []
    assert found["answered"] == len(requests)
    assert found["completed"] + found["aborted"] == len(requests)
    assert left == 0
    assert again == plain[0]
    assert found["drafts_kept"]
    assert bool(found["cached_tokens"]) is cached
    assert found["kinds"] == dict(Counter(r.kind for r in requests))


def _load(server: Server) -> int:
    """Requests and KV slots that the idle server still counts as in use."""
    loads = server.client.request("/v1/loads")["loads"]
    counts = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    return sum(int(load[name]) for load in loads for name in counts)


def _report(
    requests: list[Request],
    answers: list[Any],
    plain: list[Answer],
    took_s: float,
    attested: dict[str, Any],
    left: int,
) -> dict[str, Any]:
    """Counts of what happened; written to a file if a variable names one."""
    done = [a for a in answers if isinstance(a, Completion)]
    ended = [a for a in done if a.finish_reason != "abort"]
    aborted = [a for a in done if a.finish_reason == "abort"]
    texts = [a for a in answers if not isinstance(a, Completion)]
    waiting = [a for a in texts if WAITING in a]
    verifies = sum(a.spec_verify_ct for a in ended)
    found = {
        "command": f"{SIZE_VARIABLE}={SIZE} {SEED_VARIABLE}={SEED} "
        f"{DRAFTER_VARIABLE}={DRAFTER} pytest tests/e2e/test_soak.py",
        "date": time.strftime("%Y-%m-%d"),
        "device": "CPU, interpreted kernels, tiny random model",
        "versions": {"sglang": host.version("sglang"), **host.stack_versions()},
        "acceptance": "real tries, repetitive prompts, no oracle"
        if TRIES
        else "set by the oracle drafter, rate 0.5",
        "seed": SEED,
        "drafter": DRAFTER,
        "requests": len(requests),
        "answered": len(answers),
        "completed": len(ended),
        "completed_equal": sum(
            not wrong(r, a, p)
            for r, a, p in zip(requests, answers, plain, strict=True)
            if isinstance(a, Completion) and a.finish_reason != "abort"
        ),
        "aborted": len(aborted) + len(waiting),
        "aborted_while_running": sum(bool(a.ids) for a in aborted),
        "stopped": sum(a.finish_reason == "stop" for a in done),
        "errors": [a for a in texts if WAITING not in a],
        "left_on_server": left,
        "cached_tokens": sum(
            # An answer that was aborted before it ran has none.
            a.raw["meta_info"].get("cached_tokens", 0)
            for a in done
        ),
        "plain_also_alone": len(range(0, len(requests), ALONE_EVERY)),
        "tokens": sum(len(a.ids) for a in done),
        "acceptance_length": round(
            sum(len(a.ids) for a in ended) / max(verifies, 1), 2
        ),
        "drafts_kept": any((a.acceptance_length or 0) > 1.5 for a in done),
        "kinds": dict(Counter(r.kind for r in requests)),
        # With what was returned: a wrong answer may be rare.
        "wrong": [
            (i, r.kind, repr(a), repr(p))
            for i, (r, a, p) in enumerate(zip(requests, answers, plain, strict=True))
            if wrong(r, a, p)
        ],
        "seconds": round(took_s, 1),
        "attestation": attested,
    }
    if REPORT:
        Path(REPORT).write_text(json.dumps(found, indent=1) + "\n")
    return found


def test_the_judge_can_fail() -> None:
    """Control: another token, bit, text, an end too early and an error are wrong."""
    request = draw(SEED, 1)[0]._replace(abort_after=None)

    def said(
        ids: tuple[int, ...], logprobs: tuple[int, ...], end: str, text: str = "ab"
    ) -> Any:
        return Completion(ids, logprobs, end, 1, len(ids), None, {"text": text})

    good = Answer((5, 6), (7, 8), "ab")
    assert not wrong(request, said((5, 6), (7, 8), "length"), good)
    for bad in (
        said((5, 9), (7, 8), "length"),
        said((5, 6), (7, 9), "length"),
        said((5, 6), (7, 8), "length", "a"),
        said((5,), (7,), "stop"),
        said((5,), (7,), "abort"),
        "HTTP 500",
    ):
        assert wrong(request, bad, good)
    aborted = request._replace(abort_after=1.0)
    assert not wrong(aborted, said((5,), (7,), "abort"), good)
    assert wrong(aborted, said((6,), (7,), "abort"), good)
    assert wrong(aborted, "HTTP 500", good)
    assert not wrong(aborted, f"HTTP 400 {WAITING}", good)
    assert wrong(request, f"HTTP 400 {WAITING}", good)
