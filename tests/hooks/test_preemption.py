# SPDX-License-Identifier: Apache-2.0
"""Who is sent to host memory, who comes back when, and that nobody starves.

A pool that counts slots, a loop like the host's, and the hooks' own decisions; what is
copied is tested in `requests/test_requests_away.py`.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_exact.hooks import away, preemption, reservation

STEP = 1
"""KV slots that a step takes for each request."""


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the host modules that are imported when called; an empty room."""
    sizing = ModuleType("sglang.srt.mem_cache.allocation_sizing")
    vars(sizing)["get_alloc_len_per_decode"] = lambda: STEP
    batch = ModuleType("sglang.srt.managers.schedule_batch")
    vars(batch)["NextBatchPlan"] = SimpleNamespace
    for module in (sizing, batch):
        name = module.__name__
        for i in range(1, len(name.split("."))):
            parent = ".".join(name.split(".")[:i])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(away, "room", away.Room())
    monkeypatch.setattr(preemption, "AHEAD", 3)


class Request:
    def __init__(self, name: int, prompt: int, new: int) -> None:
        self.rid = name
        self.origin_input_ids = [1] * prompt
        self.output_ids: list[int] = []
        self.sampling_params = SimpleNamespace(max_new_tokens=new)
        self.kv = SimpleNamespace(kv_allocated_len=0)
        self.to_finish = None

    @property
    def done(self) -> bool:
        return len(self.output_ids) >= self.sampling_params.max_new_tokens


class Batch:
    spec_algorithm = None

    def __init__(self, reqs: list[Request]) -> None:
        self.reqs = reqs
        self.batch_is_full = False

    def is_empty(self) -> bool:
        return not self.reqs

    def merge_batch(self, other: Batch) -> None:
        self.reqs = self.reqs + other.reqs

    def new_tokens_required_next_decode(self) -> int:
        return STEP * len(self.reqs)


class Scheduler:
    """The host's loop, as far as the hooks see it, over a pool of `size` slots."""

    def __init__(self, size: int, waiting: list[Request], overlap: bool) -> None:
        self.size = size
        self.waiting = deque(waiting)
        self.running = Batch([])
        self.enable_overlap = overlap
        self.result_queue: list[int] = []
        self.chunked_req = self.tree_cache = self.draft_worker = None
        self.metrics_reporter = SimpleNamespace(is_stats_logging_rank=False)
        self.token_to_kv_pool_allocator = self
        self.events: list[tuple[str, int]] = []
        self.host_peak = 0

    def held(self) -> int:
        reqs = [*self.running.reqs, *([self.chunked_req] if self.chunked_req else [])]
        return sum(req.kv.kv_allocated_len for req in reqs)

    def check_decode_capacity(self, num_tokens: int, **unused: Any) -> bool:
        return self.held() + num_tokens <= self.size

    def prefill(self, running_batch: Batch) -> Any:
        """The host's: admits the first that wait, if the reservation lets them."""
        admitted = []
        while self.waiting:
            req = self.waiting[0]
            live = [*running_batch.reqs, *admitted]
            room = away.room.host_tokens
            if away.room.away or not (
                reservation.fits_soon(req, live, self.size)
                and reservation.fits(req, live, self.size, room)
            ):
                break
            admitted.append(self.waiting.popleft())
        for req in admitted:
            req.kv.kv_allocated_len = len(req.origin_input_ids)
            self.events.append(("start", req.rid))
        running_batch.reqs = running_batch.reqs + admitted
        return SimpleNamespace(batch_to_run=None, running_batch=running_batch)

    def decode(self, batch: Batch) -> Batch:
        for req in batch.reqs:
            req.kv.kv_allocated_len += STEP
            req.output_ids.append(0)
        assert self.held() <= self.size
        return batch

    def turn(self) -> None:
        plan = preemption.bring_back(
            lambda self, running_batch: self.prefill(running_batch), self, self.running
        )
        self.running = plan.running_batch
        batch = preemption.make_room(
            lambda self, batch: self.decode(batch), self, self.running
        )
        self.result_queue = [] if batch is None else [1]
        for req in [req for req in self.running.reqs if req.done]:
            self.running.reqs = [one for one in self.running.reqs if one is not req]
            self.events.append(("end", req.rid))
        self.host_peak = max(self.host_peak, away.room.used())


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending and fetching without tensors."""

    def send(scheduler: Scheduler, batch: Batch) -> away.Away:
        req = batch.reqs[-1]
        batch.reqs = batch.reqs[:-1]
        one = away.Away(Batch([req]), [], req.kv.kv_allocated_len)
        away.room.away.insert(0, one)
        scheduler.events.append(("send", req.rid))
        return one

    def fetch(scheduler: Scheduler, one: away.Away) -> None:
        away.room.away.remove(one)
        scheduler.events.append(("back", one.req.rid))

    monkeypatch.setattr(away, "send", send)
    monkeypatch.setattr(away, "fetch", fetch)


def serve(scheduler: Scheduler, turns: int = 5000) -> list[tuple[str, int]]:
    """Run until nobody is left; the events. Fails if somebody is."""
    for _ in range(turns):
        if not (scheduler.running.reqs or scheduler.waiting or away.room.away):
            return scheduler.events
        scheduler.turn()
    raise AssertionError(f"starved: {scheduler.events[-20:]}")


def requests(*shapes: tuple[int, int]) -> list[Request]:
    return [Request(i, prompt, new) for i, (prompt, new) in enumerate(shapes)]


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize("overlap", [False, True])
def test_the_youngest_leaves_and_comes_back_before_anybody_new(overlap: bool) -> None:
    away.room.host_tokens = 1000
    scheduler = Scheduler(50, requests((8, 30), (8, 30), (8, 30), (8, 4)), overlap)
    events = serve(scheduler)
    names = [name for what, name in events if what == "send"]
    assert names[0] == 3 or names[0] == 2
    assert 0 not in names
    started: list[int] = []
    gone: list[int] = []
    for what, name in events:
        if what == "start":
            assert not gone, "somebody new was admitted while one was away"
            started.append(name)
        elif what == "send":
            assert all(name < other for other in gone), "not the youngest"
            gone.insert(0, name)
        elif what == "back":
            assert name == gone.pop(0), "not the oldest first"
    assert started == sorted(started)


def random_load(seed: int) -> tuple[int, list[tuple[str, int]]]:
    """Random requests, pool and room: how many requests, and the events until all end.

    Fails where the host would have to retract, for a room that is too small.
    """
    rng = random.Random(seed)
    size = rng.randrange(40, 120)
    shapes = []
    for _ in range(rng.randrange(2, 12)):
        prompt = rng.randrange(1, size // 2)
        shapes.append((prompt, rng.randrange(1, size - prompt - 4 * STEP + 1)))
    room = away.room.host_tokens = rng.choice([0, 20, size, 3 * size, 100 * size])
    scheduler = Scheduler(size, requests(*shapes), overlap=bool(seed % 2))

    def retract(self: Scheduler, batch: Batch) -> Batch:
        assert self.held() + STEP * len(batch.reqs) <= self.size, "the host retracts"
        return Scheduler.decode(self, batch)

    scheduler.decode = retract.__get__(scheduler)  # type: ignore[method-assign]
    events = serve(scheduler)
    assert scheduler.host_peak <= room
    return len(shapes), events


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize("seed", range(60))
def test_nobody_starves_and_host_memory_suffices(seed: int) -> None:
    count, events = random_load(seed)
    assert sum(what == "end" for what, _ in events) == count
    if not away.room.host_tokens:
        assert {what for what, _ in events} == {"start", "end"}


@pytest.mark.usefixtures("moved")
def test_control_a_room_for_what_is_missing_is_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The largest request has to count twice: one is sent away whole."""

    def once(req: Any, live: list[Any], capacity: int, host: int) -> bool:
        needs = sum(map(reservation.need, {id(r): r for r in (*live, req)}.values()))
        return needs - host <= capacity

    monkeypatch.setattr(reservation, "fits", once)
    with pytest.raises(AssertionError, match="the host retracts"):
        for seed in range(60):
            away.room.away.clear()
            random_load(seed)


@pytest.mark.usefixtures("moved")
def test_without_a_room_everything_is_reserved() -> None:
    """Two whole contexts: side by side with host memory, else one by one."""
    shapes = ((4, 60), (4, 60))
    for room, together in ((1000, True), (0, False)):
        away.room.host_tokens = room
        events = serve(Scheduler(80, requests(*shapes), overlap=False))
        order = [event for event in events if event[0] in ("start", "end")]
        assert (order[1] == ("start", 1)) is together


@pytest.mark.usefixtures("moved")
def test_a_prompt_under_way_keeps_its_slots() -> None:
    """Decode waits for it where nobody can leave, and the youngest leaves otherwise."""
    away.room.host_tokens = 1000
    first, second = requests((10, 20), (10, 20))
    scheduler = Scheduler(40, [], overlap=False)
    scheduler.running = Batch([first, second])
    for req in (first, second):
        req.kv.kv_allocated_len = 10
    prompt = Request(9, 21, 1)
    prompt.kv.kv_allocated_len = 5
    scheduler.chunked_req = prompt
    assert preemption.make_room(Scheduler.decode, scheduler, scheduler.running)
    assert scheduler.events == [("send", 1)]
    prompt.origin_input_ids = [1] * 29
    assert preemption.make_room(Scheduler.decode, scheduler, scheduler.running) is None
    assert scheduler.events == [("send", 1)]
    away.room.away.clear()


@pytest.mark.usefixtures("moved")
def test_a_result_in_flight_is_processed_first() -> None:
    away.room.host_tokens = 1000
    first, second = requests((10, 20), (10, 20))
    for req in (first, second):
        req.kv.kv_allocated_len = 10
    scheduler = Scheduler(21, [], overlap=True)
    scheduler.running = Batch([first, second])
    scheduler.result_queue = [1]
    assert preemption.make_room(Scheduler.decode, scheduler, scheduler.running) is None
    assert scheduler.events == []
    scheduler.result_queue = []
    assert preemption.make_room(Scheduler.decode, scheduler, scheduler.running)
    assert scheduler.events == [("send", 1)]


def test_a_full_room_leaves_it_to_the_host() -> None:
    """`retraction`, the second lock, answers then."""
    away.room.host_tokens = 9
    first, second = requests((10, 20), (10, 20))
    for req in (first, second):
        req.kv.kv_allocated_len = 10
    scheduler = Scheduler(21, [], overlap=False)
    batch = Batch([first, second])
    found = preemption.make_room(lambda self, batch: "the host's", scheduler, batch)
    assert found == "the host's"
    assert batch.reqs == [first, second]


def test_idle_only_when_nobody_is_away() -> None:
    assert preemption.not_idle(True, None)
    assert not preemption.not_idle(False, None)
    away.room.away.append(away.Away(Batch(requests((1, 1))), [], 3))
    assert not preemption.not_idle(True, None)
    answer = SimpleNamespace(internal_state={})
    preemption.add_counts(answer, None, None)
    counts = answer.internal_state["sglang_exact_preemption"]
    assert (counts["away"], counts["away_tokens"]) == (1, 3)
