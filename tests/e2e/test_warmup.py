# SPDX-License-Identifier: Apache-2.0
"""A model that could see images starts: its warm-up is text, as all it is asked for.

The tiny target cannot see; a plugin makes the host believe it can. The control leaves
the hook out and gets what the host does with an image that is refused: it ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from request_cases import TextServer
from traffic import small_models

from sglang_exact.rehearsal.environment import environment

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))

from launching import other_plugin  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DISABLE = "SGLANG_EXACT_TEST_DISABLE_HOOKS"


class WarmServer(TextServer):
    """Warms up, as servers do by default."""

    def command(self) -> list[str]:
        return [x for x in super().command() if x != "--skip-server-warmup"]


@pytest.mark.parametrize("disabled", [None, "requests_understood"])
def test_warm_up_is_text(tmp_path: Path, disabled: str | None) -> None:
    other_plugin(
        tmp_path,
        "sees",
        """
        def register():
            from sglang.srt.configs.model_config import ModelConfig

            plain = ModelConfig.__init__

            def init(self, *args, **kwargs):
                plain(self, *args, **kwargs)
                self.is_image_understandable_model = True

            ModelConfig.__init__ = init
        """,
    )
    folder = small_models(tmp_path / "models")
    search = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    env = {
        "PYTHONPATH": search,
        "SGLANG_EXACT_ALLOW_PLUGINS": "sees",
        DISABLE: disabled,
    }
    server = WarmServer(folder / "target", env=env)
    if disabled:
        with pytest.raises(RuntimeError, match="warmup error"):
            server.start()
        return
    with server:
        assert server.client.request("/model_info")["has_image_understanding"] is False
        assert "warmup" not in server.log_tail()
        assert len(server.generate([5, 6, 7], 2).ids) == 2
