# SPDX-License-Identifier: Apache-2.0
"""The rows of the families: each is whole, and whoever asks reads it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_exact import hooks, scope, scope_families, scope_model, selftest
from sglang_exact.hooks import prefill_grid
from sglang_exact.rehearsal import models
from sglang_exact.scope_families import FAMILIES, Family

OTHER = Family(
    "other",
    "dense models",
    ("OtherForCausalLM",),
    ("other",),
    {"host.other": "Layer"},
    (),
)
"""A family without GDN layers, which no host has."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_row_is_whole(family: Family, tmp_path: Path) -> None:
    """Its tiny model is let in as one of it; what it names is there."""
    pytest.importorskip("torch")
    made = models.make_target(tmp_path, family=family.name)
    config = json.loads((made / "config.json").read_text())
    assert scope_families.find(config["architectures"]) is family
    assert scope_model.model_reasons(config, "bfloat16") == []
    assert set(family.self_tests) <= {hook.name for hook in hooks.ALL}
    assert set(family.fills) <= set(scope.FILLS)
    assert all(f.value in scope.ALLOWED[f.field] for f in family.fills)
    classes = " ".join(family.modules.values()).split()
    assert set(family.architectures) <= set(classes)
    assert not set(family.modules) & set(scope_families.COMMON)


def test_one_tiny_model_and_one_row_each() -> None:
    assert list(models.TARGETS) == [family.name for family in FAMILIES]
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_drafters_and_cached_prefixes_are_those_that_were_compared(
    family: Family,
) -> None:
    config = {"architectures": list(family.architectures)}
    for algorithm in (None, *scope.CHAIN_ALGORITHMS):
        cfg = SimpleNamespace(speculative_algorithm=algorithm, disable_radix_cache=True)
        reasons = scope_model.family_reasons(cfg, config)
        served = algorithm is None or algorithm in family.drafters
        assert served is not bool(reasons)
        assert all(family.title in reason.found for reason in reasons)
    cached = SimpleNamespace(speculative_algorithm=None, disable_radix_cache=False)
    assert family.prefix_cache is not bool(scope_model.family_reasons(cached, config))
    # A checkpoint that is here is known before the arguments are resolved.
    scope_model.fill_family(cached, config)
    assert cached.disable_radix_cache is not family.prefix_cache
    assert scope_model.family_reasons(cached, config) == []
    assert set(family.drafters) <= set(scope.CHAIN_ALGORITHMS)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_second_kernel_for_few_rows_is_seen(family: Family) -> None:
    """The host's gate, up and activation in one, which it has for one kind of GPU."""
    torch = pytest.importorskip("torch")
    model = type(family.architectures[0], (torch.nn.Module,), {})()
    model.mlp = torch.nn.Identity()
    for mode, said in ((None, False), (4, True)):
        model.mlp.dual_gemm = SimpleNamespace(mode=mode)
        reasons = scope_model.live_reasons(model, torch.bfloat16)
        assert any("16 rows" in reason.found for reason in reasons) is said


def test_a_model_of_no_family_is_not_guessed() -> None:
    assert scope_families.find(["OtherForCausalLM"]) is None
    with pytest.raises(LookupError, match="OtherForCausalLM"):
        scope_families.of(SimpleNamespace(architectures=["OtherForCausalLM"]))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope_families, "FAMILIES", (*FAMILIES, OTHER))


@pytest.mark.usefixtures("two")
def test_a_text_model_of_another_family_is_refused() -> None:
    """The types of one family do not open the others."""
    mixed = {"architectures": ["OtherForCausalLM"], "model_type": "qwen3_5_text"}
    (reason,) = scope_model.model_reasons(mixed, "bfloat16")
    assert (reason.found, reason.expected) == (
        "a text model of type qwen3_5_text",
        "other (no experts)",
    )
    unknown = {"architectures": ["Third"], "model_type": "other"}
    (reason,) = scope_model.model_reasons(unknown, "bfloat16")
    assert "Qwen3_5ForConditionalGeneration (dense GDN hybrids), " in reason.expected
    assert reason.expected.endswith(", OtherForCausalLM (dense models)")


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("of", [*FAMILIES, OTHER], ids=lambda family: family.name)
def test_modules_are_those_of_its_family(of: Family) -> None:
    torch = pytest.importorskip("torch")

    def module(folder: str, kind: str) -> Any:
        return type(kind, (torch.nn.Module,), {"__module__": folder})()

    model = module("host", of.architectures[0])
    model.layer = module("host.other", "Layer")
    reasons = scope_model.live_reasons(model, torch.bfloat16)
    said = any("host.other.Layer" in reason.found for reason in reasons)
    assert said is (of is not OTHER)


def served(monkeypatch: pytest.MonkeyPatch, architecture: str) -> Any:
    """A stand-in for the host's model configuration, of this process and a runner."""
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    module = ModuleType("sglang.srt.runtime_context")
    vars(module)["process_model_config"] = lambda: config
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return config


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("architecture", "grid"), [("Qwen3_5ForCausalLM", 64), ("OtherForCausalLM", 1)]
)
def test_the_grid_is_that_of_the_family(
    monkeypatch: pytest.MonkeyPatch, architecture: str, grid: int
) -> None:
    served(monkeypatch, architecture)
    assert prefill_grid.mamba_prefill_chunk_grid() == grid


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("architecture", "run"),
    [("Qwen3_5ForCausalLM", ["gdn"]), ("OtherForCausalLM", [])],
)
def test_self_tests_are_those_of_the_family(
    monkeypatch: pytest.MonkeyPatch, architecture: str, run: list[str]
) -> None:
    """Without a GPU: the comparisons themselves are left out."""
    pytest.importorskip("torch")
    from sglang_exact.selftest import gdn

    asked = []
    monkeypatch.setattr(gdn, "run", lambda runner: asked.append("gdn") or [])
    monkeypatch.setattr(selftest, "_linear", lambda runner: [])
    monkeypatch.setattr(selftest, "_report", {})
    runner = SimpleNamespace(
        device="cuda", model_config=served(monkeypatch, architecture)
    )
    assert selftest.run(runner, {"gdn_verify"}, 0).reasons == []
    assert asked == run
