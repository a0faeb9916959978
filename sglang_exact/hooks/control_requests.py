# SPDX-License-Identifier: Apache-2.0
"""What a control endpoint sends to the scheduler cannot end it.

Why: the scheduler handles a control message in its main loop and ends on what it
    raises: an expert recorder that a dense model has not
    (sglang/srt/managers/scheduler.py:6130), memory that is released while a request is
    live or resumed unreleased (scheduler_components/weight_updater.py:339, 390), an
    unknown part of the model (weight_updater.py:76), a profile that cannot be written.
What: one table of every message that the scheduler takes. Before one is sent, its entry
    says why not; then the caller gets a 400 and the scheduler nothing.
Scope: every message of the tokenizer manager, over HTTP or from an Engine.
Retire when: the host answers such a message with an error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from sglang_exact.hooks.base import HOST_SCHEDULER, MAIN, TOKENIZER_MANAGER, hook
from sglang_exact.hooks.requests import text_of
from sglang_exact.reasons import Reason

INT63 = 2**63 - 1
Look = Callable[[Any, Any], list[Reason]]
"""Takes the tokenizer manager and a message; returns every reason against it."""


def passes(manager: Any, sent: Any) -> list[Reason]:
    """The scheduler answers it, whatever it holds."""
    return []


def absent(what: str) -> Look:
    """The server has nothing that the message is about."""

    def look(manager: Any, sent: Any) -> list[Reason]:
        name = type(sent).__name__
        return [Reason(name, f"a server with {what}", "leave it out")]

    return look


def selector(manager: Any, sent: Any) -> list[Reason]:
    """Which models are meant: the target, the draft, or both."""
    if sent.selector in ("all", "target", "draft"):
        return []
    return [
        Reason(
            f"selector = {sent.selector!r}",
            "'all', 'target' or 'draft'",
            "correct selector",
        )
    ]


def _memory_tags(sent: Any) -> set[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return set(sent.tags or GPU_MEMORY_ALL_TYPES)


def _unknown_tags(sent: Any) -> list[Reason]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    unknown = sorted(_memory_tags(sent) - set(GPU_MEMORY_ALL_TYPES))
    known = f"some of {', '.join(GPU_MEMORY_ALL_TYPES)}"
    return [Reason(f"tags {unknown}", known, "correct tags")] if unknown else []


def release(manager: Any, sent: Any) -> list[Reason]:
    """Memory is released once, and while no request is live."""
    reasons = _unknown_tags(sent)
    held = vars(manager).setdefault("_exact_released", set())
    if again := sorted(held & _memory_tags(sent)):
        reasons.append(
            Reason(f"tags {again}, released before", "memory in use", "resume it first")
        )
    if manager.rid_to_state:
        reasons.append(
            Reason(
                "a release of memory while requests are live",
                "an idle server",
                "let the requests end, then release",
            )
        )
    if not reasons:
        held |= _memory_tags(sent)
    return reasons


def resume(manager: Any, sent: Any) -> list[Reason]:
    """Only what was released comes back."""
    held = vars(manager).setdefault("_exact_released", set())
    if missing := sorted(_memory_tags(sent) - held):
        return [
            Reason(f"tags {missing}, not released", "released memory", "correct tags")
        ]
    held -= _memory_tags(sent)
    return []


def profile(manager: Any, sent: Any) -> list[Reason]:
    """A profile that torch can take and the folder can hold."""
    reasons = []
    wrong = sorted(set(sent.activities or ()) - {"CPU", "GPU", "MEM"})
    if wrong:
        known = "some of CPU, GPU, MEM"
        reasons.append(Reason(f"activities {wrong}", known, "correct activities"))
    for name in ("start_step", "num_steps"):
        value = getattr(sent, name)
        if value is not None and not 0 <= value <= INT63:
            expected = f"an integer from 0 to {INT63}"
            reasons.append(Reason(f"{name} = {value}", expected, f"correct {name}"))
    if sent.output_dir is not None:
        folder = os.path.abspath(os.path.expanduser(sent.output_dir))
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
            found = f"output_dir = {sent.output_dir!r}"
            reasons.append(Reason(found, "a folder to write in", "correct output_dir"))
    return reasons


def slow_down(manager: Any, sent: Any) -> list[Reason]:
    """A step sleeps for seconds; every request waits as long."""
    seconds = sent.forward_sleep_time
    if seconds is None or (math.isfinite(seconds) and seconds <= 60):
        return []
    found = f"forward_sleep_time = {seconds}"
    return [Reason(found, "at most 60 seconds", "correct forward_sleep_time")]


def state(manager: Any, sent: Any) -> list[Reason]:
    """The scheduler compares the values with numbers."""
    wrong = {
        name: value
        for name, value in sent.server_args.items()
        if type(value) not in (int, float) or not -INT63 <= value <= INT63
    }
    return [Reason(f"server_args {wrong}", "numbers", "correct them")] if wrong else []


CONTROL: dict[str, Look] = {
    **dict.fromkeys(
        (
            *("TokenizedGenerateReqInput", "BatchTokenizedGenerateReqInput"),
            *("FlushCacheReqInput", "AbortReq", "FreezeGCReq", "ShutdownReq"),
            *("OpenSessionReqInput", "CloseSessionReqInput", "GetInternalStateReq"),
            *("UpdateWeightFromDiskReqInput", "UpdateWeightsFromIPCReqInput"),
            *("InitWeightsUpdateGroupReqInput", "DestroyWeightsUpdateGroupReqInput"),
            *("InitWeightsSendGroupForRemoteInstanceReqInput", "RpcReqInput"),
            *("SendWeightsToRemoteInstanceReqInput", "EndWeightUpdateReqInput"),
            *("UpdateWeightVersionReqInput", "GetWeightsByNameReqInput"),
            *("CheckWeightsReqInput", "ConfigureLoggingReq"),
            *("PauseGenerationReqInput", "ContinueGenerationReqInput"),
            *("AddExternalCorpusReqInput", "RemoveExternalCorpusReqInput"),
            "ListExternalCorporaReqInput",
        ),
        passes,
    ),
    **dict.fromkeys(
        (
            *("BeginWeightUpdateReqInput", "UpdateWeightsFromTensorReqInput"),
            "UpdateWeightsFromDistributedReqInput",
        ),
        selector,
    ),
    **dict.fromkeys(
        (
            *("ClearHiCacheReqInput", "AttachHiCacheStorageReqInput"),
            *("DetachHiCacheStorageReqInput", "GetHiCacheL3LayoutReq"),
        ),
        absent("a hierarchical cache"),
    ),
    **dict.fromkeys(
        (
            *("LoadLoRAAdapterReqInput", "LoadLoRAAdapterFromTensorsReqInput"),
            "UnloadLoRAAdapterReqInput",
        ),
        absent("LoRA"),
    ),
    **dict.fromkeys(
        ("TokenizedEmbeddingReqInput", "BatchTokenizedEmbeddingReqInput"),
        absent("an embedding model"),
    ),
    "ExpertDistributionReq": absent("a mixture of experts"),
    "ScaleElasticEPReqInput": absent("a mixture of experts"),
    "PdRoleSwitchReqInput": absent("disaggregation"),
    "DumperControlReqInput": absent("the host's dumper"),
    "ReleaseMemoryOccupationReqInput": release,
    "ResumeMemoryOccupationReqInput": resume,
    "ProfileReq": profile,
    "SlowDownReqInput": slow_down,
    "SetInternalStateReq": state,
}
"""Every message of Scheduler.init_request_dispatcher; what routers and elastic ranks
send beside them comes from no request."""


@hook(
    f"{TOKENIZER_MANAGER}._async_dispatch_to_scheduler",
    "BEFORE",
    name="control_requests_async",
    roles=(MAIN,),
)
@hook(
    f"{TOKENIZER_MANAGER}._dispatch_to_scheduler",
    "BEFORE",
    name="control_requests",
    roles=(MAIN,),
    relies_on=(f"{HOST_SCHEDULER}.init_request_dispatcher",),
)
def check_message(self: Any, obj: Any) -> None:
    """Before TokenizerManager._dispatch_to_scheduler, and before its async twin.

    Raises fastapi.HTTPException with status 400, which every endpoint passes on.
    """
    from fastapi import HTTPException

    look = CONTROL.get(type(obj).__name__, passes)
    if reasons := look(self, obj):
        raise HTTPException(status_code=400, detail=text_of(reasons))
