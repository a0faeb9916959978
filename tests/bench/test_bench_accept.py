# SPDX-License-Identifier: Apache-2.0
"""The accept command against servers that are honest, and servers that are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_runs import against, record, write_ids
from bench_server import CHAT, BenchServer
from fake_server import Lies

from sglang_exact.bench.accept import published
from sglang_exact.bench.accept import tables as accept_table
from sglang_exact.bench.accept.answers import AnswerFile
from sglang_exact.bench.run import BenchRun, RunError
from sglang_exact.client.answer import Sample

SMALL = ("--num-prompts", "3", "--max-new-tokens", "16", "--output-file", "run.json")


def plain(**more: Any) -> BenchServer:
    return BenchServer(speculative=False, **more)


def own(path: Path, *, count: int = 4) -> tuple[str, ...]:
    """Options for a data set of token ids."""
    data = write_ids(path / "own.jsonl", [[i + 1, 2, 3] for i in range(count)])
    return ("--dataset", "own", "--dataset-path", f"own={data}")


def accept(path: Path, servers: dict[str, BenchServer], *args: str, **more: Any) -> Any:
    code, out, err = against(servers, "accept", *SMALL, *args, cwd=path, **more)
    kept = path / "run.json"
    return code, out, err, record(kept) if kept.exists() else None


def test_speed_acceptance_and_exactness(tmp_path: Path) -> None:
    servers = {"plain": plain(step_s=0.004), "spec": BenchServer(step_s=0.004)}
    code, out, err, run = accept(
        tmp_path, servers, *own(tmp_path), "--concurrency", "1,2", "--ignore-eos"
    )
    assert code == 0, err
    assert run["complete"] and run["verb"] == "accept"
    assert [(r["concurrency"], r["server"]) for r in run["rows"]] == [
        (1, "plain"),
        (1, "spec"),
        (2, "plain"),
        (2, "spec"),
    ]
    base, spec = run["rows"][:2]
    assert (spec["requests"], spec["failed"], spec["output_tokens"]) == (3, 0, 48)
    assert spec["tok_s"] == pytest.approx(48 / spec["wall_s"])
    assert spec["speed_up"] == pytest.approx(spec["tok_s"] / base["tok_s"])
    found = spec["acceptance"]
    assert found["micro"] == pytest.approx(found["tokens"] / found["verify"])
    assert (found["requests"], found["tokens"]) == (3, 48)
    assert base["acceptance"] is None and base["speed_up"] is None
    assert spec["exactness"]["ids_equal"] == spec["exactness"]["compared"] == 3
    assert run["exactness"] == {
        "compared": 6,
        "ids_equal": 6,
        "logprobs_compared": 0,
        "logprobs_equal": 0,
        "without_reference": 0,
        "first_difference": None,
    }
    assert "ids equal 3/3" in out and "reference" in out
    # One flush per load; the first prompts warm up, so 3 of 4 and 5 are timed.
    sent = [call["input_ids"][0] for call in servers["spec"].calls if "stream" in call]
    assert sent == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    data = run["settings"]["datasets"][0]
    assert data["rows"] == 4 and len(data["sha256"]) == 64


def test_another_token_shows_beside_the_speed(tmp_path: Path) -> None:
    servers = {"plain": plain(), "spec": BenchServer(lies=Lies({"wrong-token"}))}
    code, out, _, run = accept(
        tmp_path, servers, *own(tmp_path), "--concurrency", "1", "--ignore-eos"
    )
    assert code == 0, "a measurement, not a verdict"
    assert "ids equal 0/3" in out
    assert run["exactness"]["first_difference"]["position"] == 5


def test_logprob_bits_are_compared_when_asked(tmp_path: Path) -> None:
    for args, expected in ((("--logprobs",), 0), ((), None)):
        servers = {"plain": plain(), "spec": BenchServer(lies=Lies({"logprob-bit"}))}
        _, out, _, run = accept(
            tmp_path, servers, *own(tmp_path), "--concurrency", "1", *args
        )
        found = run["rows"][1]["exactness"]
        assert found["ids_equal"] == 3
        if expected is None:
            assert found["logprobs_compared"] == 0 and "logprobs" not in out
        else:
            assert (found["logprobs_compared"], found["logprobs_equal"]) == (3, 0)
            assert "logprobs equal 0/3" in out


def test_without_a_plain_server_nothing_is_compared(tmp_path: Path) -> None:
    servers = {"a": BenchServer(), "b": BenchServer()}
    code, out, _, run = accept(tmp_path, servers, *own(tmp_path), "--concurrency", "1")
    assert code == 0 and "not compared" in out and "ids equal 3" not in out
    assert {r["speed_up"] for r in run["rows"]} == {None}
    assert run["exactness"]["compared"] == 0


def test_any_server_can_be_the_plain_one(tmp_path: Path) -> None:
    servers = {"spec": BenchServer(), "ar": plain()}
    args = ("--plain", "ar", *own(tmp_path), "--concurrency", "1")
    code, _, _, run = accept(tmp_path, servers, *args)
    assert code == 0 and run["rows"][0]["server"] == "ar", "plain is asked first"
    assert run["rows"][1]["exactness"]["compared"] == 3


@pytest.mark.parametrize(
    ("servers", "args", "found"),
    [
        ({"plain": BenchServer()}, (), "found speculative_algorithm DFLASH"),
        (
            {"spec": BenchServer(lies=Lies({"no-counters"}))},
            (),
            "speculation on and no spec_verify_ct",
        ),
        ({"spec": BenchServer()}, ("--plain", "ar"), "found --plain 'ar'"),
        ({"spec": BenchServer()}, ("--concurrency", "x"), "found --concurrency 'x'"),
        ({}, (), "found no server"),
        (
            {"spec": BenchServer(lies=Lies({"error-500"}))},
            (),
            "failed requests in a row (500: boom",
        ),
    ],
)
def test_what_cannot_run(
    tmp_path: Path, servers: dict[str, BenchServer], args: tuple[str, ...], found: str
) -> None:
    code, _, err, _ = accept(
        tmp_path, servers, *own(tmp_path), "--concurrency", "1", *args
    )
    assert code == 2 and found in err, err
    assert "expected" in err


def test_text_for_a_server_without_a_tokenizer(tmp_path: Path) -> None:
    data = tmp_path / "own.jsonl"
    data.write_text('{"prompt": "text"}\n')
    server = BenchServer(info={"skip_tokenizer_init": True})
    code, _, err, run = accept(
        tmp_path, {"spec": server}, "--dataset", "own", "--dataset-path", f"own={data}"
    )
    assert code == 2 and run is None
    assert "found --skip-tokenizer-init and prompts as text (own)" in err
    assert "fix:" in err


def test_a_missing_set_is_named_and_the_rest_measured(tmp_path: Path) -> None:
    args = list(own(tmp_path))
    args[1] = "own,mbpp"
    code, out, err, run = accept(
        tmp_path, {"spec": BenchServer()}, *args, "--no-hub", "--concurrency", "1"
    )
    assert code == 2 and not run["complete"]
    assert err.count("not measured: data set mbpp: not found") == 2, "first and last"
    assert {r["dataset"] for r in run["rows"]} == {"own"}
    assert "not measured: data set mbpp" in out, "below the table as well"
    code, _, err, _ = accept(
        tmp_path, {"spec": BenchServer()}, "--dataset", "mbpp", "--no-hub"
    )
    assert code == 2 and "found none of the data sets" in err


def test_conversations_go_through_the_chat_template(tmp_path: Path) -> None:
    data = tmp_path / "g.jsonl"
    data.write_text(json.dumps({"question": "1+1?"}) + "\n")
    args = ("--dataset", "gsm8k", "--dataset-path", f"gsm8k={data}")
    servers = {"plain": plain(), "spec": BenchServer()}
    code, out, err, run = accept(
        tmp_path, servers, *args, "--concurrency", "1", "--enable-thinking"
    )
    assert code == 0, err
    talks = [call for call in servers["spec"].calls if "messages" in call]
    assert len(talks) == 4 and CHAT.endswith("completions")
    assert talks[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert talks[0]["messages"][0]["content"].startswith("1+1?\nPlease reason")
    assert run["rows"][1]["exactness"]["ids_equal"] == 3 and "GSM8K" in out


def test_failures_are_counted_and_reported(tmp_path: Path) -> None:
    lies = Lies({"error-500"}, when=lambda body, state: body["input_ids"][0] == 3)
    code, out, err, run = accept(
        tmp_path, {"spec": BenchServer(lies=lies)}, *own(tmp_path), "--concurrency", "1"
    )
    assert code == 2 and "1 failed" in out and "500: boom" in err
    (row,) = run["rows"]
    assert (row["requests"], row["failed"]) == (3, 1) and not run["complete"]


def test_an_interrupted_run_keeps_what_was_measured(tmp_path: Path) -> None:
    # The plain load is over at once; the other is cut off after its second answer.
    spec = BenchServer(step_s=0.02)
    code, _, err, run = accept(
        tmp_path,
        {"plain": plain(), "spec": spec},
        *own(tmp_path, count=60),
        *("--num-prompts", "50", "--concurrency", "1"),
        stop_when=lambda: spec.requests >= 4,
    )
    assert code == 130
    assert "interrupted; what was measured is in run.json" in err
    assert not run["complete"]
    done, cut = run["rows"]
    assert (done["server"], done["requests"], done["partial"]) == ("plain", 50, False)
    assert cut["partial"] and 0 < cut["requests"] < 50
    assert cut["exactness"]["ids_equal"] == cut["requests"]
    table = accept_table.tables(BenchRun(**{k: run[k] for k in run if k != "schema"}))
    assert "partial" in " ".join(table[0].rows[0]) and "not complete" in table[0].below


def card(path: Path, raw: Any) -> Path:
    path.write_text(json.dumps(raw))
    return path


def test_figures_of_a_card(tmp_path: Path) -> None:
    figure = {"dataset": "own", "configuration": "DFlash2", "acceptance": 7.5}
    speed = {**figure, "concurrency": 1, "tok_s": 400, "speed_up": 4.5}
    path = card(tmp_path / "c.json", {"source": "the card", "figures": [speed]})
    figures = published.load(path)
    assert published.cell(figures, "own", 1, "dflash2") == figures[0]
    assert published.cell(figures, "own", 8, "dflash2") is None
    assert published.cell(figures, "own", None, "dflash2") == figures[0]
    assert published.cell(figures, "own", 1, "mtp") is None
    args = (*own(tmp_path), "--concurrency", "1", "--markdown", "t.md")
    code, out, _, _ = accept(
        tmp_path, {"dflash2": BenchServer()}, *args, "--published", str(path)
    )
    assert code == 0 and "400.0 (4.50x)" in out and "card: the card" in out
    text = (tmp_path / "t.md").read_text()
    assert "| 400.0 (4.50x) |" in text and "| 7.50 |" in text


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ([], "found array, expected object"),
        ({"figures": []}, "found no source"),
        ({"source": "s"}, "found no figures"),
        ({"source": "s", "figures": [{"dataset": "a"}]}, "configuration"),
        (
            {
                "source": "s",
                "figures": [{"dataset": "a", "configuration": "b", "tok_s": "1"}],
            },
            r"figures\[0\]\.tok_s: found str, expected float",
        ),
    ],
)
def test_a_card_without_a_source_is_refused(
    tmp_path: Path, raw: Any, found: str
) -> None:
    with pytest.raises(ValueError, match=found):
        published.load(card(tmp_path / "c.json", raw))


def test_every_published_figure_has_a_source() -> None:
    assert all("/" in figure.source for figure in published.REPORTED)
    assert len(published.table().rows) == len(published.REPORTED)


def test_servers_that_take_turns(tmp_path: Path) -> None:
    args = (*own(tmp_path), "--concurrency", "1,2", "--ignore-eos", "--logprobs")
    code, _, err, first = accept(tmp_path, {"plain": plain()}, *args)
    assert code == 0, err
    lies = {"spec": set(), "stock": {"wrong-token"}}
    for name, kinds in lies.items():
        server = {name: BenchServer(lies=Lies(kinds))}
        code, out, err, run = accept(tmp_path, server, *args, "--resume")
        assert code == 0, err
    assert [r["server"] for r in run["rows"]] == [
        name for name in ("plain", "spec", "stock") for _ in range(2)
    ]
    equal = [r["exactness"]["ids_equal"] for r in run["rows"][2:]]
    bits = [r["exactness"]["logprobs_equal"] for r in run["rows"][2:]]
    assert equal == bits == [3, 3, 0, 0]
    assert all(r["speed_up"] is not None for r in run["rows"][2:])
    found = [server["name"] for server in run["provenance"]["servers"]]
    assert found == ["plain", "spec", "stock"] and run["complete"]
    assert any(note.startswith("resumed:") for note in run["notes"])
    assert run["created"] == first["created"] and "reference" in out
    # Nothing is asked a second time.
    again = BenchServer()
    code, _, err, _ = accept(tmp_path, {"spec": again}, *args, "--resume")
    assert code == 0 and not [call for call in again.calls if "stream" in call], err
    assert "own, 1 in flight, spec: is in run.json" in err


def test_another_set_up_is_not_gone_on_with(tmp_path: Path) -> None:
    args = (*own(tmp_path), "--concurrency", "1")
    accept(tmp_path, {"plain": plain()}, *args)
    before = (tmp_path / "run.json").read_bytes()
    for more, count in ((("--max-new-tokens", "17"), 4), ((), 5)):
        own(tmp_path, count=count)
        code, _, err, _ = accept(
            tmp_path, {"spec": BenchServer()}, *args, *more, "--resume"
        )
        assert code == 2 and "a record of accept with other" in err
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_part_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    args = (*own(tmp_path, count=60), "--num-prompts", "50", "--concurrency", "1")
    server = plain(step_s=0.01)
    code, *_, run = accept(
        tmp_path, {"plain": server}, *args, stop_when=lambda: server.requests >= 4
    )
    assert code == 130 and run["rows"][0]["partial"]
    code, _, err, run = accept(tmp_path, {"plain": plain()}, *args, "--resume")
    assert code == 0, err
    (row,) = run["rows"]
    assert (row["requests"], row["partial"]) == (50, False)


def test_answers_outlive_their_server(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run.plain.jsonl"
    kept = AnswerFile(path)
    sample = Sample((1, 2), (3212836864, None), finish="length:2")
    kept.add("own", {"own-0000": sample})
    path.write_bytes(path.read_bytes() + b'{"dataset": "own", "requ')
    again = AnswerFile(path)
    assert again.of("own") == {"own-0000": sample} and again.of("other") == {}
    again.add("own", {"own-0001": sample})
    assert len(AnswerFile(path).of("own")) == 2
    path.write_text("{}\n")
    with pytest.raises(RunError, match="line 1: found no answer"):
        AnswerFile(path)
