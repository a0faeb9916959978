# SPDX-License-Identifier: Apache-2.0
"""The decode table: servers in turn, ratios inside a round, exactness in every row."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from bench_runs import against, record
from bench_server import BenchServer
from fake_server import Lies

from sglang_exact.bench import prompts
from sglang_exact.bench.decode_table import measure as decode_table
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.servers import Served
from sglang_exact.client.answer import ServerInfo
from sglang_exact.client.http import Client

SMALL = (
    *("--prompt-lengths", "16,300", "--rounds", "3", "--max-new-tokens", "20"),
    *("--output-file", "run.json"),
)


def table(path: Path, servers: dict[str, BenchServer], *args: str, **more: Any) -> Any:
    code, out, err = against(servers, "decode-table", *SMALL, *args, cwd=path, **more)
    kept = path / "run.json"
    return code, out, err, record(kept) if kept.exists() else None


def three() -> dict[str, BenchServer]:
    attested = {"version": "0.1.0"}
    return {
        "stock": BenchServer(lies=Lies({"wrong-token"})),
        "spec": BenchServer(exact=attested),
        "plain": BenchServer(speculative=False, exact=attested),
    }


def test_rows_ratios_and_exactness(tmp_path: Path) -> None:
    servers = three()
    code, out, err, run = table(tmp_path, servers, "--markdown", "t.md")
    assert code == 0, err
    found = [(r["prompt_tokens"], r["server"]) for r in run["rows"]]
    assert found == [(n, s) for n in (16, 300) for s in ("plain", "stock", "spec")]
    plain, stock, spec = run["rows"][:3]
    assert plain["speed_ratio"]["median"] == plain["ttft_ratio"]["median"] == 1.0
    assert spec["decode_tok_s"]["n"] == spec["speed_ratio"]["n"] == 3
    assert spec["decode_tok_s"]["low"] <= spec["decode_tok_s"]["median"]
    assert (spec["exact"], stock["exact"]) == (True, False)
    assert spec["exactness"]["ids_equal"] == 3 and stock["exactness"]["ids_equal"] == 0
    assert plain["exactness"]["compared"] == 2, "its first answer is the reference"
    assert run["exactness"]["compared"] == 12 and run["exactness"]["ids_equal"] == 6
    assert spec["acceptance"]["micro"] > 1.0 and plain["acceptance"] is None
    assert "spec (exact)" in out and "ids equal 3/3" in out and "ids equal 0/3" in out
    assert "| spec (exact) |" in (tmp_path / "t.md").read_text()
    # Every server got the same ids; a warm-up and three rounds at either length.
    sent = {
        name: [c["input_ids"] for c in server.calls if c.get("stream")]
        for name, server in servers.items()
    }
    assert sent["plain"] == sent["spec"] == sent["stock"]
    assert [len(ids) for ids in sent["spec"]] == [16] * 4 + [300] * 4


def test_every_round_asks_every_server(tmp_path: Path) -> None:
    order: list[str] = []

    def noting(name: str) -> Any:
        def when(body: dict[str, Any], state: Any) -> bool:
            if body.get("stream"):
                order.append(name)
            return False

        return when

    servers = three()
    for name, server in servers.items():
        server.lies.when = noting(name)
    code, _, err, _ = table(tmp_path, servers, "--prompt-lengths", "16")
    assert code == 0, err
    assert order == ["plain", "stock", "spec"] * 4


def test_ratios_are_taken_inside_a_round() -> None:
    # A machine that slows down by half changes no ratio.
    found = decode_table._paired({0: 30.0, 1: 15.0, 3: 9.0}, {0: 20.0, 1: 10.0, 2: 1.0})
    assert found is not None
    assert (found["n"], found["low"], found["high"]) == (2, 1.5, 1.5)
    assert decode_table._paired({0: 1.0}, {}) is None


def test_the_base_can_be_named(tmp_path: Path) -> None:
    code, out, err, run = table(tmp_path, three(), "--base", "stock")
    assert code == 0, err
    stock = next(r for r in run["rows"] if r["server"] == "stock")
    assert stock["speed_ratio"]["high"] == 1.0 and "ratio: over stock" in out
    code, _, err, _ = table(tmp_path, three(), "--base", "nope")
    assert code == 2 and "found --base 'nope'" in err


def test_without_a_plain_server(tmp_path: Path) -> None:
    code, out, _, run = table(tmp_path, {"spec": BenchServer()})
    assert code == 0 and "not compared" in out
    assert run["settings"]["base"] == "spec" and run["settings"]["plain"] is None


def test_logprobs_are_compared_when_asked(tmp_path: Path) -> None:
    servers = {
        "plain": BenchServer(speculative=False),
        "spec": BenchServer(lies=Lies({"logprob-bit"})),
    }
    code, out, _, run = table(tmp_path, servers, "--logprobs")
    assert code == 0 and "logprobs equal 0/3" in out
    assert run["exactness"]["ids_equal"] == 6 and run["exactness"]["compared"] == 6


def test_cached_prompts_are_flushed(tmp_path: Path) -> None:
    for flag, cached in (("--flush", 0), ("--no-flush", 15)):
        code, _, err, run = table(
            tmp_path, {"spec": BenchServer()}, flag, "--prompt-lengths", "16"
        )
        assert code == 0, err
        assert run["rows"][0]["cached_tokens"] == cached


def test_own_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("abc")
    (tmp_path / "p.json").write_text(json.dumps({"input_ids": [7, 8, 9]}))
    expected = {"p.txt": list(b"abcabca"), "p.json": [7, 8, 9, 7, 8, 9, 7]}
    for name, ids in expected.items():
        server = BenchServer()
        code, _, err, run = table(
            tmp_path,
            {"spec": server},
            *("--prompt-file", name, "--prompt-lengths", "7"),
        )
        assert code == 0, err
        assert server.calls[-1]["input_ids"] == ids
        assert run["rows"][0]["prompt_sha256"] == prompts.digest(tuple(ids))


@pytest.mark.parametrize(
    ("server", "args", "found"),
    [
        (BenchServer(), ("--prompt-lengths", ""), "found --prompt-lengths ''"),
        (
            BenchServer(info={"context_length": 310}),
            (),
            "found a context of 310 tokens, expected 320",
        ),
        (BenchServer(), ("--prompt-file", "none"), "cannot be read as a prompt"),
        (BenchServer(lies=Lies({"no-counters"})), (), "no spec_verify_ct"),
        (BenchServer(lies=Lies({"error-500"})), ("--prompt-file", "i.json"), "boom"),
        (BenchServer(), ("--plain", "spec"), "found speculative_algorithm DFLASH"),
        (
            BenchServer(info={"skip_tokenizer_init": True}),
            ("--prompt-file", "p.txt"),
            "found --skip-tokenizer-init and a prompt as text",
        ),
    ],
)
def test_what_cannot_run(
    tmp_path: Path, server: BenchServer, args: tuple[str, ...], found: str
) -> None:
    (tmp_path / "p.txt").write_text("abc")
    (tmp_path / "i.json").write_text("[1, 2, 3]")
    code, _, err, _ = table(tmp_path, {"spec": server}, *args)
    assert code == 2 and found in err, err


def test_a_failing_round_is_reported_and_the_rest_kept(tmp_path: Path) -> None:
    lies = Lies({"truncated"}, when=lambda body, state: len(body["input_ids"]) > 100)
    servers = {"plain": BenchServer(speculative=False), "spec": BenchServer(lies=lies)}
    code, _, err, run = table(tmp_path, servers)
    assert code == 2 and not run["complete"]
    assert "300 prompt tokens, spec: the stream ended without [DONE]" in err
    found = [(r["prompt_tokens"], r["server"]) for r in run["rows"]]
    assert found == [(16, "plain"), (16, "spec"), (300, "plain")]


def test_an_interrupted_run_keeps_its_rounds(tmp_path: Path) -> None:
    server = BenchServer(step_s=0.01)
    code, _, err, run = table(
        tmp_path,
        {"spec": server},
        *("--rounds", "200"),
        stop_when=lambda: server.requests >= 6,
    )
    assert code == 130 and "what was measured is in run.json" in err
    (row,) = run["rows"]
    assert 2 <= row["rounds"] < 200 and not run["complete"]


def served(vocab_size: int | None, **fields: Any) -> Served:
    info = ServerInfo("s", "http://h:1", fields, {}, vocab_size, "id")
    return Served("s", Client("http://h:1"), info)


def test_prompts_of_a_server_without_a_tokenizer() -> None:
    by_ids = served(512, skip_tokenizer_init=True)
    name, ids = asyncio.run(prompts.text_of_length(by_ids, 100, 42))
    assert len(ids) == 100 and "seed 42" in name
    assert ids == prompts.of_length(by_ids, 100, 42)
    assert ids != prompts.of_length(by_ids, 100, 43)
    with pytest.raises(CannotRun, match="found no vocabulary size"):
        prompts.of_length(served(None), 10, 1)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.json", "[]", "found neither text nor token ids"),
        ("a.json", '{"input_ids": ["x"]}', "found neither text nor token ids"),
        ("a.json", "{oops", "cannot be read as a prompt"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, name: str, text: str, found: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=found):
        prompts.read(tmp_path / name)
