# SPDX-License-Identifier: Apache-2.0
"""What every bench command stands on: record, provenance, driving, exactness."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import typer
from bench_runs import against, record, write_ids
from bench_server import BenchServer
from fake_server import Lies

from sglang_exact.bench import command as bench_shared
from sglang_exact.bench import drive, exactness, provenance, servers, stats
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.prompts import ids_of_text
from sglang_exact.bench.run import BenchRun, Recorder, RunError, load, save
from sglang_exact.bench.verbs import BY_NAME, VERBS
from sglang_exact.cli.bench import bench
from sglang_exact.client import machine
from sglang_exact.client.answer import (
    STREAMED,
    WITH_LOGPROBS,
    Answer,
    Counters,
    Request,
    Sample,
)
from sglang_exact.client.http import Client
from sglang_exact.view import tables

KEY = "tOp-s3cret-key"


def test_record_reads_back_as_written(tmp_path: Path) -> None:
    run = BenchRun("accept", "a label", ["random weights"], command=["x", "--y"])
    recorder = Recorder(run, tmp_path / "folder" / "run.json")
    recorder.add({"tok_s": 1.5})
    assert load(recorder.path) == run and not run.complete
    recorder.finish()
    assert load(recorder.path).complete
    assert record(recorder.path)["schema"] == "sglang-exact-bench/1"
    assert list(recorder.path.parent.iterdir()) == [recorder.path]


def test_a_failed_write_leaves_the_old_record(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    save(BenchRun("accept", rows=[{"tok_s": 1.0}]), path)
    before = path.read_bytes()
    path.parent.chmod(0o755)
    with pytest.raises(TypeError):
        save(BenchRun("accept", rows=[{"tok_s": object()}]), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda raw: raw.update(schema="other/9"), "found schema 'other/9'"),
        (lambda raw: raw.pop("rows"), "no field 'rows'"),
        (lambda raw: raw.update(more=1), "unknown field 'more'"),
        (lambda raw: raw.update(rows=[1]), r"rows\[0\]: found int, expected object"),
        (lambda raw: raw.update(complete="yes"), "complete: found str, expected bool"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, change: Any, found: str) -> None:
    raw = BenchRun("accept").to_json()
    change(raw)
    path = tmp_path / "run.json"
    path.write_bytes(orjson.dumps(raw))
    with pytest.raises(RunError, match=found):
        load(path)


def test_no_json_and_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{oops")
    with pytest.raises(RunError, match="found no JSON"):
        load(tmp_path / "run.json")
    with pytest.raises(RunError, match="cannot be read"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--api-key", KEY, "-x"], ["--api-key", "***", "-x"]),
        ([f"--admin-api-key={KEY}"], ["--admin-api-key=***"]),
        (["--hf-token", KEY], ["--hf-token", "***"]),
        ([f"HF_TOKEN={KEY}"], ["HF_TOKEN=***"]),
        (["--server", f"a=http://u:{KEY}@h:1/"], ["--server", "a=http://h:1"]),
        ([f"a=HF_TOKEN={KEY} serve --api-key {KEY}"], None),
        (
            ["--speculative-num-draft-tokens", "8", "--tokenizer-path", "p"],
            ["--speculative-num-draft-tokens", "8", "--tokenizer-path", "p"],
        ),
    ],
)
def test_secrets_are_scrubbed(words: list[str], expected: list[str] | None) -> None:
    found = provenance.scrub_words(words)
    assert KEY not in " ".join(found)
    if expected is not None:
        assert found == expected


def test_gpu_lines() -> None:
    line = ", ".join(str(i) for i in range(len(provenance.GPU_FIELDS)))
    (gpu,) = machine.parse_rows(f"{line}\nno such line\n", provenance.GPU_FIELDS)
    assert gpu["index"] == "0" and set(gpu) == set(provenance.GPU_FIELDS)


def test_gpu_in_use_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two GPUs: a record of one of them is of a machine that has one."""
    rest = ", ".join(["x"] * (len(provenance.GPU_FIELDS) - 1))
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *--id=1*) echo "1, {rest}";; '
        f'*--id=0*) echo "0, {rest}";; *--id=*) exit 6;; '
        f'*) echo "0, {rest}"; echo "1, {rest}";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [gpu["index"] for gpu in provenance.gpus(1)] == ["1"]
    assert [gpu["index"] for gpu in provenance.gpus(0)] == ["0"]
    assert provenance.gpus(2) == []
    assert [gpu["index"] for gpu in provenance.gpus()] == ["0", "1"]
    assert len(provenance.machine(provenance.collect([], None, 1))) == 1


def sample(ids: tuple[int, ...], verify: int | None = None, **more: Any) -> Sample:
    return Sample(ids, counters=Counters(verify=verify), **more)


def test_acceptance_macro_and_micro() -> None:
    answers = [sample((1,) * 8, 2), sample((1,) * 4, 4), sample((1,))]
    found = stats.acceptance(answers)
    assert found is not None
    assert found.macro == pytest.approx((8 / 2 + 4 / 4) / 2)
    assert found.micro == pytest.approx(12 / 6)
    assert (found.requests, found.tokens, found.verify) == (2, 12, 6)
    assert stats.acceptance([sample((1, 2))]) is None


def test_spread_and_ratio() -> None:
    found = stats.spread([3.0, 1.0, 2.0, 10.0])
    assert found == (4, 2.5, 4.0, 1.0, 10.0)
    assert stats.spread([]) is None
    assert stats.ratio(3.0, 2.0) == 1.5
    assert stats.ratio(3.0, 0.0) is None and stats.ratio(None, 1.0) is None


def test_exactness_counts_bits() -> None:
    tally = exactness.Tally()
    base = sample((1, 2, 3), logprobs=(5, 6, 7))
    assert tally.add("a", base, base) is True
    assert tally.add("b", sample((1, 2, 3), logprobs=(5, 6, 8)), base) is False
    assert tally.add("c", sample((1, 2, 4), logprobs=(5, 6, 7)), base) is False
    assert tally.add("d", base, None) is None
    bad = sample((1, 2, 3), logprobs=(5, None, 7))
    assert tally.add("e", bad, bad) is False, "a logprob that is no number"
    assert tally.text() == "ids equal 3/4, logprobs equal 2/4, 1 not compared"
    found = tally.to_json()
    assert found["first_difference"]["request"] == "b"
    assert found["without_reference"] == 1
    rows = [{"exactness": found}, {"exactness": found, "plain": True}]
    assert exactness.total(rows)["ids_equal"] == 3
    assert exactness.show(exactness.Tally().to_json()) == "not compared"
    assert exactness.show(None) == "not compared"


def test_server_options() -> None:
    assert servers.parse(["a=http://h:1", "b@7=http://h:2"])[1].name == "b@7"
    with pytest.raises(CannotRun, match="found no server"):
        servers.parse([])
    with pytest.raises(CannotRun, match=r"'x'; found two servers named 'a'"):
        servers.parse(["x", "a=http://h:1", "a=http://h:2"])
    assert servers.choose_plain(["a", "plain"], None) == "plain"
    assert servers.choose_plain(["a"], None) is None
    with pytest.raises(CannotRun, match="found --plain 'c'; expected one of a, b"):
        servers.choose_plain(["a", "b"], "c")


def test_numbers() -> None:
    assert bench_shared.numbers("1,8,2-4", "--x") == [1, 8, 2, 3, 4]
    for bad in ("", "a", "0", "1-", "-3", "1.5"):
        with pytest.raises(CannotRun, match="found --x"):
            bench_shared.numbers(bad, "--x")


def ask(server: BenchServer, work: Any) -> Any:
    """`work(client)` against one fake server."""

    async def go() -> Any:
        async with server, Client(server.url, key=server.api_key) as client:
            return await work(client)

    return asyncio.run(go())


def requests(count: int, tokens: int = 20) -> list[Request]:
    return [
        Request(f"r{i}", tokens, ids=(i + 1, 2, 3), ignore_eos=True)
        for i in range(count)
    ]


def test_load_keeps_order_and_concurrency() -> None:
    server = BenchServer(step_s=0.001)
    peak = 0

    def watch(answer: Answer) -> None:
        nonlocal peak
        peak = max(peak, server.running)

    load = ask(server, lambda c: drive.drive(c, requests(12), 3, done=watch))
    assert [a.request for a in load.answers] == [f"r{i}" for i in range(12)]
    assert load.tokens == 240 and load.tok_s == pytest.approx(240 / load.wall_s)
    assert peak <= 3
    assert all(s.counters.verify for s in load.samples)


def test_a_broken_server_is_given_up() -> None:
    server = BenchServer(lies=Lies({"error-500"}))
    with pytest.raises(CannotRun, match="5 failed requests in a row.*boom"):
        ask(server, lambda c: drive.drive(c, requests(50), 1))
    assert server.requests == drive.GIVE_UP


def test_some_failures_are_counted_not_fatal() -> None:
    lies = Lies({"error-500"}, when=lambda body, state: body["input_ids"][0] == 3)
    load = ask(BenchServer(lies=lies), lambda c: drive.drive(c, requests(6), 2))
    assert len(load.samples) == 5 and len(load.errors) == 1


@pytest.mark.parametrize("incremental", [False, True])
def test_streamed_answers_carry_arrival_times(incremental: bool) -> None:
    server = BenchServer(step_s=0.002, incremental=incremental)
    request = requests(1, 30)[0]
    answer = ask(server, lambda c: c.ask(request, STREAMED))
    found = answer.sample
    assert found.arrivals[0][0] == 1 and found.arrivals[-1][0] == 30
    times = [at for _, at in found.arrivals]
    assert times == sorted(times) and len(times) == found.counters.verify + 1
    span = times[-1] - times[0]
    assert found.decode_tok_s == pytest.approx(29 / span)
    assert 0 < times[0] <= times[-1] <= found.latency_s


def test_speed_needs_two_arrivals() -> None:
    once = Sample((1, 2), arrivals=((2, 0.5),))
    # All in one piece: that is the time of the whole answer, not of a first token.
    assert once.ttft_s is None and once.decode_tok_s is None
    one = Sample((1,), arrivals=((1, 0.5),))
    assert one.ttft_s == 0.5
    twice = Sample((1,) * 13, arrivals=((3, 1.0), (13, 3.0)))
    assert twice.ttft_s == 1.0 and twice.decode_tok_s == 5.0


def test_conversations_and_texts_have_ids() -> None:
    talk = Request("r", 8, messages=({"role": "user", "content": "hi"},))
    answer = ask(BenchServer(), lambda c: c.ask(talk, WITH_LOGPROBS))
    assert len(answer.sample.ids) == len(answer.sample.logprobs)
    missing = BenchServer(lies=Lies({"no-token-ids"}))
    answer = ask(missing, lambda c: c.ask(talk))
    assert "no response_token_ids" in answer.error
    text = "some text"
    assert ask(BenchServer(), lambda c: ids_of_text(c, text)) == tuple(text.encode())


def test_thinking_and_lengths_are_sent() -> None:
    server = BenchServer()
    talk = Request(
        "r",
        8,
        messages=({"role": "user", "content": "hi"},),
        min_new_tokens=8,
        ignore_eos=True,
        thinking=False,
    )
    ask(server, lambda c: c.ask(talk))
    sent = server.calls[-1]
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert (sent["max_tokens"], sent["min_tokens"], sent["temperature"]) == (8, 8, 0)
    plain = Request("r", 4, ids=(1,), min_new_tokens=4)
    assert plain.body(drive.IDS_ONLY)["sampling_params"]["min_new_tokens"] == 4


def test_every_unreachable_server_is_named(tmp_path: Path) -> None:
    data = write_ids(tmp_path / "ids.jsonl")
    status, _, err = against(
        {"up": BenchServer()},
        *("accept", "--server", "down=http://127.0.0.1:9", "--dataset", "own"),
        *("--server", "bad=nonsense", "--dataset-path", f"own={data}"),
        cwd=tmp_path,
    )
    assert status == 2
    assert "server down: ClientConnectorError" in err and "server bad:" in err
    assert "fix: start them" in err and list(tmp_path.iterdir()) == [data]


def test_the_key_is_used_and_kept_nowhere(tmp_path: Path) -> None:
    data = write_ids(tmp_path / "ids.jsonl")
    names = {"plain": BenchServer(speculative=False, api_key=KEY)}
    args = ("accept", "--dataset", "own", "--dataset-path", f"own={data}")
    small = ("--num-prompts", "2", "--max-new-tokens", "4", "--concurrency", "1")
    out = ("--output-file", str(tmp_path / "run.json"))
    status, printed, err = against(names, *args, *small, *out, cwd=tmp_path)
    assert status == 2 and "401" in err
    names = {"plain": BenchServer(speculative=False, api_key=KEY)}
    key = ("--api-key", KEY)
    status, printed, err = against(names, *args, *small, *out, *key, cwd=tmp_path)
    assert status == 0, err
    text = (tmp_path / "run.json").read_text()
    assert KEY not in text + printed + err
    run = record(tmp_path / "run.json")
    (server,) = run["provenance"]["servers"]
    assert server["launch_command"] == "serve --api-key '***'"
    assert run["command"][-2:] == ["--api-key", "***"]


def test_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "run.json"

    def status(error: BaseException) -> int:
        async def fail() -> None:
            raise error

        with pytest.raises(typer.Exit) as left:
            bench_shared.execute(fail(), lambda: kept)
        return left.value.exit_code

    assert status(CannotRun("found this")) == 2
    assert f"found this; what was measured is in {kept}" in capsys.readouterr().err
    assert status(KeyError("odd")) == 2
    assert "unexpected KeyError" in capsys.readouterr().err
    assert status(ExceptionGroup("many", [CannotRun("inner")])) == 2
    assert "inner" in capsys.readouterr().err
    assert status(asyncio.CancelledError()) == 130
    assert f"interrupted; what was measured is in {kept}" in capsys.readouterr().err


def test_a_verb_is_one_record() -> None:
    """Command line, report and help go over one list."""
    found = {c.name: c.callback for c in bench.registered_commands}
    assert found.pop("report") is not None
    assert found == {verb.name: verb.command for verb in VERBS}
    assert len(BY_NAME) == len(VERBS) and all(v.title and v.plots for v in VERBS)


def test_tables_show_cells_as_they_are() -> None:
    table = tables.TableData("a|b", ("x", "y"), [("[red]<b>", "1|2\n3")], ["<i>"])
    text = tables.markdown(table)
    assert "| \\[red\\]&lt;b&gt; | 1\\|2 3 |" in text and "| --- | ---: |" in text
    assert "&lt;i&gt;" in text
    assert tables.number(None) == "-" and tables.number(1234.567, 2) == "1,234.57"


def test_bench_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys\n"
        "from sglang_exact.cli.bench import bench\n"
        "heavy = {'torch', 'sglang', 'numpy', 'matplotlib', 'transformers'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
