# SPDX-License-Identifier: Apache-2.0
"""Servers that are not started by a launcher: child processes, engines, benchmarks.

The exact answers of these ways are compared in tests/e2e (`test_endpoints.py` serves
from a child process, `test_exactness.py` has the engine in its own process); here is
what each of them refuses, before weights load.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import LAUNCHER, SERVE, at_start, flags, run

from sglang_exact.host import source as host

pytestmark = pytest.mark.host

CHILD = (str(Path(__file__).with_name("child_server.py")),)
THROUGHPUT = ("-m", "sglang.benchmark.offline_throughput")


def test_child_process_refuses_as_a_launcher_does(tiny_models: Path) -> None:
    outcome = run(CHILD, flags(tiny_models / "target", "--enable-mixed-chunk"))
    assert "found --enable-mixed-chunk True" in "\n".join(outcome.reasons())
    assert outcome.status == 3
    assert "Traceback" not in outcome.output, outcome.output


def test_rank_whose_server_process_has_no_hooks(
    tmp_path: Path, tiny_models: Path
) -> None:
    """The child takes the hooks of a rank alone: its ranks do not serve for it."""
    at_start(
        tmp_path,
        """
        from sglang_exact import roles
        roles.current = lambda: ("scheduler",)
        """,
    )
    exact = ("--enable-deterministic-inference", "--mamba-ssm-dtype", "float32",
             "--disable-radix-cache", "--disable-prefill-cuda-graph")  # fmt: skip
    outcome = run(CHILD, flags(tiny_models / "target", *exact), path=tmp_path)
    assert outcome.status != 0, outcome.output
    assert "which carries no hooks of the HTTP server" in outcome.output
    assert "Load weight" not in outcome.output, outcome.output


def test_engine_that_resolved_before_it_loaded_plugins(
    tmp_path: Path, tiny_models: Path
) -> None:
    """The host's offline benchmark; nothing was filled in, so every flag is named."""
    # A package that the benchmark imports for prompts, and a rehearsal does without.
    (tmp_path / "datasets.py").write_text("load_dataset = None\n")
    asked = flags(tiny_models / "target", "--num-prompts", "1")
    outcome = run(THROUGHPUT, asked, path=tmp_path)
    text = "\n".join(outcome.reasons())
    assert outcome.status == 3
    assert "--enable-deterministic-inference" in text
    assert "Traceback" not in outcome.output, outcome.output


@pytest.mark.parametrize("entry", [LAUNCHER, SERVE], ids=["launcher", "plugin"])
def test_flags_from_a_file(
    tmp_path: Path, tiny_models: Path, entry: tuple[str, ...]
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("enable-mixed-chunk: true\nmax-running-requests: 4\n")
    outcome = run(entry, flags(tiny_models / "target", "--config", str(file)))
    assert "found --enable-mixed-chunk True" in "\n".join(outcome.reasons())
    assert outcome.status == 3


WAYS = {
    "benchmark/offline_throughput.py": "an engine, or a server in a child process",
    "benchmark/one_batch.py": "no server: the model without plugins",
    "benchmark/one_batch_server.py": "a server in a child process",
    "cli/main.py": "loads plugins",
    "compile_deep_gemm.py": "a server in a child process",
    "launch_server.py": "loads plugins",
}
"""Programs of the host that take the arguments of a server, and what they start."""


def test_every_program_of_the_host_is_known() -> None:
    """A new one is looked at before a release serves it."""
    root = host.root()
    assert root is not None
    program = re.compile(r"ServerArgs\.from_cli_args|prepare_server_args\(|cli\.serve ")
    found = set()
    for file in root.rglob("*.py"):
        name = str(file.relative_to(root))
        if name.startswith(("test/", "multimodal_gen/", "srt/")):
            continue
        text = file.read_text(encoding="utf-8")
        if program.search(text) and re.search(r"__main__|def main\(", text):
            found.add(name)
    assert found == set(WAYS)
    one_batch = (root / "benchmark" / "one_batch.py").read_text(encoding="utf-8")
    assert "load_plugins" not in one_batch
