# SPDX-License-Identifier: Apache-2.0
"""A rank refuses a set-up that no launching process looked at."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_exact import gate, roles, scope, scope_model, selftest
from sglang_exact.hooks import launch, rank, small_m_gemm
from sglang_exact.hooks.registered import Decision
from sglang_exact.reasons import Reason, Refused
from sglang_exact.settings import Settings


class Left(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize("wrong", [False, True])
def test_rank_looks_at_arguments_and_model(
    monkeypatch: pytest.MonkeyPatch,
    wrong: bool,
    decide: Callable[[Settings], Decision],
) -> None:
    """Whether the launcher was a child of another process does not matter."""
    reason = Reason("--attention-backend fa3", "triton", "drop it")
    left: list[Refused] = []

    def leave(refusal: Refused, **_: bool) -> None:
        left.append(refusal)
        raise Left

    monkeypatch.setattr(gate, "leave", leave)
    decide(Settings())
    monkeypatch.setattr(scope, "environment_reasons", lambda environ: [])
    monkeypatch.setattr(roles, "launcher_reasons", lambda environ: [])
    monkeypatch.setattr(rank, "setup_reasons", lambda args: [reason] if wrong else [])
    started: list[Any] = []

    def start() -> None:
        rank.check_rank(
            lambda self, server_args, port_args: started.append(server_args),
            SimpleNamespace(),
            "arguments",
            None,
        )

    if wrong:
        with pytest.raises(Left):
            start()
        assert left[0].reasons == [reason]
        assert started == []
    else:
        start()
        assert started == ["arguments"]


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("reasons", [[], [Reason("a bit", "none", "report it")]])
@pytest.mark.parametrize("shapes", [(), ((64, 128),)])
def test_tiles_that_passed_are_enabled(
    monkeypatch: pytest.MonkeyPatch,
    decide: Callable[[Settings], Decision],
    draft: bool,
    reasons: list[Reason],
    shapes: tuple[tuple[int, int], ...],
) -> None:
    """By the target's rank, and only where nothing was found."""
    enabled: list[Any] = []
    decide(Settings(enable=True, small_m=16))
    monkeypatch.setattr(scope_model, "live_reasons", lambda *_: [])
    monkeypatch.setattr(selftest, "run", lambda *_: selftest.Result(reasons, shapes))
    monkeypatch.setattr(small_m_gemm, "enable", lambda *given: enabled.append(given))
    runner = SimpleNamespace(
        is_draft_worker=draft,
        model=None,
        kv_cache_dtype=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace()),
    )
    if reasons and not draft:
        with pytest.raises(Refused) as refused:
            rank.self_test(None, runner)
        assert refused.value.reasons == reasons
    else:
        rank.self_test(None, runner)
    passed = shapes and not reasons and not draft
    assert enabled == ([(shapes, 16)] if passed else [])


@pytest.mark.parametrize("ships", [False, True])
def test_mask_embedding_of_a_draft(tmp_path: Path, ships: bool) -> None:
    """It would overwrite a row of the target: refused by the launcher and the rank."""
    if ships:
        (tmp_path / "mask_embedding.pt").write_bytes(b"")
    args = SimpleNamespace(speculative_draft_model_path=str(tmp_path))
    found = rank.mask_embedding_reasons(args)
    assert ["mask_embedding.pt" in str(reason) for reason in found] == [True] * ships
    merged: list[Any] = []
    worker = SimpleNamespace(server_args=args)
    if ships:
        with pytest.raises(Refused, match=r"mask_embedding\.pt"):
            rank.keep_target_weights(merged.append, worker)
    else:
        rank.keep_target_weights(merged.append, worker)
    assert merged == [worker] * (not ships)


def drafting(path: Path | str | None, tokens: int | None, name: Any = "DFLASH") -> Any:
    """The arguments that say what drafts, and how much."""
    return SimpleNamespace(
        speculative_algorithm=name,
        speculative_draft_model_path=None if path is None else str(path),
        speculative_num_draft_tokens=tokens,
    )


@pytest.mark.parametrize("tokens", [2, 3, 8, None])
@pytest.mark.parametrize("taps", [4, 2, 0, None])
def test_draft_block_has_room_for_the_convolution(
    tmp_path: Path, tokens: int | None, taps: int | None
) -> None:
    """Two rows do not reach back three: the host cannot capture such a block."""
    config = {"dflash_config": {} if taps is None else {"conv_kernel_size": taps}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = launch._draft_block_reasons(drafting(tmp_path, tokens))
    assert bool(found) == ((tokens, taps) == (2, 4))
    # A name on the hub: nothing can be said before it is loaded.
    assert launch._draft_block_reasons(drafting("someone/draft", tokens)) == []


def test_the_host_fails_on_exactly_those_blocks(tmp_path: Path) -> None:
    """Its own convolution, one request alone."""
    torch = pytest.importorskip("torch")
    try:
        host = metadata.distribution("sglang").locate_file(
            "sglang/srt/models/dflash.py"
        )
    except metadata.PackageNotFoundError:
        pytest.skip("no host")
    tree = ast.parse(Path(str(host)).read_text(encoding="utf-8"))
    (conv,) = (x for x in tree.body if getattr(x, "name", "") == "_grouped_conv")
    conv.decorator_list.clear()  # type: ignore[attr-defined]
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(ast.Module([conv], []), "host", "exec"), names)
    taps = 4
    config = {"dflash_config": {"conv_kernel_size": taps}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for rows in range(1, 7):
        of_one = (torch.ones(rows, 4), torch.zeros(rows, taps, 2), torch.ones(taps, 4))
        fails = False
        try:
            names["_grouped_conv"](*of_one, 8, 2, 2, taps)
        except RuntimeError:
            fails = True
        assert bool(launch._draft_block_reasons(drafting(tmp_path, rows))) == fails
        assert fails == (rows < 3)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('{"dflash_config": {"conv_kernel_size": "4"}}', True),
        ('{"dflash_config": {"conv_kernel_size": 4.0}}', True),
        ('{"dflash_config": {"conv_kernel_size": "four"}}', False),
        ('{"dflash_config": {"conv_kernel_size": -4}}', False),
        ('{"dflash_config": {"conv_kernel_size": [4]}}', False),
        ('{"dflash_config": {"conv_kernel_size": Infinity}}', False),
        ('{"dflash_config": {"conv_kernel_size": NaN}}', False),
        ('{"dflash_config": null}', False),
        ('{"dflash_config": "conv_kernel_size"}', False),
        ("[4]", False),
        ("null", False),
        ("{", False),
        ("", False),
        ("\x00\xff", False),
    ],
)
def test_a_broken_draft_is_left_to_the_host(
    tmp_path: Path, text: str, refused: bool
) -> None:
    """The host names what is wrong with it; a number in quotes it takes."""
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    found = launch._draft_block_reasons(drafting(tmp_path, 2))
    assert bool(found) == refused
    assert all("3 or more" in str(reason) for reason in found)


def test_only_such_a_draft_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NGRAM has no draft, whatever lies in the folder that the server starts in."""
    config = {"dflash_config": {"conv_kernel_size": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    for args in (
        drafting(None, 2, "NGRAM"),
        drafting("", 2),
        drafting(None, 2),
        drafting(tmp_path, 2, "NGRAM"),
        drafting(tmp_path, 2, None),
        drafting(tmp_path / "config.json", 2),
        drafting(tmp_path / "nowhere", 2),
    ):
        assert launch._draft_block_reasons(args) == []
    assert launch._draft_block_reasons(drafting(tmp_path, 2, "dflash"))
    assert launch._draft_block_reasons(drafting(".", 2))
    (tmp_path / "config.json").unlink()
    # Cannot be read as a file.
    (tmp_path / "config.json").mkdir()
    assert launch._draft_block_reasons(drafting(tmp_path, 2)) == []


@pytest.mark.parametrize("text", ["{", "[]", "7", "null", "\x00\xff"])
def test_a_broken_target_is_left_to_the_host(
    tmp_path: Path, text: str, decide: Callable[[Settings], Decision]
) -> None:
    decide(Settings())
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    args = drafting(None, None, None)
    args.model_path, args.device, args.dtype = str(tmp_path), "cpu", "auto"
    args.tokenizer_worker_num = 1
    found = [str(reason) for reason in launch._early_reasons(args)]
    assert not any("model architecture" in text for text in found)
    # Control: one that can be read is looked at.
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}')
    found = [str(reason) for reason in launch._early_reasons(args)]
    assert any("model architecture Other" in text for text in found)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_launcher_looks_at_the_draft_and_the_workers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: bool,
    decide: Callable[[Settings], Decision],
) -> None:
    """All of it at once, in one refusal."""
    config = {"dflash_config": {"conv_kernel_size": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if wrong:
        (tmp_path / "mask_embedding.pt").write_bytes(b"")
    args = drafting(tmp_path, 2 if wrong else 3)
    args.tokenizer_worker_num = 2 if wrong else 1
    overrides = ModuleType("overrides")
    for name in ("resolved_view", "model_config_of"):
        monkeypatch.setattr(overrides, name, lambda x: x, raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.overrides", overrides)
    monkeypatch.setattr(launch, "_effect_reasons", list)
    monkeypatch.setattr(launch, "setup_reasons", lambda _: [])
    monkeypatch.setattr(scope_model, "model_reasons", lambda *_: [])
    decide(Settings(rehearsal=True))
    if not wrong:
        launch.check_arguments(args)
        return
    with pytest.raises(Refused) as refused:
        launch.check_arguments(args)
    words = ("mask_embedding.pt", "--speculative-num-draft-tokens 2", "--tokenizer")
    found = [str(reason) for reason in refused.value.reasons]
    assert [word in text for word, text in zip(words, found, strict=True)] == [True] * 3
    # Also beside a flag that is refused before the arguments are resolved.
    args.model_path, args.device, args.dtype = str(tmp_path), "cpu", "auto"
    found = [str(reason) for reason in launch._early_reasons(args)]
    assert [word in text for word, text in zip(words, found, strict=True)] == [True] * 3
