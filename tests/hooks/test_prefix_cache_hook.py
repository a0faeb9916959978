# SPDX-License-Identifier: Apache-2.0
"""What the prefix cache takes and gives: the guards, and the launches of a prefill."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from test_prefill_bits import (  # noqa: E402
    SHAPES,
    Shape,
    empty_states,
    inputs,
    kernel,
    prefill,
    same,
    shape,
)

from sglang_exact.hooks import (  # noqa: E402
    autotune,
    prefix_cache,
    prefix_room,
    prefix_snapshot,
)
from sglang_exact.hooks.base import UnknownArgument, Unsupported  # noqa: E402

__all__ = ["kernel", "shape"]
GRID = 64


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "mamba_prefill_chunk_grid", lambda: GRID)


@pytest.mark.usefixtures("grid")
@pytest.mark.parametrize(
    ("found", "kept"),
    [(None, None), (0, 0), (64, 64), (128, 128), (100, 0), (192, 0), (2**20, 0)],
)
def test_only_cuts_of_the_prompt_are_kept(found: int | None, kept: int | None) -> None:
    """Past the prompt of 150 tokens lies what decode computed."""
    req = SimpleNamespace(origin_input_ids=[7] * 150)
    ours = prefix_cache.keep_prefill_alone(found, None, req, None, 400, False)
    assert ours == kept


@pytest.mark.usefixtures("grid")
def test_hit_off_the_grid_raises() -> None:
    for hit in (0, 64, 640):
        prefix_cache.check_match(SimpleNamespace(device_prefix_len=hit), None, None)
    with pytest.raises(Unsupported, match="hit of 63 tokens"):
        prefix_cache.check_match(SimpleNamespace(device_prefix_len=63), None, None)


def test_interval_lies_beyond_the_context() -> None:
    assert prefix_cache.interval_reasons(2**30, 262144) == []
    assert prefix_cache.interval_reasons(513, 512) == []
    for interval in (64, 512):
        (reason,) = prefix_cache.interval_reasons(interval, 512)
        assert reason.found.startswith(f"--mamba-track-interval {interval} ")


class Pools:
    """Stands in for the host's configurator: sizes with the cache, then without."""

    mambaish_config: str | None = "any"
    model_config = SimpleNamespace(context_len=1000)

    def __init__(self, *found: Any) -> None:
        self.found, self.calls = list(found), 0

    def resolve(self, own: Any, *, pre_model_load_memory: int) -> Any:
        assert own is self and pre_model_load_memory == 7
        self.calls += 1
        found = self.found.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def sized(running: int, tokens: int) -> SimpleNamespace:
    return SimpleNamespace(max_running_requests=running, max_total_num_tokens=tokens)


@pytest.mark.parametrize(
    ("wanted", "first", "off"),
    [
        (None, sized(8, 1016), False),
        (None, sized(7, 9999), True),
        (2, sized(2, 1016), False),
        (2, sized(1, 1016), True),
        (48, sized(17, 5000), False),
        (48, sized(17, 900), True),
        (48, RuntimeError("no room"), True),
        (48, ValueError("no room"), True),
    ],
)
def test_cache_takes_no_room_from_who_runs(
    monkeypatch: pytest.MonkeyPatch, wanted: int | None, first: Any, off: bool
) -> None:
    """Too few requests, or not the context: off, and sized again."""
    context = pytest.importorskip("sglang.srt.runtime_context")
    schedule = SimpleNamespace(max_mamba_cache_size=None, max_running_requests=wanted)
    memory, turned = SimpleNamespace(disable_radix_cache=False), []
    monkeypatch.setattr(context, "get_schedule", lambda: schedule)
    monkeypatch.setattr(context, "get_memory", lambda: memory)
    monkeypatch.setattr(prefix_room, "slack", lambda: 16)
    monkeypatch.setattr(prefix_room, "_turn_off", lambda: turned.append(True))
    second = sized(99, 9999)

    def make(pools: Pools) -> Any:
        return prefix_room.make_room(pools.resolve, pools, 7)

    pools = Pools(first, second)
    assert make(pools) is (second if off else first)
    assert (pools.calls, bool(turned)) == (1 + off, off)
    # Who names a size insists; without a cache there is nothing to decide.
    turned.clear()
    schedule.max_mamba_cache_size = 5
    assert make(Pools(few := sized(1, 10))) is few
    schedule.max_mamba_cache_size, memory.disable_radix_cache = None, True
    assert make(Pools(few)) is few and not turned
    # A model without states has none to keep.
    memory.disable_radix_cache, dense = False, Pools(few)
    dense.mambaish_config = None
    assert make(dense) is few and (dense.calls, turned) == (1, [True])


def extend(tensors: list[Any], lengths: list[int], states: Any, **more: Any) -> Any:
    """Our prefill of packed sequences; arguments as those of `prefill`."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(states.device)
    rows = torch.arange(len(lengths), dtype=torch.int32, device=states.device)
    own = SimpleNamespace()
    return prefix_snapshot.kept(
        own, *tensors, ssm_states=states, cache_indices=rows, query_start_loc=starts,
        layer_id=3, **more,
    )[0]  # fmt: skip


@pytest.mark.host
def test_launches_are_those_of_the_host(shape: Shape, kernel: Any) -> None:
    """Three sequences packed, as the host alone prefills them, kept states or not."""
    autotune.pin(kernel)
    lengths = [5, shape.tokens, GRID]
    parts = [inputs(shape, seed, length) for seed, length in enumerate(lengths)]
    packed = [torch.cat(x, 1) for x in zip(*parts, strict=True)]

    def run(launches: Any, **more: Any) -> tuple[Any, Any]:
        states = empty_states(shape, len(lengths))
        output = launches(packed, lengths, states, **more)
        return output.view(torch.int16), states.view(torch.int32)

    host = run(partial(prefill, shape))
    assert same(run(extend), host)
    kept = torch.full_like(empty_states(shape, len(lengths)), float("nan"))
    chunks = torch.tensor([-1, 2, -1], dtype=torch.int32, device=kept.device)
    assert same(run(extend, track_state=kept, track_chunk_idx=chunks), host)
    assert kept[1].isfinite().all()
    assert kept[0].isnan().all() and kept[2].isnan().all()
    # Control: the second sequence without its first token.
    other = [parts[0], [x[:, 1:] for x in parts[1]], parts[2]]
    packed = [torch.cat(x, 1) for x in zip(*other, strict=True)]
    lengths[1] -= 1
    assert not torch.equal(run(extend)[1], host[1])


@pytest.mark.host
@pytest.mark.parametrize("shape", SHAPES[:1], indirect=True)
def test_other_states_and_arguments_are_refused(shape: Shape) -> None:
    tensors, states = inputs(shape, 1, 64), empty_states(shape, 1)
    with pytest.raises(Unsupported, match=r"states of torch\.bfloat16"):
        extend(tensors, [64], states.bfloat16())
    with pytest.raises(UnknownArgument, match="something_new"):
        extend(tensors, [64], states, something_new=1)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_kept_state_is_that_of_a_cut(chunk: int) -> None:
    """At the shape of the 27B model; the self-test asks the same at every start."""
    from sglang_exact.selftest.gdn import Shape as Sizes
    from sglang_exact.selftest.prefix import compare

    assert compare(Sizes(16, 48, 128, 128), chunk, chunk, "cuda") == []
