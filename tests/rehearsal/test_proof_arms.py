# SPDX-License-Identifier: Apache-2.0
"""The arms of scripts/gpu_proof: each has an answer to be compared with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

from sglang_exact import hooks, scope_families  # noqa: E402
from sglang_exact.client.blocking import Completion  # noqa: E402
from tools.evidence import rows  # noqa: E402
from tools.proof import arms as proof_arms  # noqa: E402
from tools.proof import bits as script  # noqa: E402
from tools.proof import matrix, options, prefix_arms  # noqa: E402
from tools.proof.arms import Arm, Phase, Sizes  # noqa: E402


def proof(folder: Path) -> Any:
    args = argparse.Namespace(
        state=str(folder),
        out=str(folder),
        gpus="0",
        side_by_side=1,
        family="",
        name="proof",
        budget=1e9,
        prefixes=[128],
    )
    return script.Proof(args, Sizes(4))


def test_what_an_arm_asks_was_asked_of_plain_decoding(tmp_path: Path) -> None:
    recorded = {
        (arm.reference, phase.text)
        for arm in proof_arms.ARMS
        if arm.records
        for phase in arm.phases
    }
    for arm in proof_arms.ARMS:
        assert {(arm.reference, phase.text) for phase in arm.phases} <= recorded
        off = [name for name in arm.disable.split(",") if name]
        assert all(any(h.name.startswith(x) for h in hooks.ALL) for x in off)
    made = proof(tmp_path)
    assert set(made.texts) == {text for _, text in recorded} - {"prefixes", "answers"}
    kept = {
        made.kept(arm, phase.text)
        for arm in proof_arms.ARMS
        if arm.records
        for phase in arm.phases
    }
    assert len(kept) == len(recorded)
    with pytest.raises(RuntimeError, match="run arm plain-repeated"):
        made.reference(proof_arms.BY_NAME["ngram-tries"], "few")


def test_repetitive_prompts_repeat() -> None:
    prompts = proof_arms.make_repeated_prompts(24, proof_arms.VOCAB)
    assert prompts == proof_arms.make_repeated_prompts(24, proof_arms.VOCAB)
    assert len({tuple(ids) for ids in prompts}) == 24
    assert {tuple(ids[-3:]) for ids in prompts[::2]} == {tuple(prompts[0][-3:])}
    for ids in prompts:
        pairs = list(zip(ids, ids[1:], strict=False))
        assert len(set(pairs)) < len(pairs) / 1.5 or len(ids) < 100
    bias = proof_arms.few_tokens(512)["logit_bias"]
    assert len(bias) == 16 and all(0 <= int(x) < 512 for x in bias)


@pytest.mark.parametrize(
    ("verifies", "first", "expected"),
    [(2, False, True), (9, False, False), (9, True, True), (0, True, False)],
)
def test_own_drafts_that_are_never_kept_prove_nothing(
    tmp_path: Path, verifies: int, first: bool, expected: bool
) -> None:
    """Ten tokens of one prompt in nine verifies: none of the drafts was kept.

    In its first turn a trie has nothing to draft from.
    """
    answer = Completion(tuple(range(10)), (), "length", verifies, 10, None, {})
    server: Any = SimpleNamespace(generate_many=lambda *a, **k: [answer])
    row, _ = script.run_phase(
        server, Arm("x", "X", "ngram", oracle=False),
        Phase(prompts=1, logprobs=False, first=first),
        proof_arms.Text([[1]], {}), [answer], tmp_path / "none.json", 10,
    )  # fmt: skip
    assert row["as_expected"] is expected and row["rate"] is None


class FakeServer:
    """Stands in for `Server`: answers by the prompt, and by what its arm is."""

    started_in_s = 1.0
    wrong: ClassVar[str] = ""
    cache: ClassVar[str] = "--mamba-radix-cache-strategy"

    def __init__(self, model: Path, **options: Any) -> None:
        self.options, self.env = options, options["env"]
        assert (model / "config.json").exists()

    def start(self) -> None:
        assert self.env["SGLANG_EXACT_TEST_DUMMY_WEIGHTS"] == "1"
        assert self.env["CUDA_VISIBLE_DEVICES"] == "0"

    def stop(self) -> None:
        pass

    def info(self) -> dict[str, Any]:
        return {"sglang_exact": {"numerics": "bitwise"}}

    def generate_many(
        self, prompts: Sequence[Sequence[int]], new: int, **asked: Any
    ) -> list[Completion]:
        flags, log = self.options["flags"], str(self.options["log"])
        drafted = "--speculative-algorithm" in flags
        off = self.options["mode"] == "stock" or matrix.DISABLE_VARIABLE in self.env
        if self.wrong and f"-{self.wrong}." in log:
            off = True
        more = off + (self.cache in flags)
        bits = tuple(7 + (off and i == 3) * more for i in range(new))
        return [
            Completion(
                tuple(prompt[0] + i for i in range(new)),
                bits if asked["return_logprob"] else (),
                "length",
                2 if drafted else 0,
                new,
                None,
                {"meta_info": {"cached_tokens": 64 * (self.cache in flags)}},
            )
            for prompt in prompts
        ]


def proved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, names: str, *more: str
) -> tuple[int, dict[str, Any]]:
    """Status and files of scripts/gpu_proof on fake servers."""
    monkeypatch.setattr(matrix, "Server", FakeServer)
    where = ["--layers", "4", "--state", str(folder / "s"), "--out", str(folder / "o")]
    args = options.bits([*where, "--new", "8", "--arms", names, *more])
    status = script.main(args)
    files = sorted((folder / "o").glob("proof-*.json"))
    return status, {
        path.stem.removeprefix("proof-"): json.loads(path.read_text()) for path in files
    }


def test_a_proof_from_start_to_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain answers first, a file for each arm, rows that the evidence reads."""
    names = "plain,dflash8,mtp,gdn-hook-off,stock"
    status, files = proved(tmp_path, monkeypatch, names)
    assert status == 0 and set(files) == set(names.split(","))
    for name, found in files.items():
        arm = proof_arms.BY_NAME[name]
        assert len(found["rows"]) == len(arm.phases)
        for phase, row in zip(arm.phases, map(rows.read, found["rows"]), strict=True):
            assert (row["title"], row["as_expected"]) == (arm.title, True)
            if row["tally"] is None:
                assert name == "plain"
                continue
            tally = row["tally"]
            assert tally["ids_equal"] == tally["compared"] == phase.prompts
            right = phase.prompts if arm.equal else 0
            assert tally["logprobs_equal"] == (right if phase.logprobs else None)
            if not arm.equal:
                assert tally["first_difference"]["position"] == 3
                assert rows.different(row) == phase.prompts
    plan = json.loads((tmp_path / "s" / "oracle-proof-dflash8.json").read_text())
    assert len(plan["continuations"]) == 24
    # The plain answers are kept: a later call needs no plain server.
    assert proved(tmp_path, monkeypatch, "mtp")[0] == 0


def test_prompts_behind_cached_prefixes() -> None:
    """Each length is left where no state is, and its prompts end behind a kept one."""
    prompts = prefix_arms.make_prefixes([128], 512)
    assert prompts == prefix_arms.make_prefixes([128], 512)
    base, longer, *parted = prompts[5:]
    assert len(base) == 198 and longer[:198] == base and len(prompts) == 10
    assert all(ids[:99] == base[:99] and ids[99] != base[99] for ids in parted)
    assert len({ids[99] for ids in parted}) == 3
    said = [[i] * 72 for i in range(10)]
    first, second = prefix_arms.make_answers([128], 512, said)[2:]
    assert first == base and second[:270] == base + [5] * 72


def test_a_cache_that_was_not_hit_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "plain-cold,plain-cache,dflash8-cache,cache-rounded,stock-cold,stock-cache"
    sizes = ("--prefixes", "128")
    status, files = proved(tmp_path / "a", monkeypatch, names, *sizes)
    assert status == 0 and set(files) == set(names.split(","))
    for row in files["plain-cache"]["rows"]:
        assert row["cached_tokens"] == 64 * row["prompts"]
        assert row["tokens"] == prefix_arms.NEW * row["prompts"]
    assert "cached_tokens" not in files["plain-cold"]["rows"][0]
    monkeypatch.setattr(FakeServer, "cache", "--none")
    status, files = proved(
        tmp_path / "b", monkeypatch, "plain-cold,plain-cache", *sizes
    )
    assert status == 1
    assert not any(row["as_expected"] for row in files["plain-cache"]["rows"])


@pytest.mark.parametrize("family", list(proof_arms.FAMILIES))
def test_a_proof_of_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Its own models and vocabulary; its files are not those of the 27B's evidence."""
    more = ("--family", family, "--name", "proof")
    status, files = proved(tmp_path, monkeypatch, "plain,ngram", *more)
    assert status == 0 and set(files) == {"plain", "ngram"}
    assert {found["family"] for found in files.values()} == {family}
    made = json.loads((tmp_path / "s/models/target-4/config.json").read_text())
    assert made["model_type"] == family
    assert made["vocab_size"] == proof_arms.FAMILIES[family]
    args = options.bits(["--state", "s", "--out", "o", "--family", family])
    assert (args.name, args.arms) == (
        f"family-{family}",
        ",".join(proof_arms.FAMILY_ARMS),
    )
    served = scope_families.find(made["architectures"])
    assert served is not None
    kinds = {proof_arms.BY_NAME[name].drafter for name in proof_arms.FAMILY_ARMS}
    assert {kind.upper() for kind in kinds if kind} == set(served.drafters)


def test_a_proof_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong bit, a control that shows none, no reference, no time: status 1."""
    assert proved(tmp_path / "a", monkeypatch, "mtp")[0] == 1
    assert proved(tmp_path / "b", monkeypatch, "plain,mtp", "--budget", "-1")[0] == 1
    monkeypatch.setattr(FakeServer, "wrong", "mtp")
    status, files = proved(tmp_path / "c", monkeypatch, "plain,mtp,ngram")
    assert status == 1
    assert [files[n]["rows"][0]["as_expected"] for n in ("mtp", "ngram")] == [0, 1]
    monkeypatch.setattr(FakeServer, "wrong", "")
    monkeypatch.setattr(
        FakeServer, "__init__", lambda self, model, **options: _equal(self, options)
    )
    assert proved(tmp_path / "d", monkeypatch, "plain,stock")[0] == 1


def _equal(server: Any, options: dict[str, Any]) -> None:
    server.options, server.env = options | {"mode": "exact"}, options["env"]


def test_chats_end_at_a_token_of_their_plain_answer() -> None:
    """They ask for the whole context; what they get is held against that much."""
    asked = []

    def generate(ids: list[int], tokens: int, **ends: Any) -> Completion:
        asked.append((tokens, ends))
        return answer(*ids)

    def answer(*ids: int) -> Completion:
        return Completion(ids, tuple(ids), "stop", 0, len(ids), None, {})

    server: Any = SimpleNamespace(client=SimpleNamespace(generate=generate))
    phase = proof_arms.Phase(concurrency=1, prompts=1, whole=1000)
    text = proof_arms.Text([[4, 5, 6]], {})
    found, wanted = script.ask_whole(server, phase, text, [answer(4, 5, 6, 5, 4)])
    assert asked == [(1000, {"ignore_eos": False, "stop_token_ids": [6]})]
    assert (found[0].ids, wanted[0].ids) == ((4, 5, 6), (4, 5, 6))
    assert wanted[0].logprobs == (4, 5, 6)
