# SPDX-License-Identifier: Apache-2.0
"""The sweep: what aiperf is told, what is read from it, and what goes wrong."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_runs import against, record
from bench_server import BenchServer
from fake_server import Lies

from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.sweep import aiperf
from sglang_exact.bench.sweep import exports as aiperf_exports
from sglang_exact.bench.sweep import measure as sweep
from sglang_exact.bench.sweep import tables as sweep_table
from sglang_exact.bench.sweep.exports import Reply

STAND_IN = Path(__file__).with_name("stand_in_aiperf.py")
SMALL = ("--lengths", "8,16", "--requests", "3,2", "--warmups", "1,1")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """An executable as pip makes one: named aiperf, with its interpreter beside it."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    path = folder / "aiperf"
    path.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (folder / "python").write_text("")
    return path


def plain(**more: Any) -> BenchServer:
    return BenchServer(speculative=False, **more)


def run_sweep(
    path: Path, program: Path | None, servers: dict[str, BenchServer], *args: str,
    wrong: str = "", **more: Any,
) -> Any:  # fmt: skip
    found = ("--aiperf", str(program)) if program else ()
    code, out, err = against(
        servers, "sweep", *found, "--tokenizer", "tok", "--output-file", "run.json",
        *(args or SMALL), cwd=path, STAND_IN=wrong, **more,
    )  # fmt: skip
    kept = path / "run.json"
    return code, out, err, record(kept) if kept.exists() else None


def test_speed_up_acceptance_and_exactness_by_context(
    tmp_path: Path, program: Path
) -> None:
    servers = {"spec": BenchServer(step_s=0.002), "plain": plain(step_s=0.004)}
    code, out, err, run = run_sweep(
        tmp_path, program, servers, *SMALL, "--plot", "s.svg", "--markdown", "s.md"
    )
    assert code == 0, err
    assert run["verb"] == "sweep" and run["complete"]
    order = [(r["server"], r["length"]) for r in run["rows"]]
    assert order == [("plain", 8), ("spec", 8), ("plain", 16), ("spec", 16)]
    base, spec = run["rows"][:2]
    assert base["exactness"] is None and base["acceptance_length"] is None
    assert spec["requests"] == 3 and spec["decode_tok_s"]["n"] == 3
    assert spec["exactness"]["ids_equal"] == spec["exactness"]["compared"] == 3
    assert spec["exactness"]["what"] == "ids"
    assert spec["acceptance_length"] > 1
    assert run["exactness"]["compared"] == 5
    gains = sweep_table.speedups(run["rows"])
    wanted = spec["decode_tok_s"]["median"] / base["decode_tok_s"]["median"]
    assert gains["spec", 8] == pytest.approx(wanted)
    assert "ids equal 3/3" in out and "reference" in out
    assert "<svg" in (tmp_path / "s.svg").read_text()
    assert "ids equal 3/3" in (tmp_path / "s.md").read_text()
    assert run["settings"]["aiperf"] == aiperf_exports.VERSION


def test_another_token_shows_beside_the_speed(tmp_path: Path, program: Path) -> None:
    servers = {"plain": plain(), "spec": BenchServer(lies=Lies({"wrong-token"}))}
    code, out, _, run = run_sweep(tmp_path, program, servers)
    assert code == 0, "a measurement, not a verdict"
    found = run["rows"][1]["exactness"]
    assert (found["compared"], found["ids_equal"]) == (3, 0)
    assert found["first_difference"] == {"request": "0", "position": 5}
    assert "ids equal 0/3" in out


def test_what_aiperf_is_told(tmp_path: Path, program: Path) -> None:
    tokenizer = tmp_path / "local-tokenizer"
    tokenizer.mkdir()
    key = "se-cret"
    servers = {"plain": plain(api_key=key)}
    code, _, err, run = run_sweep(
        tmp_path, program.parent.parent, servers, *SMALL, "--api-key", key,
        "--tokenizer", str(tokenizer), HF_HUB_OFFLINE="1", PYTHONPATH="/nowhere",
    )  # fmt: skip
    assert code == 0, err
    folder = tmp_path / "run.aiperf" / "plain-8"
    words = json.loads((folder / "options.json").read_text())
    text = " ".join(words)
    for part in (
        "--isl 8", "--osl 8", "--concurrency 1", "--request-count 3",
        "--warmup-request-count 1", "--random-seed 42", "ignore_eos:true",
        "min_tokens:8", "temperature:0", "return_token_ids:true",
        "--endpoint-type completions", "--streaming", "--export-level raw",
    ):  # fmt: skip
        assert part in text
    env = json.loads((folder / "environment.json").read_text())
    # Offline mode makes aiperf refuse a local folder; another Python's path breaks it.
    assert "HF_HUB_OFFLINE" not in env and "PYTHONPATH" not in env
    assert key in text and key not in json.dumps(run)


def test_protocol_by_default() -> None:
    found = sweep.shapes([], [], [])
    assert [tuple(s) for s in found] == [
        (512, 30, 2), (4096, 10, 2), (12288, 5, 1), (36864, 3, 1),
    ]  # fmt: skip
    assert sweep.shapes([4096], [], [])[0] == (4096, 10, 2)
    with pytest.raises(CannotRun) as told:
        sweep.shapes([1, 64], [3], [0, 0, 0])
    for part in ("1 values for --requests", "3 values for --warmups", "--lengths 1"):
        assert part in str(told.value)
    with pytest.raises(CannotRun, match="found a length twice"):
        sweep.shapes([512, 512], [], [])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("fail-at=16", "status 1"),
        ("no-summary", "no profile_export_aiperf.json"),
    ],
)
def test_failed_run_keeps_what_was_measured(
    tmp_path: Path, program: Path, wrong: str, told: str
) -> None:
    code, _, err, run = run_sweep(tmp_path, program, {"plain": plain()}, wrong=wrong)
    assert code == 2 and told in err
    # Nothing is claimed to be kept before there is a row.
    assert ("what was measured is in run.json" in err) == bool(run["rows"])
    assert not run["complete"]
    assert [r["length"] for r in run["rows"]] == ([8] if "fail" in wrong else [])
    if "fail" in wrong:
        assert "no such model" in err and "\x1b" not in err


def test_absent_or_other_aiperf_names_the_commands(
    tmp_path: Path, program: Path
) -> None:
    code, _, err, run = run_sweep(tmp_path, tmp_path / "none", {"plain": plain()})
    assert code == 2 and run is None
    assert "python3.12 -m venv" in err and "pip install aiperf==0.13.0" in err
    code, _, err, run = run_sweep(
        tmp_path, program, {"plain": plain()}, wrong="version=0.14.0"
    )
    assert code == 2 and run is None
    assert "found aiperf 0.14.0; expected 0.13.0" in err


def test_every_reason_at_once(tmp_path: Path, program: Path) -> None:
    info = {"skip_tokenizer_init": True, "context_length": 20}
    servers = {"plain": plain(info=info)}
    code, _, err, run = run_sweep(tmp_path, program, servers)
    assert code == 2 and run is None
    assert "context_length 20, expected 32" in err and "--skip-tokenizer-init" in err


def test_a_speculative_server_is_no_base(tmp_path: Path, program: Path) -> None:
    code, _, err, _ = run_sweep(tmp_path, program, {"plain": BenchServer()})
    assert code == 2 and "expected a plain server" in err


def test_missing_parts_are_said(tmp_path: Path, program: Path) -> None:
    servers = {"plain": plain(), "spec": BenchServer()}
    code, out, err, run = run_sweep(tmp_path, program, servers, wrong="no-metrics")
    assert code == 0, err
    assert run["rows"][1]["acceptance_length"] is None
    assert any("serve with --enable-metrics" in note for note in run["notes"])
    assert "--enable-metrics" in out
    code, _, err, run = run_sweep(tmp_path, program, servers, wrong="one-failed")
    assert code == 2 and "1 requests" in err
    assert run["rows"][0]["failed"] == 1 and not run["complete"]


def test_one_short_answer_does_not_hide_in_a_mean(
    tmp_path: Path, program: Path
) -> None:
    _, out, _, _ = run_sweep(tmp_path, program, {"plain": plain()})
    assert "another OSL" not in out
    _, out, _, run = run_sweep(tmp_path, program, {"plain": plain()}, wrong="short-one")
    assert "plain, 8: 1 of 3 requests have another OSL, 7 to 7" in out
    assert any("plain, 16: 1 of 2 requests" in note for note in run["notes"])


def test_cut_record_is_left_out(tmp_path: Path, program: Path) -> None:
    servers = {"plain": plain(), "spec": BenchServer()}
    _, _, _, run = run_sweep(tmp_path, program, servers, wrong="cut-record")
    found = run["rows"][1]["exactness"]
    assert (found["compared"], found["without_reference"]) == (2, 1)
    assert run["rows"][1]["decode_tok_s"]["n"] == 2


def test_text_is_compared_where_no_ids_come(tmp_path: Path, program: Path) -> None:
    lies = Lies({"wrong-token"}, when=lambda _, server: server.requests % 2 == 0)
    servers = {"plain": plain(), "spec": BenchServer(lies=lies)}
    code, out, _, run = run_sweep(
        tmp_path, program, servers, *SMALL, "--endpoint-type", "chat"
    )
    found = run["rows"][1]["exactness"]
    assert code == 0 and found["what"] == "text"
    assert 0 < found["ids_equal"] < found["compared"] == 3
    assert "text equal" in out and "ids equal" not in out


def test_interrupt_keeps_the_record_and_ends_aiperf(
    tmp_path: Path, program: Path
) -> None:
    pid = tmp_path / "run.aiperf" / "plain-8" / "pid"
    code, _, err, run = run_sweep(
        tmp_path, program, {"plain": plain()}, wrong="hang",
        stop_when=lambda: pid.exists() and pid.read_text(),
    )  # fmt: skip
    assert code == 130 and "interrupted" in err
    assert run["rows"] == [] and not run["complete"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_resume_adds_what_is_missing(tmp_path: Path, program: Path) -> None:
    base = plain()
    code, *_ = run_sweep(tmp_path, program, {"plain": base}, wrong="fail-at=16")
    assert code == 2
    asked = base.requests
    servers = {"plain": base, "spec": BenchServer()}
    code, _, err, run = run_sweep(tmp_path, program, servers, *SMALL, "--resume")
    assert code == 0, err
    assert len(run["rows"]) == 4 and run["complete"]
    # One request asks for the size of the vocabulary.
    assert base.requests - asked == 1 + 3, "the first length is not measured again"
    assert run["rows"][1]["exactness"]["ids_equal"] == 3
    assert any("clocks may have moved" in note for note in run["notes"])
    names = [s["name"] for s in run["provenance"]["servers"]]
    assert sorted(names) == ["plain", "spec"]
    code, _, err, _ = run_sweep(
        tmp_path, program, servers, *SMALL, "--resume", "--seed", "7"
    )
    assert code == 2 and "other seed" in err
    # Another model in the same record is said beside the figures.
    other = {"third": BenchServer(info={"model_path": "other"})}
    code, out, err, run = run_sweep(tmp_path, program, other, *SMALL, "--resume")
    assert code == 0, err
    assert len(run["rows"]) == 6 and "model_path differs between the servers" in out


def test_pairing_is_by_prompt() -> None:
    def reply(prompt: str, *ids: int) -> Reply:
        return Reply(prompt, ids, "")

    plain_ = [reply("a", 1, 2), reply("b", 3, 4)]
    found = sweep.compare(plain_, [reply("b", 3, 4), reply("a", 1, 9), reply("c", 1)])
    assert (found["compared"], found["ids_equal"]) == (2, 1)
    assert found["without_reference"] == 1
    assert found["first_difference"] == {"request": "1", "position": 1}
    shorter = sweep.compare(plain_, [reply("a", 1)])
    assert shorter["first_difference"]["position"] == 1


@pytest.mark.slow
def test_real_aiperf_from_the_registry(tmp_path: Path) -> None:
    """The environment that the message asks for, and the exports of a real run."""
    pytest.importorskip("tokenizers")
    from sglang_exact.rehearsal import models, tokenizer

    ready = os.environ.get("AIPERF_VENV")
    venv = Path(ready) if ready else tmp_path / "aiperf"
    if not ready:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        wanted = f"aiperf=={aiperf_exports.VERSION}"
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", wanted]
        if subprocess.run(pip, timeout=900, check=False).returncode:
            pytest.skip("the registry gives no aiperf")
    folder = tokenizer.make_tokenizer(models.make_target(tmp_path / "target"))
    server = CompletionsServer(speculative=False, step_s=0.01)
    other = CompletionsServer(lies=Lies({"wrong-token"}), step_s=0.01)
    code, out, err = against(
        {"plain": server, "spec": other}, "sweep", "--aiperf", str(venv),
        "--tokenizer", str(folder), "--lengths", "16", "--requests", "3",
        "--warmups", "1", "--output-file", "run.json", cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, err
    base, spec = record(tmp_path / "run.json")["rows"]
    assert (base["isl"], base["osl"]) == (16, 16)
    assert base["decode_tok_s"]["n"] == 3 and base["ttft_ms"]["low"] > 0
    assert (spec["exactness"]["compared"], spec["exactness"]["ids_equal"]) == (3, 0)
    assert spec["exactness"]["what"] == "ids"
    assert server.warmups_and_requests == 4


class CompletionsServer(BenchServer):
    """Streams /v1/completions as the host does, one token in a chunk."""

    warmups_and_requests = 0

    async def start(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=2**28)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_route("*", "/flush_cache", self.flush)
        app.router.add_post("/v1/completions", self.completions)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def completions(self, request: Any) -> Any:
        import asyncio

        from aiohttp import web

        asked = await request.json()
        type(self).warmups_and_requests += not self.speculative
        sampling = {
            "temperature": 0,
            "max_new_tokens": asked["max_tokens"],
            "ignore_eos": True,
        }
        body = {"text": asked["prompt"], "sampling_params": sampling}
        answer, _ = self._generate(body, self.lies.kinds)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids = answer["output_ids"]
        chunks: list[Any] = [
            {"choices": [{"index": 0, "text": f"t{i} ", "token_ids": [i]}]} for i in ids
        ]
        counts = {"prompt_tokens": asked["min_tokens"], "completion_tokens": len(ids)}
        counts["total_tokens"] = sum(counts.values())
        chunks.append({"choices": [], "usage": counts})
        for chunk in chunks:
            await asyncio.sleep(self.step_s)
            whole = {"id": "x", "object": "text_completion", "model": "m", **chunk}
            await response.write(f"data: {json.dumps(whole)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def test_program_is_found_by_environment_and_interpreter(program: Path) -> None:
    for given in (program, program.parent.parent, program.with_name("python")):
        assert aiperf.executable(given) == program
