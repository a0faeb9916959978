# SPDX-License-Identifier: Apache-2.0
"""Files that cannot be written, are there already, or were damaged."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import FakeServer, Lies
from test_verify_cli import call
from typer.testing import CliRunner
from verify_runs import against

from sglang_exact.verify import record


def test_two_runs_cannot_share_a_record(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with record.Writer(path) as first:
        first.header({"format": 1})
        with (
            pytest.raises(record.RecordError, match="another run is writing it"),
            record.Writer(path),
        ):
            pass
        first.end({})
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["header", "end"]


def test_record_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text('{"kind":"header"}\n')
    before = (tmp_path / "plain.jsonl").read_bytes()
    for name in ("record", "verify"):
        args = ("--base-url", "http://127.0.0.1:9", "--output-file", "plain.jsonl")
        code, _, err = asyncio.run(call(name, *args, cwd=tmp_path))
        assert code == 2
        assert "exists; pass --resume" in err
    assert (tmp_path / "plain.jsonl").read_bytes() == before


SMALL = ("--arms", "speculation", "--num-prompts", "4", "--max-new-tokens", "20")


def _verify(
    path: Path, *args: str, lies: set[str] | None = None, limit: int | None = None
) -> tuple[int, str, str]:
    """`verify` as a process; `limit`: the largest file it may write, in bytes."""

    def small_disk() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    async def go() -> tuple[int, str, str]:
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer(lies=Lies(lies or set())) as tested,
        ):
            servers = ("--base-url", tested.url, "--reference", plain.url)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", "from sglang_exact.cli import main; main()"),
                *("verify", *servers, *SMALL, *args),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=path,
                preexec_fn=small_disk,
            )
            out, err = await asyncio.wait_for(process.communicate(), 60)
            return process.returncode or 0, out.decode(), err.decode()

    return asyncio.run(go())


@pytest.mark.parametrize("limit", [0, 4000])
def test_full_disk(tmp_path: Path, limit: int) -> None:
    """Wherever the record ends, the run ends there and says why."""
    code, out, err = _verify(tmp_path, limit=limit)
    assert code == 2, (out, err)
    assert "Traceback" not in out + err
    assert "File too large" in out + err
    assert not out.startswith("verified")


@pytest.mark.parametrize("option", ["--output-file", "--html"])
def test_output_that_cannot_be_written(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = _verify(tmp_path, option, "file/x")
    assert code == 2
    assert "Traceback" not in out + err
    assert "Not a directory" in err or "File exists" in err
    # A divergence is shown and counts, written or not.
    if option != "--output-file":
        assert out.startswith("verified: 4/4")
        code, out, _ = _verify(tmp_path, option, "file/x", lies={"wrong-token"})
        assert code == 1
        assert out.startswith("DIVERGENCE")


def test_report_of_a_damaged_record(tmp_path: Path) -> None:
    """Every field of every kind of line, damaged one at a time."""
    from sglang_exact.cli import application

    asyncio.run(against(FakeServer(lies=Lies({"logprob-bit"})), tmp_path))
    rows = [json.loads(x) for x in (tmp_path / "run.jsonl").read_text().splitlines()]
    damaged, tried = tmp_path / "damaged.jsonl", set()
    app = application(["report", "verify"])
    for place, row in enumerate(rows):
        for key in row:
            if (row["kind"], key) in tried:
                continue
            tried.add((row["kind"], key))
            for odd in (None, [[1]]):
                changed = [dict(r) for r in rows]
                changed[place][key] = odd
                damaged.write_text("".join(json.dumps(r) + "\n" for r in changed))
                found = CliRunner().invoke(app, ["report", str(damaged)])
                assert found.exit_code in (1, 2, 130), (row["kind"], key, odd)
                assert isinstance(found.exception, SystemExit | None), (row, key)
    assert len(tried) > 40
