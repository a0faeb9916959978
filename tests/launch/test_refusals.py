# SPDX-License-Identifier: Apache-2.0
"""Every way to end up without the overlay ends in one message, before weights load.

Real processes of the installed host. The launcher sees all of them; the plugin alone
sees those in which it is called at all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import (
    LAUNCHER,
    PLUGIN,
    SERVE,
    altered_host,
    at_start,
    flags,
    other_plugin,
    run,
    write_config,
)

from sglang_exact.host import VERSION

pytestmark = pytest.mark.host

# Away from the rehearsal its torch for the CPU would be refused before all else.
ANY_STACK = {"SGLANG_EXACT_ALLOW_UNPINNED_HOST": "1"}


def test_register_raises(tmp_path: Path, tiny_models: Path) -> None:
    at_start(
        tmp_path,
        """
        import sglang_exact.scope as scope
        def fail(environ): raise RuntimeError("broken on purpose")
        scope.environment_reasons = fail
        """,
    )
    outcome = run(PLUGIN, flags(tiny_models / "target"), path=tmp_path)
    (reason,) = outcome.reasons()
    assert "RuntimeError: broken on purpose" in reason
    assert outcome.status == 3


def test_import_fails(tmp_path: Path, tiny_models: Path) -> None:
    at_start(tmp_path, "import sys; sys.modules['sglang_exact.plugin'] = None")
    outcome = run(LAUNCHER, flags(tiny_models / "target"), path=tmp_path)
    (reason,) = outcome.reasons()
    assert "did not run sglang_exact" in reason
    assert outcome.status == 3


def test_left_out_and_unknown_names(tiny_models: Path) -> None:
    """Everything wrong with the environment comes in one message."""
    outcome = run(
        LAUNCHER,
        flags(tiny_models / "target"),
        env={
            "SGLANG_PLUGINS": "another",
            "SGLANG_EXACT_ENABEL": "1",
            "SGLANG_EXACT_TEST_DISABLE_HOOKS": "gdn_verfy",
            "FLA_USE_FAST_OPS": "1",
        },
    )
    text = "\n".join(outcome.reasons())
    assert outcome.status == 3
    assert "SGLANG_PLUGINS=another, which leaves sglang_exact out" in text
    assert "unknown variable SGLANG_EXACT_ENABEL" in text
    assert "'gdn_verfy'" in text
    assert "FLA_USE_FAST_OPS=1" in text


def test_unknown_flag(tiny_models: Path) -> None:
    outcome = run(LAUNCHER, flags(tiny_models / "target", "--exact-chek"))
    (reason,) = outcome.reasons()
    assert "--exact-chek" in reason
    assert outcome.status == 3


def test_unknown_names_through_the_plugin(tiny_models: Path) -> None:
    outcome = run(
        SERVE,
        flags(tiny_models / "target"),
        env={"SGLANG_EXACT_ENABEL": "1", "FLASHINFER_USE_CUDA_NORM": "1"},
    )
    text = "\n".join(outcome.reasons())
    assert outcome.status == 3
    assert "unknown variable SGLANG_EXACT_ENABEL" in text
    assert "FLASHINFER_USE_CUDA_NORM=1" in text


@pytest.mark.parametrize("entry", [LAUNCHER, SERVE], ids=["launcher", "plugin"])
def test_changed_host(
    tmp_path: Path, tiny_models: Path, entry: tuple[str, ...]
) -> None:
    """A changed body and a missing target, found in the source before any import."""
    altered_host(
        tmp_path,
        "sglang.srt.entrypoints.engine",
        {"def _wait_for_scheduler_ready(": "def _wait_until_ready("},
    )
    changed = tmp_path / "sglang" / "srt" / "server_args.py"
    text = changed.read_text()
    changed.unlink()
    changed.write_text(
        text.replace("def check_server_args(self):", "def check_server_args(self):\n"
                     "        self = self")
    )  # fmt: skip
    outcome = run(entry, flags(tiny_models / "target"), path=tmp_path)
    text = "\n".join(outcome.reasons())
    assert outcome.status == 3
    assert "'_wait_for_scheduler_ready' is not defined in engine.py" in text
    assert "ServerArgs.check_server_args has source" in text
    assert f"sglang=={VERSION}" in text


def test_missing_target_on_an_unpinned_host(tmp_path: Path, tiny_models: Path) -> None:
    """With the pins waived, the gate still sees that the host applied no hook."""
    altered_host(
        tmp_path,
        "sglang.srt.entrypoints.engine",
        {"_wait_for_scheduler_ready": "_wait_until_ready"},
    )
    outcome = run(
        LAUNCHER,
        flags(tiny_models / "target", "--exact-allow-unpinned-host"),
        path=tmp_path,
    )
    (reason,) = outcome.reasons()
    assert "hook attest_ranks: the host did not apply it" in reason
    assert outcome.status == 3


@pytest.mark.parametrize("name", ["a_before_us", "z_after_us"])
def test_another_plugin(tmp_path: Path, tiny_models: Path, name: str) -> None:
    """One hooks a target of ours; it also overwrites one after all hooks are applied.

    The loader runs plugins in the order of the search path; both orders are refused.
    """
    other_plugin(
        tmp_path,
        name,
        """
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def register():
            HookRegistry.register(
                "sglang.srt.server_args:ServerArgs.resolve_once",
                lambda original, self: original(self),
                HookType.AROUND,
            )
            apply_hooks = HookRegistry.apply_hooks

            def apply_and_overwrite():
                apply_hooks()
                from sglang.srt.entrypoints import engine
                engine._wait_for_scheduler_ready = lambda readers, procs: []

            HookRegistry.apply_hooks = staticmethod(apply_and_overwrite)
        """,
    )
    if name.startswith("z"):
        at_start(
            tmp_path,
            """
            import importlib.metadata as m
            found = m.entry_points
            def last_first(**kw):
                if kw.get("group") != "sglang.srt.plugins":
                    return found(**kw)
                return sorted(found(**kw), key=lambda ep: ep.name != "sglang_exact")
            m.entry_points = last_first
            """,
        )
    outcome = run(PLUGIN, flags(tiny_models / "target"), path=tmp_path)
    text = "\n".join(outcome.reasons())
    assert "another plugin hooks sglang.srt.server_args:ServerArgs.resolve_once" in text
    if name.startswith("a"):
        assert "hook attest_ranks is not in force" in text


AFTER_LOGITS = """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def register():
        HookRegistry.register(
            "sglang.srt.layers.layernorm.GemmaRMSNorm.forward",
            lambda result, *args, **kwargs: result,
            HookType.AFTER,
        )
"""


@pytest.mark.parametrize("entry", [LAUNCHER, PLUGIN], ids=["launcher", "plugin"])
def test_another_plugin_on_any_target(
    tmp_path: Path, tiny_models: Path, entry: tuple[str, ...]
) -> None:
    """One that hooks nothing of ours is refused by its presence, with its name."""
    other_plugin(tmp_path, "after_logits", AFTER_LOGITS)
    outcome = run(
        entry, flags(tiny_models / "target"), path=tmp_path, allow_plugins=False
    )
    (reason,) = outcome.reasons()
    assert outcome.status == 3
    assert "another plugin: after_logits (after_logits:register)" in reason


def test_another_plugin_that_is_allowed(tmp_path: Path, tiny_models: Path) -> None:
    """By its name only: another name lets nothing in."""
    other_plugin(tmp_path, "after_logits", AFTER_LOGITS)
    for name, status in (("after_logits", 0), ("after_logit", 3)):
        allowed = ("--exact-allow-plugin", name, "--exact-check")
        outcome = run(
            LAUNCHER,
            flags(tiny_models / "target", *allowed),
            path=tmp_path,
            allow_plugins=False,
        )
        assert outcome.status == status, outcome.output


def test_edited_file_of_the_host(tmp_path: Path, tiny_models: Path) -> None:
    """A norm that no hook names: an installation in front of the pinned one."""
    altered_host(
        tmp_path,
        "sglang.srt.layers.layernorm",
        {"import logging\n": "import logging\n\nEDITED = 1\n"},
    )
    outcome = run(
        LAUNCHER, flags(tiny_models / "target", "--exact-check"), path=tmp_path
    )
    (reason,) = outcome.reasons()
    assert outcome.status == 3
    assert "that are edited: srt/layers/layernorm.py" in reason


def test_source_patcher_of_the_host(tmp_path: Path, tiny_models: Path) -> None:
    outcome = run(
        LAUNCHER,
        flags(tiny_models / "target", "--exact-check"),
        env={"DUMPER_SOURCE_PATCHER_CONFIG": "x.yaml", "SGLANG_DEBUG_REVERT_PR": "12"},
    )
    found = outcome.reasons()
    assert outcome.status == 3 and len(found) == 2
    assert "DUMPER_SOURCE_PATCHER_CONFIG is set" in found[0]
    assert "SGLANG_DEBUG_REVERT_PR is set" in found[1]


def test_overwritten_after_the_gate(tmp_path: Path, tiny_models: Path) -> None:
    """The arguments' check looks at the hooks of its process once more."""
    other_plugin(
        tmp_path,
        "overwrites",
        """
        def register():
            from sglang.srt import server_args
            from sglang.srt.entrypoints import engine

            prepare = server_args.prepare_server_args

            def prepare_and_overwrite(argv):
                engine._wait_for_scheduler_ready = lambda readers, procs: []
                return prepare(argv)

            server_args.prepare_server_args = prepare_and_overwrite
        """,
    )
    outcome = run(
        LAUNCHER, flags(tiny_models / "target", "--exact-check"), path=tmp_path
    )
    (reason,) = outcome.reasons()
    assert "hook attest_ranks is not in force" in reason


@pytest.mark.parametrize("entry", [LAUNCHER, SERVE], ids=["launcher", "plugin"])
def test_flags_model_dtype_and_gpu(
    tmp_path: Path, tiny_models: Path, entry: tuple[str, ...]
) -> None:
    """Whatever is wrong with a request to serve comes in one message."""
    model = write_config(
        tmp_path / "model", tiny_models / "target", architectures=["OtherForCausalLM"]
    )
    # Away from the rehearsal, a machine without a GPU is refused as well.
    other_plugin(
        tmp_path,
        "not_a_rehearsal",
        """
        def register():
            import os
            os.environ.pop("SGLANG_EXACT_TEST_REHEARSAL", None)
            os.environ.pop("TRITON_INTERPRET", None)
        """,
    )
    wrong = flags(
        model, "--tp-size", "4", "--dtype", "float16", "--kv-cache-dtype", "fp8_e4m3",
        "--attention-backend", "flashinfer", "--enable-mixed-chunk",
        "--speculative-algorithm", "DFLASH", "--speculative-num-draft-tokens", "64",
    )  # fmt: skip
    outcome = run(entry, wrong, env=ANY_STACK, path=tmp_path)
    text = "\n".join(outcome.reasons())
    for found in (
        "--tp-size 4",
        "--dtype float16",
        "--kv-cache-dtype fp8_e4m3",
        "--attention-backend flashinfer",
        "--enable-mixed-chunk True",
        "--speculative-num-draft-tokens 64",
        "model architecture OtherForCausalLM",
        "no CUDA GPU",
    ):
        assert f"found {found}" in text, text


def test_model_and_gpu_alone(tmp_path: Path, tiny_models: Path) -> None:
    """Resolved arguments are checked too: nothing in the flags is wrong here."""
    model = write_config(
        tmp_path / "model",
        tiny_models / "target",
        dtype="float32",
        quantization_config={"quant_method": "fp8"},
    )
    other_plugin(
        tmp_path,
        "not_a_rehearsal",
        """
        def register():
            import os
            os.environ.pop("SGLANG_EXACT_TEST_REHEARSAL", None)
            os.environ.pop("TRITON_INTERPRET", None)
        """,
    )
    outcome = run(SERVE, flags(model), env=ANY_STACK, path=tmp_path)
    text = "\n".join(outcome.reasons())
    assert "no CUDA GPU" in text
    assert "a quantized checkpoint" in text or "--quantization fp8" in text


def test_what_is_supported_passes(tiny_models: Path) -> None:
    """The control of this file: the same machinery lets a good set-up through."""
    outcome = run(LAUNCHER, flags(tiny_models / "target", "--exact-check"))
    assert outcome.status == 0, outcome.output
    assert "can be served exactly" in outcome.output
