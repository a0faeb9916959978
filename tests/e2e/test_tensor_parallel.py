# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel 2: two ranks of the real engine over gloo, on the CPU.

The target's head holds every row twice, once on each rank, so that the largest logit
of every step is an exact tie across the edge of the two vocabulary shards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_exact.client.blocking import Completion
from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal import models
from sglang_exact.rehearsal.server import Server, draft_flags
from tools.proof.matrix import DISABLE_VARIABLE, is_equal, judge
from tools.proof.passes import make_prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))

from launching import LAUNCHER, flags, other_plugin, run  # noqa: E402

pytestmark = [pytest.mark.host, pytest.mark.e2e]

VOCAB = 512
TOKENS = 6
RATE = 0.7
TOP = 4
START_S = 600.0
"""Two ranks and their launcher start at once on what cores there are."""
PENALTY = {"frequency_penalty": 1.5}
PROMPTS = make_prompts((9, 14, 11, 12), VOCAB)
LONGER = make_prompts((70,), VOCAB)[0]
"""One chunk of 64 and a tail: its prefix is kept on both ranks."""


class Answers(NamedTuple):
    """One answer per prompt: two plain ones, one with top-k logprobs, one penalised.

    `top` are the (id, logprob) pairs of each token of the third; `again` are the two
    answers to LONGER, of which the second began in the prefix cache.
    """

    all: list[Completion]
    top: list[list[tuple[int, float]]]
    again: tuple[Completion, ...] = ()


def ask(server: Server, logprobs: bool = True) -> Answers:
    """The four requests in one batch."""
    more: list[dict[str, Any]] = [{}, {}, {}, PENALTY]
    if logprobs:
        more[2] = {"extra": {"top_logprobs_num": TOP}}

    def one(index: int) -> Completion:
        # A penalised request alone would keep its batch from the fast path.
        wanted = logprobs and index != 3
        found: Completion = server.generate(
            PROMPTS[index], TOKENS, return_logprob=wanted, **more[index]
        )
        return found

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(one, range(len(PROMPTS))))
    listed = found[2].raw["meta_info"].get("output_top_logprobs") or []
    top = [[(int(i), float(p)) for p, i, *_ in step] for step in listed]
    return Answers(found, top)


def ask_again(server: Server) -> tuple[Completion, ...]:
    """LONGER computed and from the cache."""
    found = tuple(server.generate(LONGER, TOKENS) for _ in range(2))
    assert [x.raw["meta_info"]["cached_tokens"] for x in found] == [0, 64]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with the doubled head, and a draft."""
    from safetensors.torch import load_file, save_file

    made: Path = tmp_path_factory.mktemp("two-ranks")
    file = models.make_target(made / "target", vocab_size=VOCAB) / "model.safetensors"
    tensors = load_file(file)
    head = tensors["lm_head.weight"]
    head[VOCAB // 2 :] = head[: VOCAB // 2]
    save_file(tensors, file, metadata={"format": "pt"})
    models.make_draft(made / "dflash", "dflash", vocab_size=VOCAB)
    return made


def serve(folder: Path, name: str, drafter: str | None = None, **env: str) -> Server:
    """A server with two ranks; its oracle file is `oracle-NAME.json`."""
    # What other processes take meanwhile counts as this server's weights.
    more = ["--tp-size", "2", "--mem-fraction-static", "0.8"]
    more += ["--max-mamba-cache-size", "48"]
    if drafter:
        env[oracle.VARIABLE] = str(folder / f"oracle-{name}.json")
        oracle.write_plan(env[oracle.VARIABLE], 0.0, [])
        draft = folder / drafter if drafter != "ngram" else None
        more += draft_flags(drafter, draft)
    return Server(
        folder / "target",
        flags=more,
        env=env,
        log=folder / f"{name}.log",
        start_timeout_s=START_S,
        request_timeout_s=600.0,
    )


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Answers]:
    """Plain decoding under the overlay at two ranks."""
    with serve(folder, "plain") as server:
        found = ask(server)._replace(again=ask_again(server))
        attested = server.info()["sglang_exact"]
    assert (attested["ranks"], attested["tp_size"]) == (2, 2)
    assert all(len(c.ids) == TOKENS for c in found.all)
    assert all(len(set(c.logprobs)) > 2 for c in found.all[:3])
    yield found


def plan(folder: Path, name: str, known: Answers) -> Callable[[float], None]:
    """Sets the rate of a server's oracle, which knows the plain answers."""
    pairs = [(p, c.ids) for p, c in zip(PROMPTS, known.all, strict=True)]
    file = folder / f"oracle-{name}.json"
    return lambda rate: oracle.write_plan(file, rate, pairs)


def same_ids(expected: Answers, found: Answers) -> bool:
    return is_equal(judge(expected.all, found.all), logprobs=False)


def same_bits(expected: Answers, found: Answers) -> bool:
    """Ids, logprobs and top-k logprobs; the penalised answer has no logprobs."""
    scored = is_equal(judge(expected.all[:3], found.all[:3]), logprobs=True)
    return scored and expected.top == found.top and same_ids(expected, found)


def kept(found: Answers) -> int:
    """Drafts that were accepted: tokens beyond the first and one a verify."""
    return sum(c.completion_tokens - 1 - c.spec_verify_ct for c in found.all)


def test_ties_across_the_shards_go_to_the_lowest_id(plain: Answers) -> None:
    """Greedy ids lie in the first shard; top-k lists its id before its double."""
    assert all(i < VOCAB // 2 for c in plain.all for i in c.ids)
    assert len(plain.top) == TOKENS
    for step in plain.top:
        ids, values = zip(*step, strict=True)
        assert len(ids) == TOP
        for low, high in zip(ids[::2], ids[1::2], strict=True):
            assert high == low + VOCAB // 2
        assert list(values) == sorted(values, reverse=True)
        assert values[0] == values[1]


def test_speculation_equals_plain(folder: Path, plain: Answers) -> None:
    """Oracle drafts, the same without logprobs, and all of them wrong."""
    with serve(folder, "dflash", "dflash") as server:
        rate = plan(folder, "dflash", plain)
        rate(RATE)
        found, bare = ask(server), ask(server, logprobs=False)
        again = ask_again(server)
        rate(0.0)
        rejected = ask(server)
    assert same_bits(plain, found)
    computed = [(c.ids, c.logprobs) for c in (*plain.again, *again)]
    assert computed == [computed[0]] * 4
    assert kept(found) > 0
    assert same_ids(plain, bare)
    assert kept(bare) > 0
    assert same_bits(plain, rejected)
    assert kept(rejected) <= 0


@pytest.mark.slow
def test_without_a_draft_model(folder: Path, plain: Answers) -> None:
    """n-grams need no model on either rank: nothing of a draft is in the answer."""
    with serve(folder, "ngram", "ngram") as server:
        plan(folder, "ngram", plain)(RATE)
        found = ask(server)
    assert same_bits(plain, found)
    assert kept(found) > 0


@pytest.mark.slow
def test_the_comparison_can_fail(folder: Path, plain: Answers) -> None:
    """The host's own GDN verify on both ranks."""
    off = {DISABLE_VARIABLE: "gdn_verify"}
    with serve(folder, "control", "dflash", **off) as server:
        plan(folder, "control", plain)(RATE)
        found = ask(server)
    assert not same_bits(plain, found)


@pytest.mark.slow
def test_one_rank_that_differs_stops_the_start(folder: Path, tmp_path: Path) -> None:
    """Rank 1 runs other source than rank 0; both would serve."""
    other_plugin(
        tmp_path,
        "differs",
        """
        def register():
            from sglang_exact import attestation

            record = attestation.record

            def other(decided, facts, self_test):
                found = record(decided, facts, self_test)
                return found | {"digest": "0" * 64} if facts["rank"] == 1 else found

            attestation.record = other
        """,
    )
    outcome = run(
        LAUNCHER,
        flags(folder / "target", "--tp-size", "2"),
        path=tmp_path,
        timeout_s=START_S,
    )
    assert outcome.status == 3, outcome.output
    assert "rank 1 attests something else than rank 0: digest '0000" in outcome.output
    assert "The server is fired up" not in outcome.output
