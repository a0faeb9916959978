# SPDX-License-Identifier: Apache-2.0
"""Every kind of request, plain and speculative, in one batch with all the others.

The reference is plain decoding, which answers some of them alone as well. The
speculative servers get the right drafts, and wrong ones among them. The control is
the same server with the request hooks off.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from hostile import NAMED, Bad, sample, status_of
from request_cases import (
    GREEDY,
    SAMPLED,
    TOKENS,
    Case,
    OverlapServer,
    TextServer,
    answer,
    ask,
    ask_all,
    prompt_of,
    stop_cases,
)
from traffic import bits, outcome, prompt, small_models

from sglang_exact.client.blocking import Completion
from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal.drafters import DRAFTERS
from sglang_exact.rehearsal.server import Server, draft_flags
from tools.proof import arms as proof_arms

pytestmark = pytest.mark.e2e

DISABLE = "SGLANG_EXACT_TEST_DISABLE_HOOKS"
OFF = (
    "accept_dflash,accept_dflash_adjust,penalties_count,stop_token_by_token,copies_seed"
)
STOP_PROMPT = prompt(7, 9)
MANY = (*GREEDY, *SAMPLED)
CONTEXT = 64
FLAGS = ("--context-length", str(CONTEXT))
# Prompt and answer: one token less than the context, all of it, one more. The host
# answers none of 58 tokens or more.
ENDS = (
    *((50, new) for new in (13, 14, 15)),
    *((57, new) for new in (5, 6, 7, 8)),
    *((length, 1) for length in (58, 63, 64)),
)
Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def text_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, and drafts of every kind."""
    return small_models(tmp_path_factory.mktemp("text-models"))


@pytest.fixture(scope="module")
def plain(text_models: Path) -> Iterator[Server]:
    with TextServer(text_models / "target", flags=FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def base(plain: Server) -> tuple[int, ...]:
    """The greedy continuation that the stops are cut from."""
    ids = ask(plain, Case("base", {}), STOP_PROMPT).ids
    assert len(set(ids[:9])) == 9, "the stop cases need distinct tokens"
    return ids


@pytest.fixture(scope="module")
def expected(plain: Server) -> Answers:
    found = ask_all(plain, MANY, [prompt_of(case) for case in MANY])
    return {c.name: answer(f) for c, f in zip(MANY, found, strict=True)}


@pytest.fixture(scope="module")
def expected_stops(plain: Server, base: tuple[int, ...]) -> Answers:
    cases = stop_cases(base)
    found = ask_all(plain, cases, [STOP_PROMPT] * len(cases))
    return {c.name: answer(f) for c, f in zip(cases, found, strict=True)}


def at_the_end(server: Server) -> list[Any]:
    """The answer or the refusal of every length, all at once."""

    def one(size: tuple[int, int]) -> Any:
        found = outcome(server, prompt(size[0], size[0]), size[1])
        return answer(found) if isinstance(found, Completion) else found

    with ThreadPoolExecutor(len(ENDS)) as pool:
        return list(pool.map(one, ENDS))


@pytest.fixture(scope="module")
def ends(plain: Server) -> list[Any]:
    found = at_the_end(plain)
    served = [size for size, x in zip(ENDS, found, strict=True) if isinstance(x, dict)]
    assert served == [(50, 13), (50, 14), (57, 5), (57, 6), (57, 7)]
    assert len(found[1]["ids"]) == CONTEXT - 2 - 50
    return found


@pytest.fixture(scope="module")
def plan(
    tmp_path_factory: pytest.TempPathFactory, expected: Answers, base: tuple[int, ...]
) -> Path:
    path = tmp_path_factory.mktemp("oracle") / "plan.json"
    _draft(path, 1.0, expected, base)
    return path


def _draft(
    path: Path,
    rate: float,
    expected: Answers,
    base: tuple[int, ...],
    ends: Sequence[Any] = (),
) -> None:
    known = [(prompt_of(case), expected[case.name]["ids"]) for case in MANY]
    for (length, _), found in zip(ENDS, ends, strict=False):
        if isinstance(found, dict):
            known.append((prompt(length, length), found["ids"]))
    oracle.write_plan(path, rate, [*known, (STOP_PROMPT, base)])


def _dflash(folder: Path, plan: Path, **env: str) -> TextServer:
    return TextServer(
        folder / "target",
        flags=[*FLAGS, *draft_flags("dflash", folder / "dflash")],
        env={oracle.VARIABLE: str(plan), **env},
    )


@pytest.fixture(scope="module")
def spec(text_models: Path, plan: Path) -> Iterator[Server]:
    with _dflash(text_models, plan) as server:
        yield server


@pytest.fixture(scope="module")
def hooks_off(text_models: Path, plan: Path) -> Iterator[Server]:
    with _dflash(text_models, plan, **{DISABLE: OFF}) as server:
        yield server


def test_plain_alone_equals_plain_together(plain: Server, expected: Answers) -> None:
    alone = [case for case in MANY if case.name in ("greedy", "frequency", "top_p")]
    for case in alone:
        assert answer(ask(plain, case, prompt_of(case))) == expected[case.name]


@pytest.mark.parametrize("rate", [1.0, 0.6])
def test_speculation_equals_plain(
    spec: Server, plan: Path, expected: Answers, base: tuple[int, ...], rate: float
) -> None:
    """Penalties, grammar, processors, bias, seeds, logprobs: one batch of all."""
    _draft(plan, rate, expected, base)
    found = ask_all(spec, MANY, [prompt_of(case) for case in MANY])
    for case, completion in zip(MANY, found, strict=True):
        assert answer(completion) == expected[case.name], case.name
    fast = {c.name: f.acceptance_length for c, f in zip(MANY, found, strict=True)}
    assert all(fast[name] > 1.2 for name in ("greedy", "bias", "seeded", "top_p"))
    # A processor is any Python at all: one token a step.
    assert fast["processor"] <= TOKENS / (TOKENS - 1)
    counted = ("frequency", "presence", "repetition", "seeded_penalty", "grammar")
    assert all(fast[name] > 1.2 for name in counted)
    if rate == 1.0:
        # Every draft is right, so a penalty or a grammar must not cost one.
        assert {fast[name] for name in counted} == {fast["greedy"]}


def test_stops_end_where_plain_decoding_ends(
    spec: Server,
    plan: Path,
    expected: Answers,
    expected_stops: Answers,
    base: tuple[int, ...],
) -> None:
    _draft(plan, 1.0, expected, base)
    cases = stop_cases(base)
    found = ask_all(spec, cases, [STOP_PROMPT] * len(cases))
    for case, completion in zip(cases, found, strict=True):
        assert answer(completion) == expected_stops[case.name], case.name
    # The cases would prove nothing if none of them ended early.
    ends = [len(a["ids"]) for a in expected_stops.values()]
    assert max(ends) < TOKENS


def _streamed(server: Server, case: Case) -> tuple[str, list[int]]:
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}
    body = {
        "input_ids": STOP_PROMPT,
        "sampling_params": {**sampling, **case.sampling},
        "stream": True,
    }
    request = urllib.request.Request(
        server.url + "/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    last: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=120) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                last = json.loads(line[len(b"data: ") :])
    return last["text"], last["output_ids"]


def test_streaming_and_not_streaming_agree(
    spec: Server, plain: Server, base: tuple[int, ...], expected_stops: Answers
) -> None:
    for case in stop_cases(base)[:3]:
        wanted = expected_stops[case.name]
        for server in (spec, plain):
            text, ids = _streamed(server, case)
            assert (text, tuple(ids)) == (wanted["text"], wanted["ids"]), case.name


def test_logprobs_asked_for_or_not(expected: Answers, spec: Server) -> None:
    """The ids are those of plain decoding with logprobs."""
    for case in (GREEDY[0], SAMPLED[1]):
        silent = case._replace(extra={"return_logprob": False})
        assert ask(spec, silent, prompt_of(case)).ids == expected[case.name]["ids"]


def test_host_alone_answers_otherwise(
    hooks_off: Server,
    plan: Path,
    expected: Answers,
    expected_stops: Answers,
    base: tuple[int, ...],
) -> None:
    """The control: without the hooks each marked case differs."""
    _draft(plan, 1.0, expected, base)
    cases = [case for case in MANY if case.control]
    prompts = [prompt_of(case) for case in cases]
    stops = [case for case in stop_cases(base) if case.control]
    found = ask_all(
        hooks_off, [*cases, *stops], [*prompts, *([STOP_PROMPT] * len(stops))]
    )
    wanted = {**expected, **expected_stops}
    equal = [
        case.name
        for case, completion in zip([*cases, *stops], found, strict=True)
        if answer(completion) == wanted[case.name]
    ]
    assert equal == []


def test_host_alone_answers_all_copies_alike(hooks_off: Server, spec: Server) -> None:
    """The control: without the hook n answers are one."""
    sampling = {"temperature": 0.9, "n": 3, "max_new_tokens": TOKENS}
    body = {"input_ids": STOP_PROMPT, "sampling_params": sampling}
    for server, count in ((hooks_off, 1), (spec, 3)):
        copies = server.client.request("/generate", body)
        assert len({tuple(copy["output_ids"]) for copy in copies}) == count


@pytest.mark.parametrize(
    ("sampling", "extra", "word"),
    [
        ({"beam_width": 2}, {}, "beam_width"),
        ({}, {"input_embeds": [[0.0] * 64] * 3, "input_ids": None}, "input_embeds"),
    ],
)
def test_refused_with_a_reason(
    plain: Server, sampling: dict[str, Any], extra: dict[str, Any], word: str
) -> None:
    with pytest.raises(RuntimeError, match=rf"(?s)HTTP 400.*{word}"):
        plain.client.generate(STOP_PROMPT, 3, extra=extra, **sampling)


def _hostile(server: Server, cases: list[Bad], wanted: dict[str, Any]) -> list[str]:
    """What is wrong after these requests, beside a neighbour that asks all the time."""
    case, done, others = GREEDY[0], threading.Event(), []

    def neighbour() -> None:
        while not (done.is_set() and others):
            others.append(answer(ask(server, case, prompt_of(case))) == wanted)

    with ThreadPoolExecutor(5) as pool:
        beside = pool.submit(neighbour)
        statuses = list(pool.map(status_of, repeat(server.url), cases))
        done.set()
        beside.result()
    others.append(answer(ask(server, case, prompt_of(case))) == wanted)
    faults = [
        f"{status} {bad}"
        for status, bad in zip(statuses, cases, strict=True)
        if not (400 <= status < 500 or (status == 200 and not bad.refused))
    ]
    return [*faults, *(["a neighbour's bits"] if not all(others) else [])]


@pytest.mark.parametrize("count", [50, pytest.param(150, marks=pytest.mark.slow)])
def test_no_request_ends_the_server(
    count: int,
    plain: Server,
    spec: Server,
    plan: Path,
    expected: Answers,
    base: tuple[int, ...],
) -> None:
    """Every named case and a sample of any value in any field: 4xx, or served.

    The larger sample begins with the smaller one, which runs every time.
    No status is 5xx or missing, and a neighbour's ids and logprobs keep their bits.
    """
    _draft(plan, 1.0, expected, base)
    for server, seed in ((plain, 1), (spec, 2)):
        cases = [*NAMED, *sample(seed, count)]
        assert _hostile(server, cases, expected[GREEDY[0].name]) == []
        assert server.client.is_ready()


COUNTED = ("frequency", "repetition", "min_new_tokens", "processor", "top_p")


def _overlapped(server: Server, expected: Answers) -> set[str]:
    """Names of the cases that overlap scheduling answers otherwise."""
    cases = [case for case in MANY if case.name in COUNTED]
    found = ask_all(server, cases, [prompt_of(case) for case in cases])
    pairs = zip(cases, found, strict=True)
    return {case.name for case, f in pairs if answer(f) != expected[case.name]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "dflash"])
def test_overlap_counts_every_token(
    text_models: Path, plan: Path, expected: Answers, kind: str | None
) -> None:
    """Also the control: one token late, the penalties are other ones."""
    flags = draft_flags(kind, text_models / kind) if kind else []
    env = {oracle.VARIABLE: str(plan)} if kind else {}
    target = text_models / "target"
    with OverlapServer(target, flags=flags, env=env) as server:
        assert server.info()["disable_overlap_schedule"] is False
        assert _overlapped(server, expected) == set()
    if kind is None:
        off = {DISABLE: "penalties_last_token"}
        with OverlapServer(target, env=off) as server:
            assert _overlapped(server, expected) >= {"frequency", "repetition"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if kind != "dflash"])
def test_other_drafters(
    text_models: Path,
    plan: Path,
    expected: Answers,
    base: tuple[int, ...],
    expected_stops: Answers,
    ends: list[Any],
    kind: str,
) -> None:
    """The same requests with every drafter, up to the last token of the context."""
    _draft(plan, 0.8, expected, base, ends)
    flags = [*FLAGS, *draft_flags(kind, text_models / kind)]
    env = {oracle.VARIABLE: str(plan)}
    with TextServer(text_models / "target", flags=flags, env=env) as server:
        found = ask_all(server, MANY, [prompt_of(case) for case in MANY])
        for case, completion in zip(MANY, found, strict=True):
            assert answer(completion) == expected[case.name], case.name
        assert at_the_end(server) == ends
        for case in stop_cases(base)[:2]:
            ended = answer(ask(server, case, STOP_PROMPT))
            assert ended == expected_stops[case.name], case.name


def test_end_of_the_context(
    spec: Server,
    plan: Path,
    expected: Answers,
    base: tuple[int, ...],
    ends: list[Any],
) -> None:
    """DFLASH; `test_other_drafters` asks the others."""
    _draft(plan, 0.8, expected, base, ends)
    assert at_the_end(spec) == ends


REPEATED = proof_arms.make_repeated_prompts(8, 512, (10, 16, 22))
FEW = proof_arms.few_tokens(512)


@pytest.mark.slow
@pytest.mark.parametrize("disabled", [None, proof_arms.OLD_NGRAM])
def test_real_tries(text_models: Path, plain: Server, disabled: str | None) -> None:
    """NGRAM without an oracle: prompts that share n-grams, text that repeats itself.

    The control verifies what the host's trie brings as if it were a chain.
    """
    kinds: tuple[dict[str, Any], ...] = ({}, FEW)
    wanted = [
        [bits(c) for c in plain.generate_many(REPEATED, 16, concurrency=4, **kind)]
        for kind in kinds
    ]
    env = {DISABLE: disabled} if disabled else {}
    flags = [*FLAGS, *draft_flags("ngram", None, 6)]
    wrong, tokens, verifies = 0, 0, 0
    with TextServer(text_models / "target", flags=flags, env=env) as server:
        for kind, want in zip(kinds, wanted, strict=True):
            # The second turn finds in the trie what the first one answered.
            for _ in range(2):
                found = server.generate_many(REPEATED, 16, concurrency=4, **kind)
                wrong += [bits(c) for c in found] != want
                tokens += sum(len(c.ids) - 1 for c in found)
                verifies += sum(c.spec_verify_ct for c in found)
    assert tokens > 1.5 * verifies > 0
    assert bool(wrong) is bool(disabled)
