# SPDX-License-Identifier: Apache-2.0
"""A rank refuses a set-up that no launching process looked at."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_exact import gate, hooks, scope
from sglang_exact.hooks import launch, rank
from sglang_exact.reasons import Reason, Refused


class Left(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize("wrong", [False, True])
def test_rank_looks_at_arguments_and_model(
    monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """Whether the launcher was a child of another process does not matter."""
    reason = Reason("--attention-backend fa3", "triton", "drop it")
    left: list[Refused] = []

    def leave(refusal: Refused) -> None:
        left.append(refusal)
        raise Left

    monkeypatch.setattr(gate, "leave", leave)
    monkeypatch.setattr(hooks, "select", lambda config, role: [])
    monkeypatch.setattr(scope, "environment_reasons", lambda environ: [])
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


@pytest.mark.parametrize("ships", [False, True])
def test_mask_embedding_of_a_draft(tmp_path: Path, ships: bool) -> None:
    """It would overwrite a row of the target: refused by the launcher and the rank."""
    if ships:
        (tmp_path / "mask_embedding.pt").write_bytes(b"")
    args = SimpleNamespace(speculative_draft_model_path=str(tmp_path))
    found = launch._mask_embedding_reasons(args)
    assert ["mask_embedding.pt" in str(reason) for reason in found] == [True] * ships
    merged: list[Any] = []
    worker = SimpleNamespace(server_args=args)
    if ships:
        with pytest.raises(Refused, match=r"mask_embedding\.pt"):
            rank.keep_target_weights(merged.append, worker)
    else:
        rank.keep_target_weights(merged.append, worker)
    assert merged == [worker] * (not ships)


@pytest.mark.parametrize("tokens", [2, 3, 8, None])
@pytest.mark.parametrize("taps", [4, 2, 0, None])
def test_draft_block_has_room_for_the_convolution(
    tmp_path: Path, tokens: int | None, taps: int | None
) -> None:
    """Two rows do not reach back three: the host cannot capture such a block."""
    config = {"dflash_config": {} if taps is None else {"conv_kernel_size": taps}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = SimpleNamespace(
        speculative_draft_model_path=str(tmp_path), speculative_num_draft_tokens=tokens
    )
    found = launch._draft_block_reasons(args)
    assert bool(found) == ((tokens, taps) == (2, 4))
    # A name on the hub: nothing can be said before it is loaded.
    args.speculative_draft_model_path = "someone/draft"
    assert launch._draft_block_reasons(args) == []
