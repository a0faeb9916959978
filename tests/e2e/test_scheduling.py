# SPDX-License-Identifier: Apache-2.0
"""Who else is served, how a prompt is cut, and what memory allows: the same bits.

Every server runs on the CPU with interpreted kernels, so this proves scheduling and
wiring. Each promise has a control that breaks without its hook.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from traffic import (
    Background,
    Bits,
    bits,
    outcomes,
    prompt,
    small_models,
    staggered,
    together,
)

from sglang_exact.client.blocking import Completion
from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal.server import Server, draft_flags

pytestmark = pytest.mark.e2e

TOKENS = 4
# Lengths around the 64-token grid: several chunks, one and a tail, less than one.
PROMPTS = [prompt(1, 20), prompt(2, 136), prompt(3, 70)]
CHAT = [{"role": "user", "content": "a"}]
WHOLE = ("--context-length", "512", "--chunked-prefill-size", "-1")
DISABLE = "SGLANG_EXACT_TEST_DISABLE_HOOKS"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_models(tmp_path_factory.mktemp("scheduling-models"))


@pytest.fixture(scope="module")
def plain(small: Path) -> Iterator[Server]:
    """Prompts are never cut; decoding is plain."""
    with Server(small / "target", flags=WHOLE) as server:
        yield server


@pytest.fixture(scope="module")
def alone(plain: Server) -> list[Bits]:
    """Each prompt served alone, prefilled in one piece: the reference."""
    return [bits(plain.generate(p, TOKENS)) for p in PROMPTS]


def test_neighbours_do_not_matter(plain: Server, alone: list[Bits]) -> None:
    """Batches of mixed length, and a long prefill between two decode steps."""
    assert [bits(c) for c in together(plain, PROMPTS, TOKENS)] == alone
    order = [0, 2, 1]
    late = staggered(plain, [(PROMPTS[i], TOKENS) for i in order], pause_s=0.3)
    assert [bits(c) for c in late] == [alone[i] for i in order]
    repeated = [PROMPTS[0]] * 5
    assert {bits(c) for c in together(plain, repeated, TOKENS)} == {alone[0]}


def test_aborted_neighbour_leaves_no_trace(plain: Server, alone: list[Bits]) -> None:
    victim = Background(plain, PROMPTS[2], 200)
    survivor = Background(plain, PROMPTS[0], TOKENS)
    time.sleep(4)
    ended = victim.abort()
    assert isinstance(ended, Completion)
    assert ended.finish_reason == "abort"
    assert 0 < len(ended.ids) < 200
    result = survivor.result()
    assert isinstance(result, Completion)
    assert bits(result) == alone[0]
    # Its slots are used again.
    assert [bits(c) for c in together(plain, PROMPTS[:2], TOKENS)] == alone[:2]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": CHAT}),
        ("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 2}),
        ("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 2, "stream": True}),
        ("/api/chat", {"messages": CHAT}),
        ("/api/generate", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/generate", {"text": "a"}),
    ],
)
def test_endpoints_of_text_need_a_tokenizer(
    plain: Server, path: str, body: dict[str, object]
) -> None:
    with pytest.raises(RuntimeError, match=r"HTTP 400.*tokenizer"):
        plain.client.request(path, {"model": "default", **body})


@pytest.mark.parametrize("disabled", [None, "prefill_grid"])
def test_chunk_grid(small: Path, alone: list[Bits], disabled: str | None) -> None:
    """Small chunks, other settings, prompts that cut one another short.

    Without the grid, the first prompt's 20 tokens leave the second a cut at 108.
    """
    flags = (
        "--context-length", "512", "--chunked-prefill-size", "128",
        "--max-running-requests", "3", "--mem-fraction-static", "0.2",
        "--enable-metrics", "--log-requests", "--log-level", "info",
    )  # fmt: skip
    with Server(small / "target", flags=flags, env={DISABLE: disabled}) as server:
        found = [bits(c) for c in together(server, PROMPTS, TOKENS)]
        found_eos = [
            bits(c) for c in together(server, PROMPTS, TOKENS, ignore_eos=False)
        ]
    if disabled is None:
        assert found == alone
        assert found_eos == alone
    else:
        assert found[0] == alone[0]
        assert found[1] != alone[1]


class OverlapServer(Server):
    """Schedules the next step while the last one runs, as servers do by default."""

    def command(self) -> list[str]:
        return [x for x in super().command() if x != "--disable-overlap-schedule"]


def test_verify_with_overlap_and_odd_chunks(
    small: Path, alone: list[Bits], tmp_path: Path
) -> None:
    """Speculation, overlap scheduling, another context, chunks off the grid."""
    plan = tmp_path / "oracle.json"
    known = [(p, ids) for p, (ids, _) in zip(PROMPTS, alone, strict=True)]
    oracle.write_plan(plan, 0.5, known)
    flags = [
        "--context-length", "768", "--chunked-prefill-size", "100",
        *draft_flags("dflash", small / "dflash"),
    ]  # fmt: skip
    with OverlapServer(
        small / "target", flags=flags, env={oracle.VARIABLE: str(plan)}
    ) as server:
        assert [bits(c) for c in together(server, PROMPTS, TOKENS)] == alone
        order = [0, 2, 1]
        late = staggered(server, [(PROMPTS[i], TOKENS) for i in order], pause_s=0.3)
        assert [bits(c) for c in late] == [alone[i] for i in order]


# Six requests of 8 + 48 tokens in 100 slots: one and three quarters fit to their ends.
SMALL_POOL = (
    "--context-length", "64", "--max-total-tokens", "100",
    "--schedule-conservativeness", "0.1",
)  # fmt: skip
SMALL = [prompt(seed, 8) for seed in range(11, 17)]
LONG = 48
# With ignore_eos the host itself would wait until the whole answer fits.
FULL = {"ignore_eos": False, "logit_bias": {"2": -1000.0}}
AWAY = "SGLANG_EXACT_PREEMPT_GIB"


def _served(server: Server) -> list[Bits]:
    return [bits(answer) for answer in together(server, SMALL, LONG, **FULL)]


def _counts(server: Server) -> dict[str, int]:
    state = server.client.info()["internal_states"][0]
    counts: dict[str, int] = state["sglang_exact_preemption"]
    return counts


def _preempted(server: Server) -> int:
    """How many were sent to host memory; all of them came back."""
    counts = _counts(server)
    assert (counts["away"], counts["returned"]) == (0, counts["preempted"])
    return counts["preempted"]


@pytest.fixture(scope="module")
def small_alone(plain: Server) -> list[Bits]:
    return [bits(plain.generate(p, LONG, **FULL)) for p in SMALL]


def test_full_pool_makes_requests_wait(small: Path, small_alone: list[Bits]) -> None:
    """Without host memory each reserves all it may need."""
    with Server(small / "target", flags=SMALL_POOL, env={AWAY: "0"}) as server:
        assert _served(server) == small_alone
        assert _preempted(server) == 0


@pytest.mark.parametrize("drafter", [None, "dflash"])
def test_preempted_requests_go_on(
    small: Path, small_alone: list[Bits], drafter: str | None, tmp_path: Path
) -> None:
    """Overlap on; the KV of some is in host memory for a while, drafts' KV too."""
    flags, env = [*SMALL_POOL], {}
    if drafter:
        plan = tmp_path / "oracle.json"
        known = [(p, ids) for p, (ids, _) in zip(SMALL, small_alone, strict=True)]
        oracle.write_plan(plan, 0.6, known)
        env = {oracle.VARIABLE: str(plan)}
        flags += draft_flags(drafter, small / drafter)
    with OverlapServer(small / "target", flags=flags, env=env) as server:
        assert _served(server) == small_alone
        assert _preempted(server) > 0


def test_changes_while_one_is_away(small: Path) -> None:
    """A pause, a refused update, an abort of who is away; the other goes on."""
    flags = ("--context-length", "256", "--max-total-tokens", "320", *SMALL_POOL[4:])
    with Server(small / "target", flags=flags) as server:
        client = server.client
        older, younger = (Background(server, ids, 240, **FULL) for ids in SMALL[:2])
        deadline = time.monotonic() + 300
        while not _counts(server)["away"]:
            assert time.monotonic() < deadline
        client.request("/pause_generation", {"mode": "in_place"})
        weights = {"model_path": str(server.model), "flush_cache": False}
        with pytest.raises(RuntimeError, match="HTTP 400.*requests are live"):
            client.request("/update_weights_from_disk", weights)
        for one in (older, younger):
            client.request("/abort_request", {"rid": one.rid})
        client.request("/continue_generation", {})
        for one, ids in zip((older, younger), SMALL, strict=False):
            ended = one.result()
            assert isinstance(ended, Completion)
            assert ended.finish_reason == "abort"
            count = len(ended.ids)
            assert 0 < count < 240
            alone = bits(server.generate(ids, count, **FULL))
            assert bits(ended) == alone
        assert _counts(server)["away"] == 0
        assert client.request("/update_weights_from_disk", weights)["success"]


def test_retracted_request_ends_with_an_error(
    small: Path, small_alone: list[Bits]
) -> None:
    with Server(
        small / "target",
        flags=SMALL_POOL,
        env={DISABLE: "reservation,preemption"},
    ) as server:
        answers = outcomes(server, SMALL, LONG, **FULL)
    errors = [a for a in answers if isinstance(a, str)]
    assert errors
    assert all("HTTP 503" in text and "KV memory" in text for text in errors)
    for answer, expected in zip(answers, small_alone, strict=True):
        assert isinstance(answer, str) or bits(answer) == expected


def test_recomputed_request_has_other_bits(
    small: Path, small_alone: list[Bits]
) -> None:
    """Control of all three: the host retracts, and what it recomputes differs."""
    with Server(
        small / "target",
        flags=SMALL_POOL,
        env={DISABLE: "reservation,retraction,preemption"},
    ) as server:
        answers = together(server, SMALL, LONG, **FULL)
    assert sum(int(a.raw["meta_info"]["num_retractions"]) for a in answers) > 0
    assert [bits(a) for a in answers] != small_alone


def test_pool_smaller_than_the_context_is_refused(small: Path) -> None:
    flags = ("--context-length", "512", "--max-total-tokens", "400")
    with pytest.raises(RuntimeError, match="KV pool of 400 tokens"):
        Server(small / "target", flags=flags).start()


def test_settings_that_move_bits_are_refused(small: Path) -> None:
    """All of them in one message."""
    off = ("--enable-lora", "--enable-mixed-chunk", "--enable-priority-scheduling")
    server = Server(small / "target", flags=(*off, "--lora-paths", "a=b"))
    with pytest.raises(RuntimeError) as refused:
        server.start()
    assert all(f"found {flag}" in str(refused.value) for flag in off)


def test_chunk_below_the_grid_is_refused(small: Path) -> None:
    flags = ("--context-length", "512", "--chunked-prefill-size", "32")
    with pytest.raises(RuntimeError, match="aligned to 64 tokens"):
        Server(small / "target", flags=flags).start()


def test_live_changes_are_refused(plain: Server, alone: list[Bits]) -> None:
    """Pausing in place keeps the bits; retracting and new weights are refused."""
    client = plain.client
    with pytest.raises(RuntimeError, match="HTTP 400.*mode 'retract'"):
        client.request("/pause_generation", {"mode": "retract"})
    # Many tokens: on an idle machine a few would be done before the pause.
    running = Background(plain, PROMPTS[0], 64)
    time.sleep(2)
    client.request("/pause_generation", {"mode": "in_place"})
    weights = {"model_path": str(plain.model), "flush_cache": False}
    with pytest.raises(RuntimeError, match="HTTP 400.*requests are live"):
        client.request("/update_weights_from_disk", weights)
    client.request("/continue_generation", {})
    ids, logprobs = bits(running.result())
    assert (ids[:TOKENS], logprobs[:TOKENS]) == alone[0]
    loose = {"server_args": {"speculative_accept_threshold_single": 0.5}}
    assert client.request("/set_internal_state", loose) == [False]
    # Control: an idle server takes the same weights, and serves the same bits.
    assert client.request("/update_weights_from_disk", weights)["success"]
    assert bits(plain.generate(PROMPTS[0], TOKENS)) == alone[0]
