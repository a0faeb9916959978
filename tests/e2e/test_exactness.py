# SPDX-License-Identifier: Apache-2.0
"""Speculation against plain decoding on the real engine; each hook off must show.

On the CPU the kernels are interpreted: this proves state commits, indexing and that
every hook is wired, not the rounding of a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from traffic import small_models

from sglang_exact.client.bits import float32_bits
from sglang_exact.client.blocking import Completion
from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal.drafters import DRAFT_KINDS
from sglang_exact.rehearsal.environment import environment
from tools.proof.arms import Arm
from tools.proof.passes import Pass, Result, Setup, make_prompts, run_arm

pytestmark = [pytest.mark.host, pytest.mark.e2e]

ENGINE = Path(__file__).parents[1] / "launch" / "engine_in_process.py"
SHORT = (0, 1)
# Longer than one KV tile of 256: below it decode and verify attention agree anyway.
LONG = (2,)
RATE = 0.7
TOKENS = 4


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """One layer of each kind, all heads; test_tensor_parallel.py has more layers."""
    folder = small_models(tmp_path_factory.mktemp("exactness-models"), heads={})
    return Setup(
        target=folder / "target",
        drafts={kind: folder / kind for kind in DRAFT_KINDS},
        prompts=make_prompts((9, 14, 259), 512),
        new_tokens=10,
        work=tmp_path_factory.mktemp("arms"),
    )


@pytest.fixture(scope="module")
def reference(setup: Setup) -> list[Completion]:
    """Plain decoding under the overlay, recorded once."""
    found = run_arm(Arm("plain", "plain", phases=(Pass("plain"),)), setup, None, print)
    answers = found.answers[0]
    assert all(len(c.ids) == len(c.logprobs) == setup.new_tokens for c in answers)
    # A model that repeats one token, or is always certain, would prove nothing.
    assert all(len(set(c.ids)) > 2 and len(set(c.logprobs)) > 2 for c in answers)
    return answers


def attested(found: Result, *, oracle: bool = True) -> dict[str, object]:
    """The attestation of a rehearsal: never `bitwise`, test settings in the open."""
    record = found.attestation
    assert record is not None
    assert record["numerics"] == "unverified"
    assert record["test_settings"]["rehearsal"] is True
    assert record["test_settings"].get("oracle", False) is oracle
    assert record["host_pinned"] is True
    return record


def show(found: Result) -> str:
    return "\n".join(str(row.record()) for row in found.rows)


def test_dflash(setup: Setup, reference: list[Completion]) -> None:
    """Oracle drafts, all of them wrong, and without logprobs, on one server."""
    steps = (
        Pass("oracle", RATE),
        Pass("all rejected", 0.0, prompts=SHORT),
        Pass("all accepted", 1.0, prompts=SHORT),
        Pass("without logprobs", RATE, logprobs=False, prompts=SHORT),
    )
    found = run_arm(
        Arm("dflash", "DFLASH", "dflash", TOKENS, phases=steps), setup, reference, print
    )
    assert all(row.as_promised for row in found.rows), show(found)
    assert "gdn_verify" in attested(found)["hooks"]


@pytest.mark.parametrize("drafter", [k for k in DRAFT_KINDS if k != "dflash"])
def test_other_drafters(
    setup: Setup, reference: list[Completion], drafter: str
) -> None:
    """Grouped convolution with a selector, the EAGLE worker, and DSpark's chain."""
    steps = (Pass("oracle", RATE, prompts=SHORT),)
    found = run_arm(
        Arm(drafter, drafter, drafter, TOKENS, phases=steps), setup, reference, print
    )
    assert all(row.as_promised for row in found.rows), show(found)


def test_ngram_through_the_plugin_alone(
    setup: Setup, reference: list[Completion]
) -> None:
    """Another verify path of the host, started by the host's own launcher."""
    steps = (Pass("oracle", RATE, prompts=SHORT),)
    arm = Arm("ngram", "NGRAM", "ngram", TOKENS, mode="plugin", phases=steps)
    found = run_arm(arm, setup, reference, print)
    assert all(row.as_promised for row in found.rows), show(found)
    attested(found)


def test_engine_in_a_program(setup: Setup, reference: list[Completion]) -> None:
    """sglang.Engine without HTTP: the same bits, the same refusals, and it attests."""
    plan = setup.work / "oracle-engine.json"
    known = [(p, c.ids) for p, c in zip(setup.prompts, reference, strict=True)]
    oracle.write_plan(plan, RATE, known)
    asked = {
        "arguments": {
            "model_path": str(setup.target), "device": "cpu", "sleep_on_idle": True,
            "attention_backend": "triton", "mem_fraction_static": 0.3,
            "max_total_tokens": 8192, "max_running_requests": 8,
            "disable_overlap_schedule": True, "skip_tokenizer_init": True,
            "disable_radix_cache": True,
            "cuda_graph_backend_decode": "disabled",
            "speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 4,
            "speculative_draft_model_path": str(setup.drafts["dflash"]),
            "speculative_draft_load_format": "dummy",
            "speculative_draft_attention_backend": "triton",
        },
        "prompts": [setup.prompts[i] for i in SHORT],
        "max_new_tokens": setup.new_tokens,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(ENGINE), json.dumps(asked)],
        env=environment() | {"SGLANG_EXACT_ENABLE": "1", oracle.VARIABLE: str(plan)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for answer, i in zip(found["answers"], SHORT, strict=True):
        meta = answer["meta_info"]
        assert tuple(answer["output_ids"]) == reference[i].ids
        rows = meta["output_token_logprobs"]
        assert tuple(float32_bits(row[0]) for row in rows) == reference[i].logprobs
        assert 0 < meta["spec_verify_ct"] < setup.new_tokens
    assert "return_hidden_states" in found["refused"]
    record = found["attestation"]
    assert record["http"]["roles"] == ["main"]
    assert record["test_settings"] == {"rehearsal": True, "oracle": True}


@pytest.mark.parametrize(
    ("hook", "prompts"), [("gdn_verify", SHORT), ("attention_verify", LONG)]
)
def test_each_hook_is_needed(
    setup: Setup, reference: list[Completion], hook: str, prompts: tuple[int, ...]
) -> None:
    """Without the hook the same comparison fails; the attestation says what is off."""
    steps = (Pass("hook off", RATE, prompts=prompts, equal=False),)
    arm = Arm(f"no-{hook}", hook, "dflash", TOKENS, disable=hook, phases=steps)
    found = run_arm(arm, setup, reference, print)
    assert all(row.as_promised for row in found.rows), show(found)
    record = attested(found)
    assert record["test_settings"]["disabled_hooks"] == [hook]
    assert hook not in record["hooks"]


def test_stock_differs(setup: Setup, reference: list[Completion]) -> None:
    """The host's own deterministic mode, with the same drafts."""
    steps = (Pass("stock", RATE, prompts=SHORT, equal=False),)
    arm = Arm("stock", "stock", "dflash", TOKENS, mode="stock", phases=steps)
    found = run_arm(arm, setup, reference, print)
    assert all(row.as_promised for row in found.rows), show(found)
    assert found.attestation is None
