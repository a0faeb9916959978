# SPDX-License-Identifier: Apache-2.0
"""Admission, retraction, pausing and updates: the hooks' rules without the host."""

from __future__ import annotations

import asyncio
import sys
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_exact.hooks import (
    away,
    live_changes,
    prefill_grid,
    reservation,
    retraction,
)
from sglang_exact.hooks.base import DIRECT, Hook, Unsupported, of
from sglang_exact.hooks.in_force import effect_reasons
from sglang_exact.host import source
from sglang_exact.reasons import Refused


class AddReqResult(Enum):
    CONTINUE = auto()
    NO_TOKEN = auto()
    OTHER = auto()


class Output(SimpleNamespace):
    """Stands in for the host's answers."""


class FinishAbort(SimpleNamespace):
    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message=message, status_code=status_code)


BLOCK = 4
UPDATES = {
    "live_changes": "UpdateWeightFromDiskReq",
    "live_changes_ipc": "UpdateWeightsFromIPCReq",
    "live_changes_session": "BeginWeightUpdateReq",
    "live_changes_session_end": "EndWeightUpdateReq",
}
"""The hooks on new weights, and the host's message of each."""
GRID = 64


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the host modules that the hooks import when called."""
    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.managers.schedule_policy": {"AddReqResult": AddReqResult},
        "sglang.srt.managers.schedule_batch": {"FINISH_ABORT": FinishAbort},
        "sglang.srt.mem_cache.base_prefix_cache": {"EvictParams": SimpleNamespace},
        "sglang.srt.mem_cache.allocation_sizing": {
            "get_alloc_len_per_decode": lambda: BLOCK
        },
        "sglang.srt.managers.io_struct": {
            name: type(name, (Output,), {})
            for name in (
                *(f"{update}Output" for update in UPDATES.values()),
                "CheckWeightsReqOutput",
                "SetInternalStateReqOutput",
            )
        },
    }
    for name, values in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts)):
            parent = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


def request(prompt: int = 100, new: int = 10, done: int = 0) -> Any:
    return SimpleNamespace(
        rid="r",
        origin_input_ids=[1] * prompt,
        output_ids=[],
        full_untruncated_fill_ids=[1] * prompt,
        prefix_len=done,
        extend_end=prompt,
        sampling_params=SimpleNamespace(max_new_tokens=new),
        finished=lambda: False,
        to_finish=None,
    )


def adder(budget: int | None, running: list[Any] | None = None, size: int = 0) -> Any:
    return SimpleNamespace(
        rem_chunk_tokens=budget,
        mamba_chunk_grid=GRID,
        chunked_req_limit=None,
        can_run_list=[],
        running_batch=SimpleNamespace(reqs=running or []),
        token_to_kv_pool_allocator=SimpleNamespace(size=size),
    )


@pytest.mark.parametrize(
    ("budget", "prompt", "admitted"),
    [
        (None, 500, True),
        (64, 500, True),
        (63, 500, False),
        (63, 63, True),
        (20, 30, False),
        (30, 30, True),
    ],
)
def test_no_cut_below_one_chunk(
    budget: int | None, prompt: int, admitted: bool
) -> None:
    result = prefill_grid.add_one_req_ignore_eos(
        lambda self, req: AddReqResult.CONTINUE, adder(budget), request(prompt)
    )
    assert result is (AddReqResult.CONTINUE if admitted else AddReqResult.OTHER)


@pytest.mark.parametrize(("end", "good"), [(64, True), (100, True), (65, False)])
def test_cut_off_the_grid_raises(end: int, good: bool) -> None:
    admitting, req = adder(500), request()
    req.extend_end = end
    admitting.can_run_list.append(req)

    def check() -> None:
        prefill_grid.add_one_req(AddReqResult.CONTINUE, admitting, req, False, GRID)

    if good:
        check()
    else:
        with pytest.raises(Unsupported, match="cut at 65"):
            check()


def test_next_chunk_gets_at_least_the_grid() -> None:
    """shortest-prefill-first would leave 10 tokens."""
    limits = []

    def original(self: Any, req: Any) -> Any:
        limits.append(self.chunked_req_limit)

    crowded, free = adder(128), adder(128)
    crowded.chunked_req_limit = 10
    prefill_grid.add_chunked_req(original, crowded, request(500, done=64))
    prefill_grid.add_chunked_req(original, free, request(500, done=64))
    assert limits == [GRID, None]


def admit(reserving: Any, req: Any) -> Any:
    def original(self: Any, req: Any, **kw: Any) -> Any:
        return AddReqResult.CONTINUE

    return reservation.add_one_req(original, reserving, req, False, None)


def test_admission_counts_every_live_request_once() -> None:
    need = reservation.need(request())
    assert need == 100 + 10 + 4 * BLOCK
    running = request()
    exact = adder(None, [running], size=2 * need)
    exact.can_run_list = [running]
    assert admit(exact, request()) is AddReqResult.CONTINUE
    tight = adder(None, [running], size=2 * need - 1)
    assert admit(tight, request()) is AddReqResult.NO_TOKEN
    # Long answers count in full, not up to the host's 4096.
    assert admit(adder(None, [], size=5000), request(1, 5000)) is AddReqResult.NO_TOKEN


def test_admission_beside_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All may need more than the pool, if what would be sent away has a place."""
    monkeypatch.setattr(away, "room", away.Room())
    running, new = request(), request()
    need = reservation.need(new)
    running.output_ids = [1] * 5
    now = 2 * (100 + 4 * BLOCK) + 5
    for size, host, admitted in (
        (now, 3 * need - now, True),
        (now, 3 * need - now - 1, False),
        (now - 1, 10**6, False),
        (2 * need, 0, True),
        (2 * need - 1, 0, False),
    ):
        away.room.host_tokens = host
        found = admit(adder(None, [running], size=size), new)
        assert (found is AddReqResult.CONTINUE) is admitted
    away.room.away.append(running)
    assert admit(adder(None, [], size=10**6), new) is AddReqResult.NO_TOKEN


@pytest.mark.parametrize("capacity", [511, 512])
def test_pool_holds_one_full_request(capacity: int) -> None:
    reasons = reservation.pool_reasons(capacity, 500, 12)
    assert bool(reasons) == (capacity < 512)
    if reasons:
        assert "--context-length 499" in reasons[0].fix


class TokenToKVPoolAllocator:
    def __init__(self, size: int) -> None:
        self.size = size


class Shared(TokenToKVPoolAllocator):
    """A pool whose slots other caches can take."""


@pytest.mark.parametrize(
    ("pool", "refusal"),
    [
        (TokenToKVPoolAllocator(600), None),
        (TokenToKVPoolAllocator(100), "KV pool of 100 tokens"),
        (Shared(600), "KV slots from Shared"),
    ],
)
def test_check_pool(pool: Any, refusal: str | None) -> None:
    runner = SimpleNamespace(token_to_kv_pool_allocator=pool)
    rank = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        max_running_requests=2,
        model_config=SimpleNamespace(context_len=500),
    )
    if refusal is None:
        reservation.check_pool(None, rank)
    else:
        with pytest.raises(Refused, match=refusal):
            reservation.check_pool(None, rank)


def test_retracted_become_aborted() -> None:
    dropped, doomed = request(), request()
    result = retraction.retract_decode(([dropped], 0.5, [doomed]), None)
    assert result == ([], 0.5, [doomed, dropped])
    assert dropped.to_finish.status_code == 503
    assert "fix:" in dropped.to_finish.message
    assert doomed.to_finish is None


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_pause(mode: str) -> None:
    exceptions = pytest.importorskip("fastapi").HTTPException
    asked = []

    async def original(self: Any, obj: Any) -> None:
        asked.append(obj.mode)

    def pause() -> None:
        obj = SimpleNamespace(mode=mode)
        asyncio.run(retraction.refuse_pause(original, None, obj))

    if mode == "retract":
        with pytest.raises(exceptions) as caught:
            pause()
        assert caught.value.status_code == 400
        with pytest.raises(Refused):
            retraction.guard_pause(None, SimpleNamespace(mode=mode))
        assert asked == []
    else:
        pause()
        retraction.guard_pause(None, SimpleNamespace(mode=mode))
        assert asked == [mode]


@pytest.mark.host
@pytest.mark.parametrize("update", UPDATES.values())
def test_every_update_has_its_answer(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the host itself, not in its stand-ins.
    monkeypatch.undo()
    for end in ("Input", "Output"):
        definition = source.definition(f"sglang.srt.managers.io_struct.{update}{end}")
        assert definition.name == f"{update}{end}"


@pytest.mark.parametrize(("name", "update"), UPDATES.items())
def test_weights_stay_under_live_requests(name: str, update: str) -> None:
    (hook,) = (x.replacement for x in of(live_changes) if x.name == name)
    asked = type(f"{update}Input", (), {})()

    class Tree:
        def __init__(self, tokens: int, held: int = 0, disable: bool = False) -> None:
            self.tokens, self.held, self.disable = tokens, held, disable

        def full_evictable_size(self) -> int:
            return self.tokens - self.held

        def evict(self, params: Any) -> None:
            self.tokens -= params.num_tokens

        def total_size(self) -> tuple[int, int]:
            return self.tokens, 0

    def updater(live: list[Any], chunked: Any = None, tree: Tree | None = None) -> Any:
        scheduler = SimpleNamespace(
            collect_inflight_reqs=lambda: set(map(_Id, live)),
            chunked_req=chunked,
            tree_cache=tree or Tree(0),
        )
        return SimpleNamespace(scheduler=scheduler)

    def answer(target: Any) -> Any:
        return hook(lambda self, recv_req: "updated", target, asked)

    ended = request()
    ended.finished = lambda: True
    tree, off = Tree(128), Tree(7, disable=True)
    assert answer(updater([], tree=tree)) == "updated"
    assert tree.tokens == 0
    assert answer(updater([ended], tree=off)) == "updated"
    assert off.tokens == 7
    tree = Tree(128)
    for target in (updater([request()], tree=tree), updater([], chunked=request())):
        refused = answer(target)
        assert type(refused).__name__ == f"{update}Output"
        assert refused.success is False
        assert "requests are live" in refused.message
    assert tree.tokens == 128
    with pytest.raises(Unsupported, match="64 tokens of the old weights"):
        answer(updater([], tree=Tree(128, held=64)))


class _Id:
    """A hashable view of a request."""

    def __init__(self, req: Any) -> None:
        self.finished = req.finished


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"speculative_accept_threshold_single": 0.9}, False),
        ({"speculative_accept_threshold_acc": 0.5, "x": 1}, False),
        ({"speculative_accept_threshold_acc": 1.0}, True),
        ({"dspark_clear_info_records": True}, True),
    ],
)
def test_acceptance_rule_stays(change: dict[str, Any], allowed: bool) -> None:
    asked = SimpleNamespace(server_args=change)
    result = live_changes.set_internal_state(
        lambda self, recv_req: Output(updated=True), None, asked
    )
    assert result.updated is allowed


@pytest.mark.parametrize("action", ["reset_tensors", "checksum", "snapshot", "compare"])
def test_weights_are_never_reset(action: str) -> None:
    asked = SimpleNamespace(action=action)
    result = live_changes.check_weights(
        lambda self, recv_req: Output(success=True), None, asked
    )
    assert result.success is (action != "reset_tensors")
    if not result.success:
        assert "reset_tensors" in result.message


STATE = SimpleNamespace(changed=False)


def test_direct_hook_is_judged_by_its_effect() -> None:
    def change(target: Any) -> None:
        target.changed = True

    hook = Hook(
        name="direct",
        target=f"{__name__}.STATE",
        kind=DIRECT,
        replacement=change,
        in_force=lambda target: bool(target.changed),
    )
    assert "did not change" in str(effect_reasons(hook)[0])
    change(STATE)
    assert effect_reasons(hook) == []
    # Control: a hook that cannot be judged is not in force.
    assert effect_reasons(hook._replace(in_force=None))
