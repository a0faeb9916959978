# SPDX-License-Identifier: Apache-2.0
"""A rank that is not under the overlay: the server is never called ready."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))

from launching import LAUNCHER, PLUGIN, at_start, flags, other_plugin, run  # noqa: E402

pytestmark = [pytest.mark.host, pytest.mark.e2e]


def test_rank_without_the_overlay(tmp_path: Path, tiny_models: Path) -> None:
    """The plugin fails to import in the spawned rank alone, which serves stock."""
    at_start(
        tmp_path,
        """
        import sys
        if "--multiprocessing-fork" in sys.argv:
            sys.modules["sglang_exact.plugin"] = None
        """,
    )
    outcome = run(LAUNCHER, flags(tiny_models / "target"), path=tmp_path)
    # It starts at the rank; the launcher waits for all, then refuses.
    assert outcome.status == 3, outcome.output
    assert "found no attestation from rank(s) [0]" in outcome.output
    assert "The server is fired up" not in outcome.output


def test_hook_overwritten_in_the_rank(tmp_path: Path, tiny_models: Path) -> None:
    """Found by the rank itself, before it loads weights."""
    other_plugin(
        tmp_path,
        "overwrites",
        """
        import multiprocessing

        def register():
            if multiprocessing.parent_process() is None:
                return
            from sglang.srt.layers.attention.linear.kernels import gdn_triton
            from sglang.srt.managers import scheduler

            configure = scheduler.configure_scheduler_process

            def configure_and_overwrite(*args, **kwargs):
                gdn_triton.TritonGDNKernel.target_verify = lambda self, *a, **k: None
                return configure(*args, **kwargs)

            scheduler.configure_scheduler_process = configure_and_overwrite
        """,
    )
    outcome = run(PLUGIN, flags(tiny_models / "target"), path=tmp_path)
    assert outcome.status == 3, outcome.output
    assert "hook gdn_verify is not in force" in outcome.output
    assert "rank(s) [0] refused to start" in outcome.output
    assert "Load weight" not in outcome.output
    assert "Traceback" not in outcome.output, outcome.output


def test_refusal_while_a_rank_starts(tiny_models: Path) -> None:
    """What only the rank can know it refuses; the launcher ends as cleanly."""
    too_small = flags(tiny_models / "target", "--max-total-tokens", "2048")
    outcome = run(LAUNCHER, too_small)
    assert outcome.status == 3, outcome.output
    assert "found a KV pool of 2048 tokens" in outcome.output
    assert "rank(s) [0] refused to start" in outcome.output
    assert "Traceback" not in outcome.output, outcome.output
