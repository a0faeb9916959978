# SPDX-License-Identifier: Apache-2.0
"""What is supported, as reasons: arguments, model, environment, GPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_exact import scope, scope_arguments
from sglang_exact.host import VERSION


def resolved(**changes: object) -> Any:
    """Resolved arguments in which everything is as supported, but for `changes`."""
    tables = scope.ALLOWED | scope.ALLOWED_SPECULATIVE
    fields = {name: allowed[0] for name, allowed in tables.items()}
    fields |= {
        "speculative_algorithm": None,
        "speculative_num_draft_tokens": None,
        **scope.NGRAM_LEAST,
        "disable_custom_all_reduce": True,
    }
    return SimpleNamespace(**(fields | changes))


def found(reasons: list[Any]) -> list[str]:
    return [reason.found for reason in reasons]


def test_supported_arguments_have_no_reasons() -> None:
    assert scope.argument_reasons(resolved()) == []
    for algorithm in scope.CHAIN_ALGORITHMS:
        cfg = resolved(speculative_algorithm=algorithm, speculative_num_draft_tokens=8)
        assert scope.argument_reasons(cfg) == []


@pytest.mark.parametrize("field", sorted(scope.ALLOWED))
def test_every_listed_argument_is_looked_at(field: str) -> None:
    """Each line of the table refuses a value that is not in it."""
    cfg = resolved(**{field: "something else"})
    flag = scope._flag(field)
    assert found(scope.argument_reasons(cfg)) == [f"{flag} something else"]


@pytest.mark.parametrize("field", sorted(scope.ALLOWED_SPECULATIVE))
def test_speculative_arguments_count_only_with_a_drafter(field: str) -> None:
    assert scope.argument_reasons(resolved(**{field: "something else"})) == []
    cfg = resolved(
        speculative_algorithm="DFLASH",
        speculative_num_draft_tokens=4,
        **{field: "something else"},
    )
    assert len(scope.argument_reasons(cfg)) == 1


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "FROZEN_KV_MTP"])
def test_other_drafters_are_refused(algorithm: str) -> None:
    cfg = resolved(speculative_algorithm=algorithm, speculative_num_draft_tokens=4)
    assert found(scope.argument_reasons(cfg))[0].endswith(algorithm)


@pytest.mark.parametrize("tokens", [0, 17, None])
def test_draft_tokens_out_of_range(tokens: int | None) -> None:
    cfg = resolved(speculative_algorithm="DFLASH", speculative_num_draft_tokens=tokens)
    assert len(scope.argument_reasons(cfg)) == 1


def test_draft_trees_are_refused() -> None:
    cfg = resolved(
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=8,
        speculative_ngram_max_bfs_breadth=10,
    )
    assert any("draft tree" in x for x in found(scope.argument_reasons(cfg)))
    tree = resolved(
        speculative_algorithm="EAGLE",
        speculative_num_draft_tokens=8,
        speculative_eagle_topk=4,
    )
    assert found(scope.argument_reasons(tree)) == ["--speculative-eagle-topk 4"]


def test_true_is_not_one() -> None:
    """Python says True == 1; --tp-size True must not pass as 1."""
    assert len(scope.argument_reasons(resolved(tp_size=True))) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_and_two_ranks_are_served(ranks: int) -> None:
    """At one rank there is no all-reduce to look at."""
    assert scope.argument_reasons(resolved(tp_size=ranks)) == []
    own = resolved(tp_size=ranks, disable_custom_all_reduce=False)
    assert len(scope.argument_reasons(own)) == ranks - 1


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_more_ranks_are_refused_with_the_reason(ranks: int) -> None:
    (reason,) = scope.argument_reasons(resolved(tp_size=ranks))
    assert reason.found == f"--tp-size {ranks}"
    assert reason.expected.startswith("1 or 2 (two ranks add two numbers; ")
    assert "may change with the size of its message" in reason.expected
    assert reason.fix == "drop --tp-size or set it to 1 or 2"


@pytest.mark.parametrize(
    "change",
    [
        {"pp_size": 2},
        {"dp_size": 2},
        {"ep_size": 2},
        {"attn_dp_size": 2},
        {"enable_dp_attention": True},
        {"attn_cp_size": 2},
        {"dcp_size": 2},
        {"enable_prefill_cp": True},
        {"nnodes": 2},
        {"flashinfer_allreduce_fusion_backend": "trtllm"},
        {"enable_mscclpp": True},
        {"enable_torch_symm_mem": True},
        {"enable_nccl_nvls": True},
    ],
)
def test_other_layouts_and_all_reduces_are_refused(change: dict[str, object]) -> None:
    """Each with a word on why, also beside two ranks."""
    (reason,) = scope.argument_reasons(resolved(tp_size=2, **change))
    (field,) = change
    assert reason.expected.endswith(f"({scope.WHY[field]})")


def test_ranks_on_unequal_gpus_are_refused() -> None:
    assert scope.gpu_mix_reasons(["H", "H"]) == scope.gpu_mix_reasons([]) == []
    (reason,) = scope.gpu_mix_reasons(["H", "B"])
    assert reason.found == "ranks on different GPUs: H, B"


def test_only_the_given_arguments_count_before_resolution() -> None:
    cfg = resolved(tp_size=4, pp_size=2)
    assert found(scope.argument_reasons(cfg, only={"pp_size"})) == ["--pp-size 2"]


@pytest.mark.parametrize(
    ("rehearsal", "device", "good"),
    [(True, "cuda", False), (True, "cuda:1", False), (True, "cpu", True)],
)
def test_rehearsal_on_a_gpu(rehearsal: bool, device: str, good: bool) -> None:
    """It would skip the checks of the GPU; a GPU without it is not concerned."""
    assert (scope.rehearsal_reasons(rehearsal, device) == []) is good
    assert scope.rehearsal_reasons(False, device) == []


def test_gpu() -> None:
    for capability in scope.GPU_ARCHS:
        assert scope.gpu_reasons(capability) == []
    assert found(scope.gpu_reasons((8, 0))) == ["sm80"]
    assert found(scope.gpu_reasons((10, 0))) == ["sm100"]
    assert found(scope.gpu_reasons(None)) == ["no CUDA GPU"]


MATCH_TYPE = "speculative_ngram_match_type"


def test_every_setting_of_ngram_is_settled() -> None:
    """Each one of the host is in a table: served, filled in or refused."""
    path = Path(scope.__file__).parent / "host" / "pins" / f"sglang-{VERSION}.json"
    settings = set(re.findall(r"speculative_ngram_\w+", path.read_text()))
    settled = {name for name in scope.ALLOWED_SPECULATIVE if "ngram" in name}
    assert len(settings) == 8
    assert settings == settled | set(scope.NGRAM_LEAST) | {MATCH_TYPE}
    # Either choice of the host's parser gives a path of the trie.
    assert MATCH_TYPE in scope_arguments.HARMLESS


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"speculative_ngram_max_trie_depth": 1}, "--speculative-ngram-max-trie-depth"),
        ({"speculative_ngram_capacity": 2}, "--speculative-ngram-capacity"),
        ({"speculative_ngram_max_bfs_breadth": 0}, "-breadth 0 (a draft tree)"),
        (
            {"speculative_ngram_max_trie_depth": 18, "speculative_ngram_capacity": 18},
            "--speculative-ngram-capacity 18",
        ),
    ],
)
def test_sizes_of_the_trie(change: dict[str, object], flag: str) -> None:
    """Below these the host raises after weights load, or in a thread of its own."""
    cfg = resolved(
        speculative_algorithm="NGRAM", speculative_num_draft_tokens=4, **change
    )
    assert [flag in x for x in found(scope.argument_reasons(cfg))] == [True]
    cfg.speculative_algorithm = "DFLASH"
    assert scope.argument_reasons(cfg) == []
