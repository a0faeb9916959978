# SPDX-License-Identifier: Apache-2.0
"""The proof on one GPU: record plain decoding, stop, serve, verify."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from compose_file import flags

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docker" / "prove.py"


@pytest.fixture(scope="module")
def prove() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prove", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stages(
    prove: ModuleType, monkeypatch: pytest.MonkeyPatch, argv: list[str], *status: int
) -> tuple[int, list[tuple[str, list[str], list[str]]]]:
    """Run it with stages that end with these statuses; what each was given."""
    given: list[tuple[str, list[str], list[str]]] = []
    left = list(status)

    def served(
        stage: str, args: argparse.Namespace, flags: list[str], client: list[str]
    ) -> int:
        given.append((stage, flags, client))
        return left.pop(0)

    monkeypatch.setattr(prove, "served", served)
    return prove.prove(prove.parse(argv)), given


def test_plain_flags_are_the_exact_ones_without_speculation(
    prove: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    argv = ["--out", str(tmp_path / "new"), "--", *flags("verify")]
    argv += ["--api-key", "secret"]
    status, given = stages(prove, monkeypatch, argv, 0, 0)
    assert status == 0
    assert [name for name, _, _ in given] == ["plain", "exact"]
    where = prove.OURS
    assert given[0][1] == prove.without(flags("plain"), where)
    assert given[1][1] == prove.without(flags("exact"), where)
    record = str(tmp_path / "new" / "plain.jsonl")
    assert given[0][2] == ["record", "--output-file", record]
    assert given[1][2][:3] == ["verify", "--reference", record]


def test_nothing_is_verified_without_a_reference(
    prove: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    argv = ["--out", str(tmp_path), "--", *flags("verify")]
    for failed in (1, 2, 130):
        status, given = stages(prove, monkeypatch, argv, failed)
        assert status == 2
        assert len(given) == 1
    older = tmp_path / "older.jsonl"
    older.write_text("")
    argv = ["--out", str(tmp_path), "--reference", str(older), *argv[2:]]
    status, given = stages(prove, monkeypatch, argv, 0)
    assert status == 0
    assert given[0][2][:3] == ["verify", "--reference", str(older)]


def test_a_second_proof_keeps_the_first(
    prove: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A record is not written over; the same command line has to work again."""
    argv = ["--out", str(tmp_path), "--", *flags("verify")]
    for _ in range(2):
        status, _ = stages(prove, monkeypatch, argv, 0, 0)
        assert status == 0
        assert [path for path in tmp_path.iterdir() if path.is_file()] == []
        for name in ("plain.jsonl", "exact.jsonl", "exact.log", "report.html"):
            (tmp_path / name).write_text(name)
    argv[2:2] = ["--reference", str(tmp_path / "plain.jsonl")]
    stages(prove, monkeypatch, argv, 0)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    aside = ("exact.jsonl", "exact.log", "report.html")
    assert left == {
        "plain.jsonl",
        *(f"earlier-1/{name}" for name in ("plain.jsonl", *aside)),
        *(f"earlier-2/{name}" for name in aside),
    }


def test_flags_are_cut_whole(prove: ModuleType) -> None:
    given = ["--a", "1", "--speculative-x", "2", "3", "--speculative-y=4", "--b"]
    assert prove.without(given, ("--speculative-",)) == ["--a", "1", "--b"]
    assert prove.without(["--port", "1", "--portable"], ("--port",)) == ["--portable"]
    assert prove.value_of(["--x", "1", "--x=2"], "--x") == "2"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "found no --model-path"),
        (["--"], "found no --model-path"),
        (["--ask", "'", "--", *flags("verify")], "expected balanced quotes"),
        (["--", "--speculative-algorithm", "NGRAM"], "found no --model-path"),
        (["--", "--model-path", "m"], "found no --speculative-algorithm"),
        (["--reference", "nowhere", "--", *flags("verify")], "found no file nowhere"),
    ],
)
def test_what_cannot_be_proven(tmp_path: Path, argv: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), *argv],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["file", "file/below", "none"])
def test_what_cannot_be_run_is_no_divergence(tmp_path: Path, out: str) -> None:
    """A folder that is none, and a Python without the package: 2 and a sentence."""
    (tmp_path / "file").write_text("")
    command = [sys.executable, *(("-I", "-S") if out == "none" else ()), str(SCRIPT)]
    done = proof([*command, "--out", str(tmp_path / out), "--", *flags("verify")])
    assert done.returncode == 2
    assert "; expected " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_client_that_broke_is_no_divergence(
    prove: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only a written result makes a divergence of status 1."""
    argv = ["--out", str(tmp_path), "--", *flags("verify")]
    for status, expected in ((1, 2), (-9, 2), (137, 2), (130, 130)):
        assert stages(prove, monkeypatch, argv, 0, status)[0] == expected
    monkeypatch.setattr(prove, "set_aside", lambda out, keep: None)
    (tmp_path / "result.json").write_text("{}")
    assert stages(prove, monkeypatch, argv, 0, 1)[0] == 1

    def full(*_: Any) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(prove, "served", full)
    assert prove.main(argv) == 2


def proof(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the script on this checkout's package."""
    paths = [str(ROOT), str(ROOT / "kernels")]
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )


class Pretended:
    """Stands in for the script's Server: a server without a model, in a thread."""

    kinds: frozenset[str] = frozenset()

    def __init__(self, model: str, *, flags: list[str], log: Path, **_: Any) -> None:
        from fake_server import FakeServer, Lies

        speculative = "--speculative-algorithm" in flags
        lies = Lies(set(self.kinds) if speculative else set())
        self.server = FakeServer(speculative=speculative, lies=lies)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        log.write_text("log\n")

    @property
    def url(self) -> str:
        return self.server.url

    def __enter__(self) -> Pretended:
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self.server.start(), self.loop).result(30)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def test_status_of_real_clients(
    prove: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Equal, equal once more in the same folder, one other token, errors."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "verify"))
    monkeypatch.setattr(prove, "Server", Pretended)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    )
    ask = "--arms speculation --num-prompts 2 --max-new-tokens 16"
    argv = ["--out", str(tmp_path), "--ask", ask, "--", *flags("verify")]
    for kinds, status in (((), 0), ((), 0), (("wrong-token",), 1), (("error-500",), 2)):
        monkeypatch.setattr(Pretended, "kinds", frozenset(kinds))
        assert prove.prove(prove.parse(argv)) == status
        written = {path.name for path in tmp_path.iterdir() if path.is_file()}
        assert written == set(prove.FILES)
    assert (tmp_path / "earlier-3" / "exact.jsonl").is_file()


@pytest.mark.e2e
@pytest.mark.slow
def test_on_the_engine(tmp_path: Path, tiny_models: Path) -> None:
    """Both servers of the host one after the other, compared; then a server that lies.

    CPU, interpreted kernels, random weights: the wiring, not the bits of a GPU.
    """
    prompts = tmp_path / "prompts.jsonl"
    row: dict[str, Any] = {"input_ids": list(range(5, 13)), "max_new_tokens": 6}
    prompts.write_text(json.dumps(row) + "\n")
    ask = f"--prompts {prompts} --arms speculation --vocab-size 512"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--ask", ask]
    served = ["--", "--model-path", str(tiny_models / "target")]
    served += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens=4"]
    out = tmp_path / "out"
    done = proof([*command, "--out", str(out), *served])
    # Random weights repeat nothing: NGRAM may have no draft to reject, and then the
    # arm is equal but not exercised.
    assert done.returncode in (0, 2), done.stderr
    assert "cannot be used" not in done.stderr, done.stderr
    result = json.loads((out / "result.json").read_text())
    (arm,) = result["arms"]
    assert (arm["compared"], arm["equal"]) == (1, 1)
    assert (out / "plain.log").exists() and (out / "exact.log").exists()
    lines = (out / "plain.jsonl").read_text().splitlines()
    for n, line in enumerate(lines):
        found = json.loads(line)
        if found["kind"] == "reference":
            found["answer"]["logprobs"][2] -= 1e-6
            lines[n] = json.dumps(found)
    moved = tmp_path / "moved.jsonl"
    moved.write_text("\n".join(lines) + "\n")
    done = proof([*command, "--out", str(out), "--reference", str(moved), *served])
    assert done.returncode == 1, done.stdout + done.stderr
