# SPDX-License-Identifier: Apache-2.0
"""A server with one hook off is never verified, whichever hook it is.

CPU, interpreted kernels, random weights, acceptance set by the oracle: that the tool
sees it, not that a GPU would show the same difference.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from hook_controls import (
    CONTROLS,
    COULD_NOT_RUN,
    DIVERGED,
    GPU,
    PROMPTS,
    REFUSED,
    STOPS,
    TOKENS,
    Control,
    stop_prompts,
)
from verify_runs import inputs, reasons, silent, states

from sglang_exact.client.answer import ServerInfo
from sglang_exact.client.facts import hooks_off
from sglang_exact.verify import session, summary
from sglang_exact.verify.evidence_row import evidence_row

DISABLE = "SGLANG_EXACT_TEST_DISABLE_HOOKS"
SHOWN = [n for n, c in CONTROLS.items() if c.ends in (DIVERGED, COULD_NOT_RUN)]
TEXT_STARTED_S = 240.0


def test_every_hook_has_a_control() -> None:
    hooks = pytest.importorskip("sglang_exact.hooks")
    assert set(CONTROLS) == {hook.name for hook in hooks.ALL}
    assert {n for n, c in CONTROLS.items() if c.ends == REFUSED} == set(hooks.ALWAYS_ON)
    for name, control in CONTROLS.items():
        assert control.ends == DIVERGED or control.why, name
        assert control.ends != GPU or control.gpu, name


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_attestation_names_the_hook_that_is_off(name: str) -> None:
    exact = {"numerics": "bitwise", "test_settings": {"disabled_hooks": [name]}}
    info = ServerInfo("tested", "http://h", {}, exact, 512, "x")
    assert f"hooks are off ({name})" in str(hooks_off(info))
    fine = {"numerics": "bitwise", "test_settings": {"oracle": True}}
    assert hooks_off(info._replace(exact=fine)) is None


def test_attestation_names_deep_gemm_that_is_not_deterministic() -> None:
    tests: dict[str, object] = {"deep_gemm_default": True}
    exact = {"numerics": "bitwise", "test_settings": tests}
    info = ServerInfo("tested", "http://h", {}, exact, 512, "x")
    said = "DeepGEMM's deterministic algorithms are off"
    assert said in str(hooks_off(info))
    # Beside a hook that is off, both are named.
    tests["disabled_hooks"] = ["stop"]
    assert said in str(hooks_off(info)) and "(stop)" in str(hooks_off(info))
    tests["deep_gemm_default"] = False
    assert said not in str(hooks_off(info)) and "(stop)" in str(hooks_off(info))


@pytest.mark.parametrize("where", ["tested", "reference", "record", "nowhere"])
def test_server_with_a_hook_off_is_never_verified(tmp_path: Path, where: str) -> None:
    """Equal answers do not help, and neither does which of the servers says it."""
    off = {"numerics": "bitwise", "test_settings": {"disabled_hooks": ["gdn_verify"]}}
    fine = {"numerics": "bitwise", "test_settings": {"oracle": True}}

    async def go() -> summary.Run:
        of_plain = off if where in ("reference", "record") else fine
        plain = FakeServer(speculative=False, exact=of_plain)
        tested = FakeServer(exact=off if where == "tested" else fine)
        async with plain, tested:
            given = inputs(tested, plain, tmp_path)
            if where == "record":
                alone = inputs(plain, plain, tmp_path)
                alone = alone._replace(output=tmp_path / "plain.jsonl")
                assert await session.record_reference(alone, silent) == []
                file = tmp_path / "plain.jsonl"
                given = inputs(tested, None, tmp_path, reference_file=file)
            return await session.verify(given, silent)

    run = asyncio.run(go())
    if where == "nowhere":
        assert summary.verdict(run) == "verified", reasons(run)
        return
    assert states(run) == {"speculation": "not exercised"}
    assert "hooks are off (gdn_verify)" in reasons(run)
    assert summary.EXIT[summary.verdict(run)] == 2
    assert summary.total_bound(run) is None
    assert evidence_row(run)["complete"] is False


@pytest.mark.parametrize("name", [n for n, c in CONTROLS.items() if c.ends == REFUSED])
def test_indispensable_hook_cannot_be_switched_off(name: str) -> None:
    hooks = pytest.importorskip("sglang_exact.hooks")
    exact_settings = pytest.importorskip("sglang_exact.settings")
    config, _ = exact_settings.read({DISABLE: name, "SGLANG_EXACT_ENABLE": "1"})
    assert [r.found for r in hooks.name_reasons(config)] == [
        f"{DISABLE} names {name!r}"
    ]


@pytest.mark.host
def test_reasons_of_what_a_cpu_cannot_show() -> None:
    """Graphs are off, one rank serves, and no tile cuts a head."""
    from sglang_exact.hooks import autotune
    from sglang_exact.hooks.base import of
    from sglang_exact.hooks.in_force import resolve
    from sglang_exact.rehearsal import models
    from sglang_exact.rehearsal.server import CPU_FLAGS

    place = CPU_FLAGS.index("--cuda-graph-backend-decode")
    assert CPU_FLAGS[place + 1] == "disabled"
    assert "--tp-size" not in CPU_FLAGS
    tuner = autotune._autotuner(resolve(of(autotune)[0].target))
    smallest = min(config.kwargs["BK"] for config in tuner.configs)
    assert models._TINY["linear_key_head_dim"] <= smallest


class Plain:
    """The record of a plain server, made once for all hooks, and its prompts."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models = folder, models
        self.record = folder / "plain.jsonl"
        self.prompts = dict(PROMPTS)
        self.seen: dict[frozenset[str], tuple[int, dict[str, Any]]] = {}
        with _server(models, Control(DIVERGED, drafter=None, server="text")) as server:
            first = self._recorded(server.url, "first.jsonl", ["greedy-b"], 10)
            answer = next(iter(first.values()))
            assert len(set(answer[:9])) == 9, "the stops need distinct tokens"
            self.prompts |= stop_prompts(answer)
            self.answers = self._recorded(
                server.url, "plain.jsonl", list(self.prompts), TOKENS
            )
        # The oracle knows one answer to each prompt: without the stops.
        self.answers["stop"] = answer

    def write(self, names: list[str], tokens: int) -> Path:
        path = self.folder / "prompts.jsonl"
        rows = [{"id": n, "max_new_tokens": tokens, **self.prompts[n]} for n in names]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def _recorded(
        self, url: str, name: str, names: list[str], tokens: int
    ) -> dict[str, list[int]]:
        done = command(
            *("record", "--base-url", url, "--output-file", name),
            *("--prompts", str(self.write(names, tokens)), "--arms", "speculation"),
            cwd=self.folder,
        )
        assert done.returncode == 0, done.stderr
        lines = (self.folder / name).read_text().splitlines()
        found = [r for r in map(json.loads, lines) if r["kind"] == "reference"]
        return {row["prompt"]: row["answer"]["ids"] for row in found}

    def oracle(self, rate: float) -> Path:
        from sglang_exact.hooks.testing.oracle import write_plan

        known = [
            (self.prompts[n]["input_ids"], a)
            for n, a in self.answers.items()
            if n not in ("stop", "greedy-b", *STOPS)
        ]
        known.append((self.prompts["greedy-b"]["input_ids"], self.answers["stop"]))
        write_plan(self.folder / "oracle.json", rate, known)
        return self.folder / "oracle.json"


def _server(models: Path, control: Control, env: Any = None) -> Any:
    from sglang_exact.rehearsal.server import Server, draft_flags

    class Tested(Server):
        def command(self) -> list[str]:
            gone = {"text": "--skip-tokenizer-init"}.get(control.server)
            if control.server == "overlap":
                gone = "--disable-overlap-schedule"
            return [word for word in super().command() if word != gone]

    flags = list(control.flags)
    if control.drafter:
        flags += draft_flags(control.drafter, models / control.drafter)
    return Tested(
        models / "target", flags=flags, env=env, start_timeout_s=TEXT_STARTED_S
    )


@pytest.fixture(scope="module")
def text_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, drafts, and the same target with other weights."""
    from sglang_exact.rehearsal import models, tokenizer

    folder = tmp_path_factory.mktemp("text-models")
    tokenizer.make_tokenizer(models.make_target(folder / "target"))
    models.make_target(folder / "other", seed=1)
    for kind in models.DRAFT_KINDS:
        models.make_draft(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, text_models: Path) -> Plain:
    return Plain(tmp_path_factory.mktemp("hooks"), text_models)


def command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `sglang-exact` as a user does."""
    with start(*args, cwd=cwd) as process:
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(args, process.returncode, out, err)


def start(*args: str, cwd: Path) -> subprocess.Popen[str]:
    main = "from sglang_exact.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", main, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )


def _meanwhile(what: str, server: Any, models: Path, asking: Any) -> None:
    """What an operator does while the long answer is generated for `asking`."""
    if not what:
        return
    client = server.client
    while not _running(client) and asking.poll() is None:
        time.sleep(0.1)
    time.sleep(3)
    if what == "retract":
        client.request("/pause_generation", {"mode": "retract"})
    elif what == "reset":
        client.request("/weights_checker", {"action": "reset_tensors"})
        return
    else:
        client.request("/pause_generation", {"mode": "in_place"})
        other = {"model_path": str(models / "other"), "flush_cache": False}
        client.request("/update_weights_from_disk", other)
    client.request("/continue_generation", {})


def _running(client: Any) -> bool:
    found = client.request("/v1/loads")
    return any(row["num_running_reqs"] for row in found["loads"])


def verify_with_hook_off(
    plain: Plain, name: str, control: Control
) -> tuple[int, dict[str, Any]]:
    from sglang_exact.hooks.testing.oracle import VARIABLE

    off = ",".join((name, *control.also))
    env = {DISABLE: off}
    if control.drafter:
        env[VARIABLE] = str(plain.oracle(control.rate))
    prompts = plain.write(list(control.prompts), TOKENS)
    with _server(plain.models, control, env) as server:
        process = start(
            *("verify", "--base-url", server.url, "--reference", str(plain.record)),
            *("--prompts", str(prompts), "--arms", control.arms),
            *("--json", f"{name}.json", "--output-file", f"{name}.jsonl"),
            *("--reconnect-timeout", "2", *control.options),
            cwd=plain.folder,
        )
        with process:
            _meanwhile(control.meanwhile, server, plain.models, process)
            _, err = process.communicate(timeout=600)
    assert "Traceback" not in err
    found = json.loads((plain.folder / f"{name}.json").read_text())
    return process.returncode, found


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_hook_off_on_the_engine(plain: Plain, name: str) -> None:
    control = CONTROLS[name]
    # Two locks on one door are off together, whichever is asked for: run once.
    off = frozenset((name, *control.also))
    if off not in plain.seen:
        plain.seen[off] = verify_with_hook_off(plain, name, control)
    status, found = plain.seen[off]
    shown = json.dumps(found["arms"], indent=1)
    assert found["arms"][0]["state"] == control.ends, shown
    assert status == (1 if control.ends == DIVERGED else 2), shown
    tested = found["provenance"]["servers"][0]
    attested = tested["exact"]["test_settings"]["disabled_hooks"]
    assert set(attested) == off
