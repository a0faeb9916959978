# SPDX-License-Identifier: Apache-2.0
"""Every command in README and docs/ is run by a test or says what it needs.

A block may carry `<!-- needs: gpu -->` (or network, docker, server) above it. What is
cheap is really run here; for the rest at least the flags must exist.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docs_reader
import pytest
import warm
from docs_reader import Block, Command

from sglang_exact.host import source as host
from sglang_exact.rehearsal import launch_server as rehearsal_launcher
from sglang_exact.rehearsal.environment import environment

ROOT = docs_reader.ROOT
NEEDS = {"gpu", "network", "docker", "server"}
# Programs of others, and what makes them no business of a test here.
OUTSIDE = {
    "pip": "network", "pip3": "network", "git": "network", "uv": "network",
    "curl": "server", "docker": "docker", "nvidia-smi": "gpu", "pre-commit": "network",
    "huggingface-cli": "network", "hf": "network", "scp": "network",
    "rsync": "network",
}  # fmt: skip
SHELL = {"cd", "export", "source", "unset", "mkdir", "cp", "mv", "cat", "ls", "tar"}
SHELL |= {"sha256sum", "chmod", "echo", "rm", "sudo", "."}
# Commands that other tests run: how they begin -> the file that does.
ELSEWHERE = {
    "scripts/test": ".ci/run",
    "scripts/rehearsal_env": "scripts/test",
    "scripts/demo": "tests/docs/test_demo.py",
    "scripts/smollm2": "tests/tools/test_smollm2.py",
    "scripts/offline_bundle": "tests/offline",
    "scripts/bench_kernels.py": "tests/kernels",
    "sglang-exact bench": "tests/bench",
    "sglang-exact verify": "tests/verify/test_verify_cli.py",
    "sglang-exact record": "tests/verify/test_verify_cli.py",
    "sglang-exact report": "tests/verify/test_verify_cli.py",
    "python -m sglang_exact.launch_server": "tests/launch/test_refusals.py",
    "sglang serve": "tests/launch/test_untouched.py",
    "python -m sglang.launch_server": "tests/launch/test_untouched.py",
}
# What can do nothing without a GPU, and says so in its name or its marker.
ON_A_GPU = ("scripts/gpu_", "python -m pytest -m gpu ", "scripts/sweep_small_m.py ")
# Run here, as they stand: how they begin -> exit statuses that are no failure.
HERE = {
    "sglang-exact doctor": (0, 1),
    "sglang-exact env": (0,),
    "scripts/apply_patches --check": (0, 1, 2),
    "scripts/docs_tables": (0, 1),
    "scripts/evidence": (0, 1),
    "scripts/pin_host": (0, 1),
}
MODULES = ("sglang_exact.rehearsal.launch_server", "sglang_exact.launch_server")


def every() -> list[Command]:
    """All commands of all documents."""
    return [
        command
        for path in docs_reader.documents()
        for block in docs_reader.blocks(path)
        for command in docs_reader.commands(block)
    ]


def line(command: Command) -> str:
    """The command with one name for each way to call Python."""
    text = " ".join(command.words)
    return re.sub(r"^\S*python(3(\.\d+)?)?(?=\s)", "python", text)


def begins(text: str, starts: object) -> str | None:
    """The start that a command has, the longest first."""
    assert isinstance(starts, dict)
    for start in sorted(starts, key=len, reverse=True):
        if text == start or text.startswith(start + " "):
            return str(start)
    return None


def exists(path: str) -> bool:
    """Whether the checkout has a file."""
    return (ROOT / path.partition("::")[0]).exists()


def untested(command: Command) -> str | None:
    """Why a command is neither run nor marked, or None."""
    text = line(command)
    if command.needs:
        unknown = command.needs - NEEDS
        return (
            f"{command}: needs {sorted(unknown)}, which nobody has" if unknown else None
        )
    program = text.split()[0]
    if text.startswith(ON_A_GPU):
        gone = [w for w in command.words if w.startswith("tests/") and not exists(w)]
        return f"{command}: {gone[0]} does not exist" if gone else None
    if program in OUTSIDE or program in SHELL or text.startswith("python -m pip "):
        return None
    if text.startswith(("python -m venv", "python3 -m venv")):
        return None
    if begins(text, HERE) or text.startswith(f"python -m {MODULES[0]}"):
        return None
    start = begins(text, ELSEWHERE)
    if start is None:
        return f"{command}: run by no test and not marked with <!-- needs: ... -->"
    if not (ROOT / ELSEWHERE[start]).exists():
        return f"{command}: {ELSEWHERE[start]} does not exist"
    return None


def test_every_command_is_run_or_marked() -> None:
    commands = every()
    assert len(commands) > 20
    assert [why for why in map(untested, commands) if why] == []


def read(text: str) -> list[Command]:
    page = Path("page.md")
    return [c for b in docs_reader.blocks(page, text) for c in docs_reader.commands(b)]


def test_an_unmarked_command_is_seen() -> None:
    text = "```sh\nFOO=1 train --gpus 8 && scripts/test \\\n  --quick  # quick\n```\n"
    train, quick = read(text)
    assert (train.words, quick.words) == (
        ("train", "--gpus", "8"),
        ("scripts/test", "--quick"),
    )
    assert untested(quick) is None
    assert "run by no test" in str(untested(train))
    (marked,) = read("<!-- needs: gpu, network -->\n```sh\ntrain\n```\n")
    assert untested(marked) is None and marked.needs == {"gpu", "network"}
    (wrong,) = read("<!-- needs: luck -->\n```sh\ntrain\n```\n")
    assert "luck" in str(untested(wrong))


def test_what_is_no_command() -> None:
    text = "a\n\n    sglang_exact cannot run this:\n\n- b\n\n    c\n```json\n{}\n```\n"
    assert read(text) == []
    assert len(read("    scripts/demo <name to fill in> > out.txt\n")) == 1
    block = Block(Path("x"), 1, "sh", frozenset(), ("a 2>&1 | b > c",))
    assert [c.words for c in docs_reader.commands(block)] == [("a", "2"), ("b",)]


# Flags ------------------------------------------------------------------------------


@functools.cache
def help_of(*words: str) -> str:
    """What a program of ours says about itself; a test of its --help as well."""
    env = {**environment(), "COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
    done = warm.run([*words, "--help"], env=env, cwd=ROOT, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def program(command: Command) -> tuple[str, ...] | None:
    """The command line that prints the help of a command of ours, or None."""
    words = line(command).split()
    if words[0] == "sglang-exact":
        names = []
        for word in words[1:3]:
            if word.startswith("-") or (names and names[0] != "bench"):
                break
            names.append(word)
        return ("-m", "sglang_exact", *names)
    if words[0].startswith("scripts/"):
        text = (ROOT / words[0]).read_text(encoding="utf-8")
        if "bash" in text.splitlines()[0]:
            return None
        script = (words[0],)
        choices = re.search(r"\{([a-z,-]+)\}", help_of(*script))
        known = choices[1].split(",") if choices else []
        return (*script, *(word for word in words[1:2] if word in known))
    if words[:2] == ["python", "-m"] and words[2] in MODULES:
        return ("-W", "ignore", "-m", words[2])
    return None


def flags(command: Command) -> list[str]:
    return [w.partition("=")[0] for w in command.words if w.startswith("--")]


def unknown_flags(command: Command) -> list[str]:
    """Flags of a command of ours that it does not have."""
    where = program(command)
    if where is None:
        return []
    known = set(re.findall(r"--[a-z0-9][a-z0-9-]*", help_of(*where)))
    if "--" in command.words:
        # What follows are flags of a server.
        where, known = (MODULES[0],), {*known, "--"}
    if where[-1] in MODULES:
        known |= {"--exact", "--exact-check", "--exact-allow-unpinned-host"}
        known |= set(re.findall(r"--[a-z0-9][a-z0-9-]*", _host_help()))
    return [flag for flag in flags(command) if flag not in known]


def _host_help() -> str:
    return help_of("-W", "ignore", "-m", MODULES[1])


@pytest.mark.host
def test_every_flag_exists() -> None:
    wrong = {str(c): unknown_flags(c) for c in every() if program(c)}
    assert len(wrong) > 10
    assert {text: names for text, names in wrong.items() if names} == {}


@pytest.mark.host
def test_a_flag_that_does_not_exist_is_seen() -> None:
    text = (
        "```sh\nsglang-exact verify --base-url x --refrence y\n"
        "python -m sglang_exact.launch_server --exact-check --tp-sise 2\n"
        "scripts/pin_host --sight x\n```\n"
    )
    found = [unknown_flags(c) for c in read(text)]
    assert found == [["--refrence"], ["--tp-sise"], ["--sight"]]


# Run --------------------------------------------------------------------------------


def executed(words: tuple[str, ...], out: Path) -> list[str]:
    """The words as a command line of this checkout; nothing is written into it."""
    first, *rest = words
    if "--site" in rest:
        root = host.root()
        assert root is not None
        rest[rest.index("--site") + 1] = str(root.parent)
    if first == "scripts/pin_host" and "--write" in rest:
        rest += ["--out", str(out)]
    if "--device-run" in rest:
        rest[rest.index("--device-run") + 1] = "results/gpu"
    if first in ("scripts/docs_tables", "scripts/evidence"):
        rest = ["--check"]
    if first == "sglang-exact":
        return ["-m", "sglang_exact", *rest]
    return [str(ROOT / first), *rest]


def cheap() -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    seen = set()
    for command in every():
        start = begins(line(command), HERE)
        if start and command.words not in seen and "download" not in command.words:
            seen.add(command.words)
            yield command.words, HERE[start]


@pytest.mark.host
@pytest.mark.parametrize(
    ("words", "statuses"), list(cheap()), ids=lambda x: " ".join(map(str, x))
)
def test_cheap_commands_run(
    words: tuple[str, ...], statuses: tuple[int, ...], tmp_path: Path
) -> None:
    env = {**environment(), "COLUMNS": "200"}
    done = warm.run(executed(words, tmp_path), env=env, cwd=tmp_path, timeout=180)
    assert done.returncode in statuses, done.stdout + done.stderr
    assert done.stdout and "Traceback" not in done.stderr


def test_documented_verification_runs(tmp_path: Path) -> None:
    """verifying.md's first commands, against two servers that answer as one model."""
    sys.path.insert(0, str(ROOT / "tests" / "verify"))
    from fake_server import FakeServer

    asked = [
        c.words
        for c in every()
        if c.where.startswith("verifying.md")
        and c.words[1:2] in (("verify",), ("record",))
        and ("http://HOST:30000" in c.words)
    ][:3]
    assert [words[1] for words in asked] == ["verify", "record", "verify"]
    small = ["--arms", "speculation", "--num-prompts", "3", "--max-new-tokens", "16"]

    async def run(words: tuple[str, ...], plain: str, tested: str) -> tuple[int, str]:
        # The record is made of the plain server, everything else of the tested one.
        base = plain if words[1] == "record" else tested
        urls = {"http://HOST:30000": base, "http://HOST:30001": plain}
        line = [urls.get(word, word) for word in words[1:]]
        more = small[2:] if words[1] == "record" else small
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sglang_exact", *line, *more),
            env=environment(),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 120)
        return process.returncode or 0, out.decode()

    async def go() -> list[tuple[int, str]]:
        async with FakeServer(speculative=False) as plain, FakeServer() as tested:
            return [await run(words, plain.url, tested.url) for words in asked]

    for status, text in asyncio.run(go()):
        assert status == 0, text
    assert (tmp_path / "report.html").is_file() and (tmp_path / "plain.jsonl").is_file()


@pytest.mark.host
def test_documented_rehearsals_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of rehearsal.md up to the engine; one of them up to its check."""
    monkeypatch.setattr(rehearsal_launcher, "default_folder", lambda: tmp_path)
    start = f"python -m {MODULES[0]}"
    lines = [line(c) for c in every() if line(c).startswith(start)]
    assert len(lines) >= 3
    made = [
        rehearsal_launcher.command(text.removeprefix(start).split()) for text in lines
    ]
    assert all("--model-path" in words for words in made)
    assert any("sglang.launch_server" in words for words in made)
    (drafted, *_) = [words for words in made if "DFLASH" in words]
    asked = [*drafted[1:], "--exact-check"]
    done = warm.run(asked, env=environment(), cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this setup can be served exactly" in done.stdout


def quoted() -> list[tuple[tuple[str, ...], str]]:
    found = [q for path in docs_reader.documents() for q in docs_reader.refusals(path)]
    return list(dict.fromkeys(found))


@pytest.mark.host
@pytest.mark.parametrize(("asked", "text"), quoted(), ids=lambda x: str(x)[:40])
def test_quoted_refusals_are_what_is_printed(
    asked: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    flags = ["--model-path", "Qwen/Qwen3.8-27B", *asked, "--exact-check"]
    launcher = ["-W", "ignore", "-m", MODULES[1], *flags]
    done = warm.run(launcher, env=environment(), cwd=tmp_path, timeout=180)
    assert done.returncode == 3, done.stderr
    assert text in " ".join(done.stderr.split())


def test_some_refusal_is_quoted() -> None:
    assert any("--tp-size" in asked for asked, _ in quoted())


def test_doctor_as_json_in_any_folder(tmp_path: Path) -> None:
    doctor = ["-m", "sglang_exact", "doctor", "--json", "--no-gpu"]
    done = warm.run(doctor, env=environment(), cwd=tmp_path, timeout=120)
    assert {"ok", "checks"} <= set(json.loads(done.stdout))
