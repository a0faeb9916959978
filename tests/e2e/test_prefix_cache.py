# SPDX-License-Identifier: Apache-2.0
"""A prefix from the cache gives the bits of a computed one, plain and with drafts.

Every answer is compared with that of a server without a cache. The model forgets
slowly, so that a state which is off by one rounding shows. Kernels are interpreted:
this proves what is kept, matched and cut, not the rounding of a GPU.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from request_cases import OverlapServer, TextServer
from traffic import Background, Bits, bits, prompt, small_models, together

from sglang_exact.client.bits import float32_bits
from sglang_exact.client.blocking import Completion
from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal.drafters import DRAFTERS, draft_flags
from sglang_exact.rehearsal.server import Server

pytestmark = [pytest.mark.host, pytest.mark.e2e]

TOKENS = 5
RATE = 0.7
# Of a rehearsal; on a GPU the cache is on without a flag.
CACHE = ("--max-mamba-cache-size", "48")
FLAGS = ("--context-length", "512", "--chunked-prefill-size", "128", *CACHE)
DISABLE = "SGLANG_EXACT_TEST_DISABLE_HOOKS"
Asked = tuple[Sequence[int], int, dict[str, Any]]

FIRST, SHARED = prompt(1, 70), prompt(2, 70)
LONG = prompt(3, 300)


def asked(ids: Sequence[int], tokens: int = TOKENS, **more: Any) -> Asked:
    return ids, tokens, more


class Case(NamedTuple):
    """Requests that leave something in an empty cache, and one that finds it.

    `answer`: tokens of the answer to the last of `before` that `last` repeats, between
    its prompt and its own rest. `cached` of its tokens come from the cache.
    """

    before: tuple[Asked, ...]
    last: Asked
    cached: int
    answer: int = 0


LATE = asked(LONG[:140], extra={"logprob_start_len": 100})
WARM = {
    "again": Case((asked(FIRST),), asked(FIRST), 64),
    "longer": Case((asked(FIRST),), asked(FIRST + prompt(4, 30)), 64),
    # The answer's own KV and states came from decode: they are computed again.
    "multi-turn": Case((asked(FIRST, 62),), asked(FIRST, 3), 64, answer=60),
    # The second leaves a state where it leaves the first.
    "branch": Case(
        (asked(SHARED + prompt(5, 66)), asked(SHARED + prompt(6, 10))),
        asked(SHARED + prompt(7, 20)),
        64,
    ),
}
PLAIN = {
    **WARM,
    "chunks": Case((asked(LONG, 1),), asked(LONG), 256),
    # Its last token is always computed; the second finds no state before its end.
    "a whole number of chunks": Case((asked(LONG[:128]),) * 2, asked(LONG[:128]), 64),
    "one more than that": Case((asked(LONG[:129]),), asked(LONG[:129]), 128),
    "below a chunk": Case((asked(FIRST[:60]),), asked(FIRST[:60]), 0),
    "penalty": Case(
        (asked(FIRST),), asked(FIRST, frequency_penalty=1.5, presence_penalty=0.5), 64
    ),
    # Its own text, and the one before it had none.
    "grammar": Case((asked(FIRST),), asked(FIRST, regex="([a-f][a-z]){4,20}"), 64),
    "seed": Case(
        (asked(FIRST, temperature=1.0, sampling_seed=5),),
        asked(FIRST, temperature=1.0, sampling_seed=7),
        64,
    ),
    # Logprobs of a prompt are computed, from where they are asked for.
    "prompt logprobs": Case(
        (asked(LONG[:140]),), asked(LONG[:140], extra={"logprob_start_len": 0}), 0
    ),
    "some of them": Case((asked(LONG[:140]), LATE), LATE, 64),
}


def all_bits(answer: Completion) -> tuple[Bits, list[int | None]]:
    """Ids and logprobs of the answer, and logprobs of the prompt."""
    given = answer.raw["meta_info"].get("input_token_logprobs") or []
    return bits(answer), [None if x[0] is None else float32_bits(x[0]) for x in given]


def cached(answer: Completion) -> int:
    return int(answer.raw["meta_info"]["cached_tokens"])


def ask(server: Server, what: Asked) -> Completion:
    ids, tokens, more = what
    found: Completion = server.generate(ids, tokens, **more)
    return found


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models; the target's states keep nearly all that they held."""
    from safetensors.torch import load_file, save_file

    folder = small_models(tmp_path_factory.mktemp("slow"))
    file = folder / "target" / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("A_log"):
            tensors[name].fill_(-4.0)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def cold(slow: Path) -> Iterator[Callable[[Asked], Completion]]:
    """Answers of a server without a cache, each asked for once."""
    known: dict[str, Completion] = {}
    off = (*FLAGS, "--disable-radix-cache")
    with TextServer(slow / "target", flags=off) as server:
        assert server.info()["sglang_exact"]["prefix_cache"] is None

        def answer(what: Asked) -> Completion:
            if (key := repr(what)) not in known:
                known[key] = ask(server, what)
                assert cached(known[key]) == 0
            return known[key]

        yield answer


def with_answer(case: Case, cold: Callable[[Asked], Completion]) -> Asked:
    """The request of a case; an earlier answer in its prompt is the known one."""
    if not case.answer:
        return case.last
    ids, tokens, more = case.last
    earlier = cold(case.before[-1]).ids[: case.answer]
    return [*ids, *earlier, *prompt(9, 10)], tokens, more


def check(
    server: Server, case: Case, cold: Callable[[Asked], Completion]
) -> Completion:
    """Asked cold and warm, a case has the bits of a server without a cache."""
    last = with_answer(case, cold)
    expected = cold(last)
    server.client.flush_cache()
    first = ask(server, last)
    assert cached(first) == 0
    assert all_bits(first) == all_bits(expected)
    server.client.flush_cache()
    for before in case.before:
        ask(server, before)
    again = ask(server, last)
    assert cached(again) == case.cached
    assert all_bits(again) == all_bits(expected)
    return again


@pytest.fixture(scope="module")
def warm(slow: Path) -> Iterator[Server]:
    flags = (*FLAGS, "--enable-metrics")
    with TextServer(slow / "target", flags=flags) as server:
        assert server.info()["sglang_exact"]["prefix_cache"]["interval"] > 512
        yield server


@pytest.mark.parametrize("name", PLAIN)
def test_cached_prefix_has_the_bits_of_a_computed_one(
    warm: Server, cold: Callable[[Asked], Completion], name: str
) -> None:
    check(warm, PLAIN[name], cold)


def test_hits_are_counted(warm: Server) -> None:
    before = counted(warm)
    warm.client.flush_cache()
    ask(warm, asked(FIRST))
    assert counted(warm) == before
    ask(warm, asked(FIRST))
    assert counted(warm) == before + 64


def counted(server: Server) -> float:
    """Tokens that /metrics counts as cached."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    name = "sglang:cached_tokens_total"
    return sum(float(x.split()[-1]) for x in lines if x.startswith(name))


def test_one_new_prefix_in_one_step(
    warm: Server, cold: Callable[[Asked], Completion]
) -> None:
    """Two requests that compute the same prefix beside each other, and copies."""
    prompts = [SHARED + prompt(8, 10), FIRST, SHARED + prompt(8, 12), FIRST]
    expected = [bits(cold(asked(ids))) for ids in prompts]
    warm.client.flush_cache()
    for _ in range(2):
        assert [bits(x) for x in together(warm, prompts, TOKENS)] == expected
    copies = together(warm, [FIRST], TOKENS, n=2)
    assert [bits(x) for x in copies] == [expected[1]] * 2
    assert [cached(x) for x in copies] == [64, 64]


def test_aborted_between_chunks(
    warm: Server, cold: Callable[[Asked], Completion]
) -> None:
    expected = bits(cold(asked(LONG)))
    warm.client.flush_cache()
    victim = Background(warm, LONG, TOKENS)
    time.sleep(3)
    victim.abort()
    found = ask(warm, asked(LONG))
    assert bits(found) == expected
    assert cached(found) in (0, 128, 256)
    assert bits(ask(warm, asked(LONG))) == expected


def test_new_weights_empty_the_cache(warm: Server) -> None:
    """Whatever the update asks for."""
    ask(warm, asked(FIRST))
    assert cached(ask(warm, asked(FIRST))) == 64
    weights = {"model_path": str(warm.model), "flush_cache": False}
    assert warm.client.request("/update_weights_from_disk", weights)["success"]
    assert cached(ask(warm, asked(FIRST))) == 0


SMALL = (
    *("--context-length", "256", "--chunked-prefill-size", "128"),
    *("--max-running-requests", "1", "--max-mamba-cache-size", "5"),
    *("--max-total-tokens", "420"),
)
"""Two states beside those of a running request; tokens of two prompts."""


def test_evicted_prefix(slow: Path, cold: Callable[[Asked], Completion]) -> None:
    """States and tokens make room: a hit shrinks or is gone, and the bits stay."""
    others = [asked(prompt(seed, 130)) for seed in (31, 32)]
    wanted = asked(LONG[:200])
    order = [wanted, wanted, *others, wanted]
    with Server(slow / "target", flags=SMALL) as server:
        found = [ask(server, what) for what in order]
    assert [bits(x) for x in found] == [bits(cold(what)) for what in order]
    hits = [cached(x) for x in found]
    assert hits[1] == 192
    # What two other prompts drove out, in part or wholly.
    assert hits[4] < 192
    assert all(hit % 64 == 0 for hit in hits)


class GpuServer(Server):
    """Decides by memory whether it keeps prefixes, as servers on a GPU do."""

    def command(self) -> list[str]:
        return [x for x in super().command() if x != "--disable-radix-cache"]


def test_no_room_for_the_cache(slow: Path, cold: Callable[[Asked], Completion]) -> None:
    """It is off, says so and serves: nobody waits for a state that is not there."""
    flags = ("--context-length", "512", "--mamba-full-memory-ratio", "1e-9")
    with GpuServer(slow / "target", flags=flags) as server:
        found = [ask(server, asked(FIRST)) for _ in range(2)]
        assert server.info()["sglang_exact"]["prefix_cache"] is None
        told = server.log_path.read_text()
    assert [bits(x) for x in found] == [bits(cold(asked(FIRST)))] * 2
    assert [cached(x) for x in found] == [0, 0]
    assert "no prefix cache: found room beside it for" in told


LAZY = ("--mamba-radix-cache-strategy", "extra_buffer_lazy")


@pytest.mark.parametrize(
    ("drafter", "overlap", "flags", "names"),
    [
        ("dflash", True, (), ("multi-turn", "branch")),
        *(
            pytest.param(*given, (*WARM, "chunks"), marks=pytest.mark.slow)
            for given in (
                *((name, False, ()) for name in DRAFTERS),
                ("", True, ()),
                ("dflash", True, ()),
                ("dflash", True, LAZY),
            )
        ),
    ],
)
def test_every_drafter(
    slow: Path,
    cold: Callable[[Asked], Completion],
    tmp_path: Path,
    drafter: str,
    overlap: bool,
    flags: tuple[str, ...],
    names: tuple[str, ...],
) -> None:
    """Drafts partly right: blocks of every length behind a cached prefix."""
    plan, more = tmp_path / "oracle.json", list(FLAGS) + list(flags)
    cases = [PLAIN[name] for name in names]
    lasts = [with_answer(case, cold) for case in cases]
    known = [(last[0], cold(last).ids) for last in lasts]
    oracle.write_plan(plan, RATE, known)
    if drafter:
        more += draft_flags(drafter, slow / drafter)
    env = {oracle.VARIABLE: str(plan)} if drafter else {}
    kind = OverlapServer if overlap else Server
    with kind(slow / "target", flags=more, env=env) as server:
        found = [check(server, case, cold) for case in cases]
        # Several requests at once, behind a prefix and without.
        prompts = [FIRST, SHARED + prompt(8, 10)]
        answers = [bits(x) for x in together(server, prompts, TOKENS)]
        assert answers == [bits(cold(asked(ids))) for ids in prompts]
    if drafter:
        verified = sum(x.spec_verify_ct for x in found)
        kept = sum(x.completion_tokens for x in found) - len(found) - verified
        assert verified > 0 and kept > 0


def ask_twice(
    slow: Path, off: str, case: Case, last: Asked, *flags: str
) -> tuple[Completion, Completion]:
    """A case on a server with hooks off: asked with an empty cache, and with `before`.

    Raises RuntimeError when the server ended.
    """
    with Server(slow / "target", flags=(*FLAGS, *flags), env={DISABLE: off}) as server:
        first = ask(server, last)
        server.client.flush_cache()
        for before in case.before:
            ask(server, before)
        return first, ask(server, last)


def test_rounded_state_differs(slow: Path, cold: Callable[[Asked], Completion]) -> None:
    """Control: the host's own states inside a step, in bf16."""
    case = WARM["again"]
    first, again = ask_twice(slow, "prefix_snapshot", case, case.last)
    assert bits(first) == bits(cold(case.last))
    assert cached(again) == case.cached
    assert bits(again) != bits(first)


OFTEN = ("--mamba-track-interval", "64")


@pytest.mark.parametrize("clamp", [True, False])
def test_decoded_prefix_is_left_out(
    slow: Path, cold: Callable[[Asked], Completion], clamp: bool
) -> None:
    """Decode's states, which come often here, stay out; control: without the clamp."""
    case, off = WARM["multi-turn"], "prefix_interval"
    last = with_answer(case, cold)
    off += "" if clamp else ",prefix_insert"
    first, again = ask_twice(slow, off, case, last, *OFTEN)
    assert bits(first) == bits(cold(last))
    assert cached(again) == (case.cached if clamp else 128)
    assert (bits(again) == bits(first)) is clamp


@pytest.mark.slow
def test_states_of_decode_are_refused(slow: Path) -> None:
    with pytest.raises(RuntimeError, match="--mamba-track-interval 64 with a context"):
        Server(slow / "target", flags=(*FLAGS, *OFTEN)).start()


@pytest.mark.parametrize("guard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_hit_off_the_grid_ends_the_server(
    slow: Path, cold: Callable[[Asked], Completion], guard: bool
) -> None:
    """Prompts cut anywhere leave states anywhere; control: without the guard."""
    prompts = [prompt(21, 20), prompt(22, 240)]
    off = "prefill_grid,prefix_insert" + ("" if guard else ",prefix_match")
    with Server(slow / "target", flags=FLAGS, env={DISABLE: off}) as server:
        # The first leaves the second a cut at 108, and its next chunk ends at 236.
        together(server, prompts, 1)
        if guard:
            with pytest.raises((RuntimeError, OSError)):
                ask(server, asked(prompts[1]))
            assert "found a hit of 236 tokens" in server.log_path.read_text()
            return
        found = ask(server, asked(prompts[1]))
    assert cached(found) == 236
    assert bits(found) != bits(cold(asked(prompts[1])))
