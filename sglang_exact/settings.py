# SPDX-License-Identifier: Apache-2.0
"""Every SGLANG_EXACT_* variable, typed, in one place.

The environment is only the transport to the host's spawned ranks; people use the
flags of `python -m sglang_exact.launch_server`, which sets it. Variables with
`_TEST_` in the name are for tests and show in the attestation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sglang_exact.reasons import Reason

PREFIX = "SGLANG_EXACT_"
SMALL_M_VARIABLE = "SGLANG_BATCH_INVARIANT_OPS_SMALL_M_TRITON"
SMALL_M_DEFAULT = 16
SMALL_M_MAX = 16
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}

HOST_VARIABLES = ("SGLANG_EXACT_CHUNK_FILL",)
"""The host's own names with this prefix (sglang/srt/environ.py)."""

LAUNCHER_VARIABLE = "SGLANG_EXACT_LAUNCHER"
"""Pid of the process that starts the ranks; written by the overlay (`roles.sign`)."""

VARIABLES: dict[str, str] = {
    "SGLANG_EXACT_ENABLE": "turn the overlay on (0 or 1)",
    "SGLANG_EXACT_ALLOW_UNPINNED_HOST": (
        "start on a host, torch or kernels that do not match the pins; numerics become "
        "'unverified'"
    ),
    "SGLANG_EXACT_ALLOW_PLUGINS": (
        "comma-separated names of other plugins that may be loaded; numerics become "
        "'unverified'"
    ),
    "SGLANG_EXACT_PREEMPT_GIB": (
        "GiB of host memory, of all ranks together, for KV of requests that wait when "
        "the pool is full; half of the memory if not given. 0 makes each request "
        "reserve all it may need"
    ),
    "SGLANG_EXACT_TEST_REHEARSAL": "run the host on the CPU, kernels interpreted",
    "SGLANG_EXACT_TEST_DUMMY_WEIGHTS": "realistic random weights for load-format dummy",
    "SGLANG_EXACT_TEST_ORACLE": "file with known continuations for the oracle drafter",
    "SGLANG_EXACT_TEST_DISABLE_HOOKS": "comma-separated hook names to leave out",
    "SGLANG_EXACT_TEST_DEEP_GEMM_DEFAULT": (
        "leave DeepGEMM's deterministic algorithms off in the host's matrix products"
    ),
}


class Settings(NamedTuple):
    """What the environment asks for.

    `small_m` is the largest M that the small-M GEMM tiles take (0 turns them off),
    `preempt_gib` the host memory for KV of requests that wait (None: half of it).
    """

    enable: bool = False
    allow_unpinned_host: bool = False
    allow_plugins: tuple[str, ...] = ()
    small_m: int = SMALL_M_DEFAULT
    preempt_gib: float | None = None
    rehearsal: bool = False
    dummy_weights: bool = False
    oracle: str | None = None
    disabled_hooks: tuple[str, ...] = ()
    deep_gemm_default: bool = False

    @property
    def any_test(self) -> bool:
        """Whether a test setting is on."""
        return bool(self.test_settings())

    def test_settings(self) -> dict[str, object]:
        """The test settings that are on, for the attestation."""
        found: dict[str, object] = {}
        if self.rehearsal:
            found["rehearsal"] = True
        if self.dummy_weights:
            found["dummy_weights"] = True
        if self.oracle:
            found["oracle"] = True
        if self.disabled_hooks:
            found["disabled_hooks"] = list(self.disabled_hooks)
        if self.deep_gemm_default:
            found["deep_gemm_default"] = True
        return found


def _boolean(environ: Mapping[str, str], name: str, reasons: list[Reason]) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in _TRUE:
        return True
    if text not in _FALSE:
        reasons.append(
            Reason(
                f"{name}={environ[name]!r}", "0 or 1", f"export {name}=1 or unset it"
            )
        )
    return False


def _names(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(x.strip() for x in environ.get(name, "").split(",") if x.strip())


def _small_m(environ: Mapping[str, str], reasons: list[Reason]) -> int:
    text = environ.get(SMALL_M_VARIABLE, "").strip()
    if not text:
        return SMALL_M_DEFAULT
    if text.isdecimal() and int(text) <= SMALL_M_MAX:
        return int(text)
    reasons.append(
        Reason(
            f"{SMALL_M_VARIABLE}={text!r}",
            f"a number from 0 (off) to {SMALL_M_MAX}",
            f"unset {SMALL_M_VARIABLE}; the default is {SMALL_M_DEFAULT}",
        )
    )
    return SMALL_M_DEFAULT


def _gib(environ: Mapping[str, str], reasons: list[Reason]) -> float | None:
    name = "SGLANG_EXACT_PREEMPT_GIB"
    text = environ.get(name, "").strip()
    if not text:
        return None
    if text.replace(".", "", 1).isdecimal():
        return float(text)
    reasons.append(
        Reason(
            f"{name}={text!r}",
            "GiB of host memory, such as 64, or 0 (off)",
            f"unset {name}; the default is half of the memory",
        )
    )
    return None


def read(environ: Mapping[str, str]) -> tuple[Settings, list[Reason]]:
    """Read the settings; unknown names and bad values come back as reasons."""
    reasons: list[Reason] = []
    for name in sorted(environ):
        known = (*VARIABLES, *HOST_VARIABLES, LAUNCHER_VARIABLE)
        if name.startswith(PREFIX) and name not in known:
            reasons.append(
                Reason(
                    f"unknown variable {name}",
                    "one of " + ", ".join(sorted(VARIABLES)),
                    f"unset {name}, or correct its spelling",
                )
            )
    settings = Settings(
        enable=_boolean(environ, "SGLANG_EXACT_ENABLE", reasons),
        allow_unpinned_host=_boolean(
            environ, "SGLANG_EXACT_ALLOW_UNPINNED_HOST", reasons
        ),
        allow_plugins=_names(environ, "SGLANG_EXACT_ALLOW_PLUGINS"),
        small_m=_small_m(environ, reasons),
        preempt_gib=_gib(environ, reasons),
        rehearsal=_boolean(environ, "SGLANG_EXACT_TEST_REHEARSAL", reasons),
        dummy_weights=_boolean(environ, "SGLANG_EXACT_TEST_DUMMY_WEIGHTS", reasons),
        oracle=environ.get("SGLANG_EXACT_TEST_ORACLE") or None,
        disabled_hooks=_names(environ, "SGLANG_EXACT_TEST_DISABLE_HOOKS"),
        deep_gemm_default=_boolean(
            environ, "SGLANG_EXACT_TEST_DEEP_GEMM_DEFAULT", reasons
        ),
    )
    return settings, reasons
