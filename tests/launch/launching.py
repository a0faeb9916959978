# SPDX-License-Identifier: Apache-2.0
"""Start the real launchers in a rehearsal environment and read what they refuse."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import warm

from sglang_exact.host import source as host
from sglang_exact.reasons import HEADLINE
from sglang_exact.rehearsal.environment import environment

LAUNCHER = ("-m", "sglang_exact.launch_server")
PLUGIN = ("-m", "sglang.launch_server")
SERVE = ("-c", "from sglang.cli.main import main; main()", "serve")
TIMEOUT_S = 400


class Outcome(NamedTuple):
    """How a launcher ended."""

    status: int
    output: str

    def reasons(self) -> list[str]:
        """The bullets of the one refusal, each complete; fails on anything else."""
        assert self.status not in (0, -9), self.output
        assert self.output.count(HEADLINE) == 1, self.output
        lines = self.output.split(HEADLINE)[1].rstrip().splitlines()[1:]
        found = [line for line in lines if line.startswith("  - ")]
        assert found, self.output
        assert lines == found, self.output
        for line in found:
            assert line.startswith("  - found "), line
            assert "; expected " in line, line
            assert "; fix: " in line, line
        assert "Load weight" not in self.output, self.output
        return found


def run(
    entry: Sequence[str],
    flags: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    path: Path | None = None,
    allow_plugins: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Outcome:
    """Run an entry of the host until it ends.

    `path` is searched before everything that is installed, and plugins in it are
    allowed by name; the overlay is on in every entry.
    """
    base = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    if path is not None:
        base["PYTHONPATH"] = str(path)
    variables = environment(base)
    if path is not None:
        # Ahead of the overlay's own folders, as an installed plugin could be.
        site, *rest = variables["PYTHONPATH"].split(os.pathsep)
        rest = [str(path), *(p for p in rest if p != str(path))]
        variables["PYTHONPATH"] = os.pathsep.join([site, *rest])
        # A checkout that was installed from holds metadata of its own: not first.
        variables["PYTHONSAFEPATH"] = "1"
        if allow_plugins:
            names = [info.name.split("-")[0] for info in path.glob("*.dist-info")]
            variables["SGLANG_EXACT_ALLOW_PLUGINS"] = ",".join(names)
    if entry is not LAUNCHER:
        variables["SGLANG_EXACT_ENABLE"] = "1"
    variables.update(env or {})
    words = [*entry, *flags]
    done = warm.run(words, env=variables, merged=True, timeout=timeout_s)
    return Outcome(done.returncode, done.stdout)


def at_start(folder: Path, code: str) -> Path:
    """Run `code` at the start of every Python process that has `folder` on its path."""
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    return folder


def other_plugin(folder: Path, name: str, code: str) -> Path:
    """Install a plugin of the host into `folder`; `code` defines `register()`."""
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{name} = {name}:register\n"
    )
    return folder


def altered_host(folder: Path, module: str, changes: Mapping[str, str]) -> Path:
    """A host in `folder` that differs from the installed one in one module.

    Everything but the module's file is a link to the installed host.
    """
    root = host.root()
    assert root is not None
    *parents, leaf = module.split(".")[1:]
    here, there = folder / "sglang", root
    for name in [*parents, f"{leaf}.py"]:
        here.mkdir()
        for entry in there.iterdir():
            if entry.name not in (name, "__pycache__"):
                (here / entry.name).symlink_to(entry)
        here, there = here / name, there / name
    text = there.read_text()
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    here.write_text(text)
    return folder


def write_config(folder: Path, base: Path, **changes: object) -> Path:
    """A model folder that holds nothing but the config of `base`, changed."""
    config = json.loads((base / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def flags(model: Path, *more: str) -> list[str]:
    """Flags for a server of `model` on the CPU."""
    return [
        "--model-path", str(model), "--device", "cpu", "--skip-tokenizer-init",
        "--attention-backend", "triton", "--mem-fraction-static", "0.3",
        "--max-total-tokens", "8192", "--disable-overlap-schedule",
        "--skip-server-warmup", "--port", "0", *more,
    ]  # fmt: skip
