# SPDX-License-Identifier: Apache-2.0
"""Every hook, in one ordered table; nothing is discovered, nothing runs here."""

from __future__ import annotations

from sglang_exact.hooks import (
    accept,
    attention_verify,
    autotune,
    chain,
    context_end,
    control_requests,
    copies,
    decode_attention,
    gdn_commit,
    gdn_prefill_graph,
    gdn_verify,
    launch,
    live_changes,
    logprobs,
    ollama,
    penalties,
    preemption,
    prefill_attention,
    prefill_grid,
    prefix_cache,
    prefix_room,
    prefix_snapshot,
    rank,
    request_fields,
    request_limit,
    requests,
    reservation,
    retraction,
    sampling,
    small_m_gemm,
    stop,
    streamed_parts,
    text_endpoints,
    verify_sampling,
    vocab_parallel,
)
from sglang_exact.hooks.base import MAIN, SCHEDULER, Hook, of
from sglang_exact.hooks.registered import Decision
from sglang_exact.reasons import Reason
from sglang_exact.settings import Settings

__all__ = [
    "ALL",
    "MAIN",
    "SCHEDULER",
    "Hook",
    "decide",
    "name_reasons",
    "pinned_names",
    "select",
]

MODULES = (
    launch,
    rank,
    gdn_verify,
    gdn_commit,
    decode_attention,
    attention_verify,
    prefill_attention,
    small_m_gemm,
    autotune,
    prefill_grid,
    prefix_snapshot,
    gdn_prefill_graph,
    prefix_cache,
    prefix_room,
    request_limit,
    reservation,
    preemption,
    context_end,
    retraction,
    live_changes,
    requests,
    copies,
    ollama,
    text_endpoints,
    request_fields,
    control_requests,
    stop,
    streamed_parts,
    penalties,
    sampling,
    chain,
    verify_sampling,
    vocab_parallel,
    accept,
    logprobs,
)
ALL: tuple[Hook, ...] = of(*MODULES)

# Switching these off would switch off the refusal itself.
ALWAYS_ON = tuple(hook.name for hook in of(launch, rank))


def _test_hooks(config: Settings) -> list[Hook]:
    found: list[Hook] = []
    if config.dummy_weights:
        from sglang_exact.hooks.testing import dummy_weights

        found += of(dummy_weights)
    if config.oracle:
        from sglang_exact.hooks.testing import oracle

        found += of(oracle)
    if config.deep_gemm_default:
        from sglang_exact.hooks.testing import deep_gemm_default

        found += of(deep_gemm_default)
    return found


def select(config: Settings, *roles: str) -> list[Hook]:
    """The hooks that a process of these roles registers under these settings.

    A disabled hook leaves with everything that shares its name as a prefix.
    """
    found = []
    if config.enable:
        found = [
            hook
            for hook in ALL
            if set(roles) & set(hook.roles)
            and not any(hook.name.startswith(off) for off in config.disabled_hooks)
        ]
    if SCHEDULER in roles:
        found += _test_hooks(config)
    return found


def decide(config: Settings, roles: tuple[str, ...]) -> Decision:
    """What a process of these roles is to register under these settings."""
    selected = tuple(select(config, *roles))
    known = (*ALL, *(hook for hook in selected if hook.test))
    return Decision(config, roles, selected, known, tuple(pinned_names()))


def name_reasons(config: Settings) -> list[Reason]:
    """Reasons in SGLANG_EXACT_TEST_DISABLE_HOOKS: unknown or indispensable names."""
    names = {hook.name for hook in ALL} - set(ALWAYS_ON)
    return [
        Reason(
            f"SGLANG_EXACT_TEST_DISABLE_HOOKS names {name!r}",
            "some of " + ", ".join(sorted(names)),
            "correct the name",
        )
        for name in config.disabled_hooks
        if name not in names
    ]


def pinned_names() -> list[str]:
    """Every dotted path whose source the overlay relies on, sorted."""
    found = set()
    for hook in ALL:
        found.add(hook.target)
        found.update(hook.relies_on)
    return sorted(found)
