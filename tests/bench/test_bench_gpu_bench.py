# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_bench: its logic against fake servers, and itself on the CPU engine."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from bench_server import BenchServer
from fake_server import Lies

from tools.proof import options

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_bench"
USAGE = {"weight": 50.0, "kvcache": 40.0, "token_capacity": 1000, "graph": {"d": 1.0}}
SMALL = ("--rehearsal", "--width", "4", "--acceptance", "2.5", "--widths", "2")


class Engine:
    """Takes the place of `rehearsal.server.Server`: a fake server in a thread."""

    started: ClassVar[list[str]] = []
    broken: ClassVar[set[str]] = set()
    silent: ClassVar[set[str]] = set()
    lies: ClassVar[dict[str, Lies]] = {}
    forced: ClassVar[dict[str, str | None]] = {}

    def __init__(
        self, model: Path, *, mode: str, flags: list[str], log: Path,
        env: dict[str, str], **_: Any,
    ):  # fmt: skip
        self.name = log.stem
        self.forced[self.name] = env.get("SGLANG_SIMULATE_ACC_LEN")
        width = 4
        if "--speculative-num-draft-tokens" in flags:
            at = flags.index("--speculative-num-draft-tokens")
            width = int(flags[at + 1])
        wrong = mode == "stock" and "--speculative-algorithm" in flags
        usage = None if self.name in self.silent else USAGE
        info = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "internal_states": [{"memory_usage": usage}],
        }
        self.server = BenchServer(
            speculative="--speculative-algorithm" in flags,
            width=width,
            lies=self.lies.get(self.name, Lies({"wrong-token"} if wrong else set())),
            info=info,
            radix="--disable-radix-cache" not in flags,
            exact=None if mode == "stock" else {"version": "0.1.0", "gpu": "none"},
        )
        self.started_in_s = 0.1
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return self.server.url

    def __enter__(self) -> Engine:
        if self.name in self.broken:
            raise RuntimeError(
                "found the server ended with status 1, expected it ready"
            )
        self.started.append(self.name)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.server.start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    module = importlib.import_module("tools.proof.speed")
    monkeypatch.setattr(module.matrix, "Server", Engine)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(Engine, "started", [])
    monkeypatch.setattr(Engine, "broken", set())
    monkeypatch.setattr(Engine, "silent", set())
    monkeypatch.setattr(Engine, "lies", {})
    monkeypatch.setattr(Engine, "forced", {})
    yield module


def run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *args: str
) -> int:
    words = ["gpu_bench", *SMALL, "--out", str(out), *args]
    monkeypatch.setattr(sys, "argv", words)
    return int(script.main(options.speed(words[1:])))


def read(out: Path, name: str) -> Any:
    return json.loads((out / f"{name}.json").read_text())


def test_everything_once(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(script, monkeypatch, tmp_path, "--bandwidth", "4800") == 0
    arms = ["plain", "exact-dflash2", "host-plain", "host-dflash2", "exact-dflash2-w2"]
    assert Engine.started == arms, "every server is started once"
    accept = read(tmp_path, "accept")
    found = {(r["server"], r["title"], r["concurrency"]): r for r in accept["rows"]}
    exact = found["exact-dflash2", "random ids", 2]
    assert exact["exactness"]["compared"] == exact["exactness"]["ids_equal"] == 4
    assert exact["speed_up"] is not None and exact["draft_tokens"] == 4
    # Stock speculation accepts what it is told to: a speed, and no answers.
    stock = found["host-dflash2", "random ids", 2]
    assert stock["speed_up"] is not None and stock["exactness"]["compared"] == 0
    assert {n for n, length in Engine.forced.items() if length} == {"host-dflash2"}
    assert Engine.forced["host-dflash2"] == "2.5"
    assert ("exact-dflash2", "random ids, acceptance set to 3", 1) in found
    assert ("exact-dflash2-w2", "random ids", 1) in found
    table = read(tmp_path, "decode-table")["rows"]
    assert len(table) == 8 and {row["prompt_tokens"] for row in table} == {8, 24}
    spec = next(r for r in table if r["server"] == "exact-dflash2")
    assert spec["exactness"]["ids_equal"] == spec["exactness"]["compared"] == 2
    told = [r["exactness"] for r in table if r["server"] == "host-dflash2"]
    assert told and not any(found["compared"] for found in told)
    assert read(tmp_path, "decode-table")["settings"]["base"] == "host-plain"
    host = next(r for r in table if r["server"] == "host-plain")
    assert host["speed_ratio"]["median"] == 1.0
    speeds = [r["decode_tok_s"]["median"] for r in (spec, host)]
    assert spec["speed_ratio"]["median"] == pytest.approx(speeds[0] / speeds[1])
    assert len(read(tmp_path, "memory")["rows"]) == 4
    model = read(tmp_path, "cost-model")
    assert {r["width"] for r in model["rows"] if r["table"] == "step"} == {1, 2, 4}
    assert any(r["table"] == "check" for r in model["rows"])
    for verb in ("accept", "decode-table", "memory", "cost-model"):
        notes = " ".join(read(tmp_path, verb)["notes"])
        assert "random weights" in notes and "set by an oracle" in notes
    page = (tmp_path / "report.html").read_text()
    assert "random weights" in page and "set by an oracle" in page
    assert (tmp_path / "report.md").exists()
    times = read(tmp_path, "gpu-bench")
    assert {t["stage"] for t in times["stages"]} >= {"start", "accept", "memory"}
    assert times["failed"] == [] and times["not_run"] == []
    assert accept["complete"] and read(tmp_path, "memory")["complete"]


def test_what_a_cached_prefix_saves(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own arms, only if named; the same answers, and what was not computed."""
    only = ("--only", "prefix-cache", "--prefixes", "70,200", "--questions", "3")
    assert run(script, monkeypatch, tmp_path, *only) == 0
    assert Engine.started == ["plain", "plain-cache", "host-cache"]
    found = read(tmp_path, "prefix-cache")
    assert found["complete"] and found["settings"]["questions"] == 3
    rows = {(row["server"], row["title"]): row for row in found["rows"]}
    titles = {title for _, title in rows}
    assert len(rows) == 12 and len(titles) == 4
    for title in titles:
        cold, warm = rows["plain", title], rows["plain-cache", title]
        assert cold["answers"] == warm["answers"]
        assert cold["cached_tokens"] == 0 < warm["cached_tokens"]
        assert warm["prompt_tokens"] == cold["prompt_tokens"]
    assert rows["plain", "70 tokens, asked again"]["requests"] == 3
    assert run(script, monkeypatch, tmp_path, *only) == 0
    assert len(Engine.started) == 3, "nothing is asked twice"


def test_a_later_call_goes_on(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = ("--only", "accept,decode-table", "--arms", "plain")
    assert run(script, monkeypatch, tmp_path, *first) == 0
    second = ("--only", "accept,decode-table", "--arms", "exact-dflash2")
    assert run(script, monkeypatch, tmp_path, *second) == 0
    assert Engine.started == ["plain", "exact-dflash2"]
    accept = read(tmp_path, "accept")
    assert [s["name"] for s in accept["provenance"]["servers"]] == Engine.started
    exact = accept["rows"][-1]
    assert exact["server"] == "exact-dflash2" and exact["speed_up"] is not None
    assert exact["exactness"]["ids_equal"] == exact["exactness"]["compared"] == 4
    assert accept["settings"]["concurrency"] == [1, 2]
    rows = len(accept["rows"])
    assert run(script, monkeypatch, tmp_path, *second) == 0
    assert len(Engine.started) == 2, "nothing is asked twice"
    assert run(script, monkeypatch, tmp_path, *second, "--again") == 0
    assert len(Engine.started) == 3
    assert len(read(tmp_path, "accept")["rows"]) == rows, "replaced, not doubled"
    assert len(read(tmp_path, "gpu-bench")["commands"]) == 4


def test_rows_of_another_setting_are_not_mixed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    first = ("--only", "accept", "--arms", "plain")
    assert run(script, monkeypatch, tmp_path, *first) == 0
    before = (tmp_path / "accept.json").read_bytes()
    second = ("--only", "accept", "--arms", "exact-dflash2")
    for more in (("--new-tokens", "9"), ("--acceptance", "3"), ("--width", "3")):
        assert run(script, monkeypatch, tmp_path, *second, *more) == 2
        assert "rows of another setting" in capsys.readouterr().out
    gpu = [{"name": "NVIDIA H200", "driver_version": "580"}]
    with monkeypatch.context() as patch:
        patch.setattr(script.provenance, "gpus", lambda index=None: gpu)
        assert run(script, monkeypatch, tmp_path, *second) == 2
    assert (tmp_path / "accept.json").read_bytes() == before
    # Contexts are rows of their own: they may come later.
    assert run(script, monkeypatch, tmp_path, *second, "--contexts", "40") == 0
    # How the host runs is settled by its first rows, not by a try without any.
    host = ("--only", "accept", "--arms", "host-plain", "--host-backends")
    Engine.broken.add("host-plain")
    assert run(script, monkeypatch, tmp_path, *host, "own") == 2
    Engine.broken.clear()
    assert run(script, monkeypatch, tmp_path, *host, "own-no-graphs") == 0
    assert run(script, monkeypatch, tmp_path, *host, "own") == 2
    assert "host_backends: own-no-graphs before" in capsys.readouterr().out


def test_records_name_the_gpu_in_use(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gpus(index: int | None = None) -> list[dict[str, str]]:
        return [{"name": f"GPU {index}", "driver_version": "580"}]

    monkeypatch.setattr(script.provenance, "gpus", gpus)
    only = ("--only", "accept", "--arms", "plain", "--gpu-index")
    for index in ("1", "0"):
        assert run(script, monkeypatch, tmp_path / index, *only, index) == 0
        wanted = [f"GPU {index} (driver 580)"]
        setting = read(tmp_path / index, "gpu-bench")["setting"]
        record = read(tmp_path / index, "accept")["provenance"]
        assert setting["machine"] == script.provenance.machine(record) == wanted


def test_what_was_measured_before_a_break_is_kept(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sglang_exact.bench.drive.GIVE_UP", 2)
    # A probe, then a warm-up and a request alone, then a warm-up of two: the second
    # of the four timed requests fails, and all after it.
    Engine.lies["plain"] = Lies({"error-500"}, when=lambda _, state: state.requests > 6)
    only = ("--only", "accept", "--arms", "plain")
    assert run(script, monkeypatch, tmp_path, *only) == 2
    rows = read(tmp_path, "accept")["rows"]
    found = [(row["concurrency"], row["partial"]) for row in rows]
    assert found == [(1, False), (2, True)]
    assert rows[1]["failed"] >= 2 and not read(tmp_path, "accept")["complete"]
    assert "plain accept" in read(tmp_path, "gpu-bench")["open"]
    books = read(tmp_path, "plain-answers")["accept"]["plain"]
    assert len(books["answers"]) == 1 and "2" not in books["tok_s"]
    assert not (tmp_path / "unfinished.json").exists()
    # Only what the plain server answered is asked of the other: no oracle of nothing.
    second = ("--only", "accept", "--arms", "exact-dflash2")
    assert run(script, monkeypatch, tmp_path, *second) == 2
    (failed,) = read(tmp_path, "gpu-bench")["failed"]
    assert "accept, 2 in flight: found no answers of plain" in failed
    Engine.lies.clear()
    both = ("--only", "accept", "--arms", "plain,exact-dflash2")
    assert run(script, monkeypatch, tmp_path, *both) == 0
    accept = read(tmp_path, "accept")
    assert len(accept["rows"]) == 4 and accept["complete"]
    assert not any(row["partial"] or row["failed"] for row in accept["rows"])


def test_what_fails_costs_itself_alone(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Engine.broken.add("host-plain")
    Engine.silent.add("plain")
    assert run(script, monkeypatch, tmp_path, "--only", "accept,memory") == 2
    # What needs no answers of the arm that is missing is measured all the same.
    assert Engine.started == ["plain", "exact-dflash2", "host-dflash2"]
    failed = "\n".join(read(tmp_path, "gpu-bench")["failed"])
    assert "host-plain: found the server ended with status 1" in failed
    assert "host-dflash2: found no answers of host-plain for accept" in failed
    assert "plain memory: server plain: found no memory_usage" in failed
    assert not read(tmp_path, "memory")["complete"]
    servers = [row["server"] for row in read(tmp_path, "memory")["rows"]]
    assert servers == ["exact-dflash2", "host-dflash2"]
    assert (tmp_path / "report.html").exists()
    # A later call that goes well does not make whole what is still missing.
    Engine.silent.clear()
    only = ("--only", "memory", "--arms", "plain")
    assert run(script, monkeypatch, tmp_path, *only) == 0
    left = read(tmp_path, "gpu-bench")["open"]
    assert set(left) == {
        "host-plain accept",
        "host-plain memory",
        "host-dflash2 accept",
    }
    assert not read(tmp_path, "accept")["complete"]
    Engine.broken.clear()
    assert run(script, monkeypatch, tmp_path, "--only", "accept,memory") == 0
    assert Engine.started[3:] == ["plain", "host-plain", "host-dflash2"]
    assert read(tmp_path, "gpu-bench")["open"] == {}
    assert read(tmp_path, "accept")["complete"] and read(tmp_path, "memory")["complete"]


def test_speculation_needs_the_plain_answers(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = ("--only", "decode-table", "--arms", "exact-dflash2")
    assert run(script, monkeypatch, tmp_path, *args) == 2
    assert Engine.started == [], "nothing is started for it"
    (failed,) = read(tmp_path, "gpu-bench")["failed"]
    assert "found no answers of plain for decode-table" in failed and "--arms" in failed


def test_budget_and_interrupt_keep_what_there_is(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(script, monkeypatch, tmp_path, "--budget", "0") == 2
    assert Engine.started == [] and read(tmp_path, "gpu-bench")["not_run"]
    stages: Any = importlib.import_module("tools.proof.speed_stages").Stages
    plain_accept = stages.accept

    async def accept(self: Any, role: Any, served: Any) -> None:
        if served.name != "plain":
            raise KeyboardInterrupt
        await plain_accept(self, role, served)

    monkeypatch.setattr(stages, "accept", accept)
    assert run(script, monkeypatch, tmp_path, "--only", "accept") == 130
    rows = read(tmp_path, "accept")["rows"]
    assert {row["server"] for row in rows} == {"plain"}
    assert read(tmp_path, "gpu-bench")["failed"] == ["interrupted"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--only", "speed"), "stages"),
        (("--arms", "spec"), "arms"),
        (("--acceptance", "9"), "--acceptance"),
    ],
)
def test_bad_options(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    args: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        run(script, monkeypatch, tmp_path, *args)
    assert told in capsys.readouterr().err


def test_other_contexts_and_lengths() -> None:
    pytest.importorskip("numpy")
    from tools.proof import speed_arms as bench_arms

    found = bench_arms.scaled(bench_arms.GPU, "64,65536", 128)
    assert (found.contexts, found.rounds) == ((64, 65536), (3, 1))
    assert (found.new_tokens, found.decode_tokens) == (128, 128)
    assert bench_arms.scaled(bench_arms.GPU, "", 0) == bench_arms.GPU


def test_flags_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    from tools.proof import speed_arms as bench_arms
    from tools.proof.speed_setup import Place

    roles = {r.arm.name: r.arm for r in bench_arms.roles(8, (2, 16), 32)}
    place = Place(tmp_path, layers=4)
    exact = place.flags(roles["exact-dflash2"], bench_arms.GPU)
    assert exact[exact.index("--context-length") + 1] == str(131072 + 256 + 1024)
    assert exact[exact.index("--speculative-num-draft-tokens") + 1] == "8"
    draft = Path(exact[exact.index("--speculative-draft-model-path") + 1])
    config = json.loads((draft / "config.json").read_text())
    assert config["dflash_config"]["block_size"] == 8
    wide = place.flags(roles["exact-dflash2-w16"], bench_arms.GPU)
    draft = Path(wide[wide.index("--speculative-draft-model-path") + 1])
    config = json.loads((draft / "config.json").read_text())
    assert config["dflash_config"]["block_size"] == 16
    # 37 GB of states at width 8 and 32 requests: 16 times 32 do not fit beside 54 GB.
    assert wide[wide.index("--max-running-requests") + 1] == "8"
    assert wide[wide.index("--cuda-graph-max-bs-decode") + 1] == "8"
    for backends, backend, no_graphs in (
        ("own", False, False),
        ("own-no-graphs", False, True),
        ("same", True, True),
    ):
        host = place._replace(host_backends=backends)
        flags = host.flags(roles["host-plain"], bench_arms.GPU)
        assert ("--attention-backend" in flags) is backend
        assert ("--disable-prefill-cuda-graph" in flags) is no_graphs
        spec = host.flags(roles["host-dflash2"], bench_arms.GPU)
        assert spec[spec.index("--attention-backend") + 1] == "triton"
        assert "--disable-radix-cache" in flags


@pytest.mark.e2e
@pytest.mark.slow
def test_on_the_cpu_engine(tmp_path: Path) -> None:
    """The script as it is on the real engine: plain against exact, and the records."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, "--out", str(tmp_path / "out"),
         "--arms", "plain,exact-dflash2", "--bandwidth", "100"],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    out = tmp_path / "out"
    for verb in ("accept", "decode-table"):
        rows = [r for r in read(out, verb)["rows"] if r["server"] == "exact-dflash2"]
        assert rows
        for row in rows:
            found = row["exactness"]
            assert found["compared"] and found["ids_equal"] == found["compared"], row
            assert row["acceptance"]["micro"] > 1
    low, high = (
        next(r for r in read(out, "accept")["rows"] if r["title"].endswith(f"to {n}"))
        for n in (1, 3)
    )
    assert high["acceptance"]["micro"] > low["acceptance"]["micro"], "the oracle acts"
    assert len(read(out, "memory")["rows"]) == 2
