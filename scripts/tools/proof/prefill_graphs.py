# SPDX-License-Identifier: Apache-2.0
"""Prove that a prefill graph has the bits of the step without it.

    scripts/gpu_prefill_graphs --state DIR --out results/gpu
    scripts/gpu_prefill_graphs --state DIR --out DIR --rehearsal   # without a GPU

One process holds the model, without a server. For every bucket b, steps of b/2 + 1,
b - 1 and b tokens run twice from the same pools: once as the server runs them, padded
to the bucket and replayed, and once eagerly. Compared as integers: logits, every slot
of the KV cache, every conv and GDN state, and what no request of the step owns with
what was there before. A rehearsal has no graphs: it pads the eager step instead.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.proof import matrix
from tools.proof.matrix import DISABLE_VARIABLE, WEIGHTS_VARIABLE, Row, say

if TYPE_CHECKING:
    import torch

SHAPES = ("one", "several", "continued", "kept")
"""A step of one prompt, of three, of a prompt whose first chunk came before, and of
three whose states at their last chunk are kept, as the prefix cache has it."""
OF_THREE = ("several", "kept")
PREFIX, CHUNK, SEED = 64, 64, 20261201
ARMS = {
    "exact": "every prefill graph against the step without it",
    "rows-planted": "control: a layer that looks at the number of rows",
    "tables-stale": "control: GDN's tables of the capture, not of the step",
    "default-mode": "control: the host's default mode",
}
"""Arms and their titles; of all but the first the bits are expected to differ."""


class Case(NamedTuple):
    """One step: the bucket that it is padded to, its tokens, how they are shared."""

    bucket: int
    tokens: int
    shape: str


def cases(buckets: Iterable[int]) -> Iterator[Case]:
    """Every bucket with the least, one less than the most, and the most tokens in it.

    A bucket takes a step only from half of its rows on, and above the one below.
    """
    below = 0
    for bucket in sorted(buckets):
        least = max(below + 1, -(-bucket // 2))
        for tokens in sorted({least, max(least, bucket - 1), bucket}):
            for shape in SHAPES:
                parts = split(tokens, shape)
                if min(parts) > 0 and (shape != "kept" or max(parts) >= CHUNK):
                    yield Case(bucket, tokens, shape)
        below = bucket


def split(tokens: int, shape: str) -> list[int]:
    """Tokens of each request in a step."""
    if shape not in OF_THREE:
        return [tokens]
    small, middle = max(tokens // 5, 1), max(tokens // 3, 1)
    return [middle, small, tokens - middle - small]


class Bits(NamedTuple):
    """What a step leaves: its logits, the pools, and what it owns of them.

    `pools` holds (name, tensor [slots, ...]); `owned` the slots of each kind of pool,
    the first slot of the KV cache among them, where the host lets padded rows write.
    """

    logits: torch.Tensor
    pools: list[tuple[str, torch.Tensor]]
    owned: dict[str, torch.Tensor]


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, so that -0.0 and NaN count."""
    import torch

    kinds = {2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements of which any bit differs; all of them where shapes do."""
    if a.shape != b.shape:
        return int(max(a.numel(), b.numel(), 1))
    return int((integers(a) != integers(b)).sum())


def compare(before: list[tuple[str, Any]], graph: Bits, eager: Bits) -> dict[str, int]:
    """Differing elements: logits, KV, states, and what no request of the step owns."""
    found = {"logits": differing(graph.logits, eager.logits), "kv": 0, "states": 0}
    found["foreign"] = 0
    pools = zip(before, graph.pools, eager.pools, strict=True)
    for (name, old), (_, new), (_, want) in pools:
        kind = "kv" if name == "kv" else "states"
        owned = graph.owned[kind]
        inside = owned[1:] if kind == "kv" else owned
        found[kind] += differing(new[inside], want[inside])
        left, was = new.clone(), old.clone()
        left[owned], was[owned] = 0, 0
        found["foreign"] += differing(left, was)
    return found


class Stand:
    """A model in this process, and its steps.

    Args:
        words: flags of the host.
        rehearsal: whether steps are padded by hand.
        arm: one of `ARMS`; what the control of that name breaks.
    """

    def __init__(self, words: list[str], rehearsal: bool, arm: str) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
        from sglang.srt.server_args import PortArgs, prepare_server_args

        self.host, self.rehearsal = one_batch, rehearsal
        # The models of the proofs have no tokenizer, and none is needed.
        one_batch.get_tokenizer = lambda *_, **__: None
        args = prepare_server_args(words)
        args.resolve_once()
        args.check_server_args()
        one_batch._set_envs_and_config(args)
        rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
        one_batch._init_process_global_configs()
        held, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
        self.runner: Any = held.torch_runner
        self.graphs = self.runner.prefill_cuda_graph_runner
        self.replayed = 0
        self.vocab = int(self.runner.model_config.vocab_size)
        self.whole = rehearsal or bool(
            self.runner.attn_backend.use_captured_forward_metadata_for_breakable_cuda_graph
        )
        if arm == "rows-planted":
            self._plant()
        elif arm == "tables-stale":
            linear = self.runner.attn_backend.linear_attn_backend
            linear.refresh_prefill_graph_metadata = lambda *_: None

    @property
    def buckets(self) -> list[int]:
        """Rows of the captured graphs; some of the host's own in a rehearsal."""
        if self.rehearsal:
            return [4, 20]
        return list(getattr(self.graphs, "capture_num_tokens", ()))

    def pools(self) -> list[tuple[str, torch.Tensor]]:
        """Every buffer that a step may write: KV by layer, then conv and states."""
        kv, made = self.runner.token_to_kv_pool, []
        kv = getattr(kv, "full_kv_pool", kv)
        for buffer in (*kv.k_buffer, *kv.v_buffer):
            made.append(("kv", buffer))
        cache = self.runner.req_to_token_pool.mamba_pool.mamba_cache
        for buffer in (*cache.conv, cache.temporal):
            made += [("states", layer) for layer in buffer]
        return made

    def _plant(self) -> None:
        """A layer whose last bit depends on the number of rows: what must be found."""
        import torch

        def flip(_: Any, __: Any, out: Any) -> Any:
            if out.shape[0] % 2 == 0:
                return out
            return (integers(out) ^ 1).view(torch.bfloat16)

        kind = "Qwen2MoeMLP"
        layers = [m for m in self.runner.model.modules() if type(m).__name__ == kind]
        layers[0].register_forward_hook(flip)

    def requests(self, case: Case, seed: int) -> list[Any]:
        """The requests of a step; of a continued one the first chunk comes first."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        rng = random.Random(f"{SEED}-{seed}")
        made = []
        ahead = PREFIX if case.shape == "continued" else 0
        for number, tokens in enumerate(split(case.tokens, case.shape)):
            ids = [rng.randrange(3, self.vocab - 3) for _ in range(ahead + tokens)]
            request = Req(
                rid=str(number),
                origin_input_text="",
                origin_input_ids=array("q", ids),
                sampling_params=SamplingParams(temperature=0, max_new_tokens=4),
            )
            request.full_untruncated_fill_ids = request.origin_input_ids
            request.logprob_start_len = -1
            request.extend_end = ahead or len(ids)
            made.append(request)
        return made

    def step(self, case: Case, seed: int, padded: bool) -> Bits:
        """One step on cleared pools; `padded` is the way with the graph."""
        runner = self.runner
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()
        requests = self.requests(case, seed)
        runner.prefill_cuda_graph_runner = None
        if case.shape == "continued":
            self.host.extend(requests, runner)
            for request in requests:
                request.prefix_len = request.extend_end
                request.extend_end = len(request.full_untruncated_fill_ids)
        forward = step = runner.forward
        if padded and self.rehearsal:
            step = lambda batch: forward(pad(batch, case.bucket))  # noqa: E731
            self.replayed += 1
        elif padded:
            runner.prefill_cuda_graph_runner = self.graphs
            step = self._counted(forward)
        kept = case.shape == "kept"
        runner.forward = (
            (lambda batch: step(keep(batch, self._kept_slots()))) if kept else step
        )
        try:
            _, logits, batch = self.host.extend(requests, runner)
        finally:
            runner.forward = forward
        return Bits(
            logits.clone(),
            [(name, buffer.clone()) for name, buffer in self.pools()],
            self._owned(batch, requests, kept),
        )

    def _counted(self, forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(batch: Any) -> Any:
            out = forward(batch)
            self.replayed += bool(out.can_run_graph)
            return out

        return counted

    def _kept_slots(self) -> list[int]:
        """Slots of states that no request gets: the pool gives away its first ones."""
        last = self.pools()[-1][1].shape[0] - 1
        return [last - row for row in range(len(split(CHUNK, "kept")))]

    def _owned(
        self, batch: Any, requests: list[Any], kept: bool
    ) -> dict[str, torch.Tensor]:
        import torch

        pool = self.runner.req_to_token_pool
        rows = torch.tensor([r.kv.req_pool_idx for r in requests], device=batch.device)
        slots = [
            pool.req_to_token[int(row), : len(r.full_untruncated_fill_ids)].long()
            for row, r in zip(rows, requests, strict=True)
        ]
        padding = torch.zeros(1, dtype=torch.long, device=batch.device)
        states = pool.translate_mamba_indices(pool.get_mamba_indices(rows)).long()
        if kept:
            more = [
                slot
                for slot, r in zip(self._kept_slots(), requests, strict=True)
                if len(r.full_untruncated_fill_ids) >= CHUNK
            ]
            states = torch.cat([states, states.new_tensor(more)])
        return {"kv": torch.cat([padding, *slots]), "states": states}

    def judge(self, case: Case, seed: int) -> dict[str, int]:
        """A step both ways from one state of the pools, and what differs."""
        live = self.pools()
        before = [(name, buffer.clone()) for name, buffer in live]
        graph = self.step(case, seed, padded=True)
        for (_, buffer), (_, old) in zip(live, before, strict=True):
            buffer.copy_(old)
        eager = self.step(case, seed, padded=False)
        return compare(before, graph, eager)

    def noise(self) -> None:
        """Fill the pools, so that an unwritten slot is no zero."""
        import torch

        torch.manual_seed(SEED)
        for _, buffer in self.pools():
            buffer.normal_()


def keep(batch: Any, slots: list[int]) -> Any:
    """A ForwardBatch whose requests of a chunk or more are kept in slots; in place."""
    new, old = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    kept = [tokens >= CHUNK for tokens in new]
    ends = [a + b if k else -1 for a, b, k in zip(new, old, kept, strict=True)]
    tensor = batch.req_pool_indices.new_tensor
    batch.mamba_prefill_track_mask_cpu, batch.mamba_track_seqlens_cpu = kept, ends
    batch.mamba_track_mask = tensor(kept).bool()
    batch.mamba_track_seqlens = tensor(ends)
    batch.mamba_track_indices = tensor(slots).long()
    return batch


def pad(batch: Any, rows: int) -> Any:
    """A ForwardBatch whose rows are rounded up, as a graph's are; in place."""
    import torch

    real = len(batch.input_ids)

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        more = tensor.new_zeros((*tensor.shape[:-1], rows - real))
        return torch.cat([tensor, more], -1)

    batch.input_ids = longer(batch.input_ids)
    batch.positions = longer(batch.positions)
    batch.out_cache_loc = longer(batch.out_cache_loc)
    if batch.mrope_positions is not None:
        batch.mrope_positions = longer(batch.mrope_positions)
    batch.global_num_token_non_padded_cpu = real
    return batch


def work(answers: Any, words: list[str], rehearsal: bool, arm: str, few: bool) -> None:
    """In a process of its own: every case, one message each, then None."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    stand = Stand(words, rehearsal, arm)
    stand.noise()
    answers.put({"buckets": stand.buckets, "whole": stand.whole})
    todo = list(cases(stand.buckets))[:: 4 if rehearsal else 7 if few else 1]
    for number, case in enumerate(todo):
        found = stand.judge(case, number)
        answers.put({**case._asdict(), **found, "replayed": stand.replayed > number})
        stand.replayed = number + 1
    answers.put(None)


def flags(model: Path, arm: str, rehearsal: bool) -> list[str]:
    """Flags of the host for one arm."""
    words = ["--model-path", str(model), "--skip-tokenizer-init", "--dtype", "bfloat16",
             "--max-running-requests", "8", "--max-mamba-cache-size", "16",
             "--context-length", "2048",
             "--disable-radix-cache", "--mamba-ssm-dtype", "float32",
             "--attention-backend", "triton"]  # fmt: skip
    if arm != "default-mode":
        words += ["--enable-deterministic-inference"]
    if rehearsal:
        from sglang_exact.rehearsal.server import CPU_FLAGS

        return [*words, *CPU_FLAGS, "--max-total-tokens", "2048"]
    return [
        *words, "--load-format", "dummy", "--cuda-graph-max-bs-decode", "8",
        "--cuda-graph-max-bs-prefill", "512", "--mem-fraction-static", "0.8",
        "--max-total-tokens", "4096", "--chunked-prefill-size", "8192",
    ]  # fmt: skip


def environment(arm: str, rehearsal: bool) -> dict[str, str]:
    """Variables of an arm's process; the default mode has no overlay."""
    from sglang_exact.rehearsal.environment import environment as rehearsed

    made = rehearsed() if rehearsal else dict(os.environ)
    made["SGLANG_EXACT_ENABLE"] = "0" if arm == "default-mode" else "1"
    if not rehearsal:
        made[WEIGHTS_VARIABLE] = "1"
    made.pop(DISABLE_VARIABLE, None)
    return made


def ask(arm: str, model: Path, rehearsal: bool, limit_s: float) -> Iterator[Row]:
    """The cases of one arm, as they come.

    Raises:
        RuntimeError: its process ended, or said nothing for `limit_s` seconds.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    before = dict(os.environ)
    os.environ.update(environment(arm, rehearsal))
    try:
        words, few = flags(model, arm, rehearsal), arm != "exact" and not rehearsal
        process = context.Process(
            target=work, args=(answers, words, rehearsal, arm, few)
        )
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                found = answers.get(timeout=1)
            except queue.Empty:
                if process.is_alive() and time.monotonic() < deadline:
                    continue
                raise RuntimeError(
                    f"{arm}: found its process ended or silent (status "
                    f"{process.exitcode}), expected every case; see the output above"
                ) from None
            deadline = time.monotonic() + limit_s
            if found is None:
                return
            yield found
    finally:
        process.kill()
        process.join()


def row_of(
    arm: str, found: list[Row], buckets: list[int], whole: bool, seconds: float
) -> Row:
    """The outcome of an arm: how many cases differ, and the first.

    whole: GDN's layers are in the graphs, as they have to be under the overlay.
    """
    parts = ("logits", "kv", "states", "foreign")
    wrong = [case for case in found if any(case[part] for part in parts)]
    control = arm != "exact"
    every = all(case["replayed"] for case in found)
    held = bool(wrong) if control else bool(found) and not wrong
    return {
        "arm": arm,
        "title": ARMS[arm],
        "buckets": buckets,
        "cases": len(found),
        "different": {part: sum(bool(c[part]) for c in found) for part in parts},
        "first": wrong[0] if wrong else None,
        "replayed": every,
        "gdn_in_graph": whole,
        "tally": {"compared": len(found), "different": len(wrong)},
        "seconds": round(seconds, 1),
        "as_expected": held and every and (whole or arm == "default-mode"),
    }


class Run(matrix.Matrix):
    """All arms of one call."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(
            "gpu_prefill_graphs", args, Path(args.out) / f"{args.name}.json"
        )

    def one(self, arm: str) -> None:
        """One arm; a failure is noted, not raised."""
        began, found, buckets, whole = time.monotonic(), [], [], False
        model = self.models / f"target-{self.args.layers}"
        try:
            for case in ask(arm, model, self.rehearsal, self.args.start_timeout):
                if "buckets" in case:
                    buckets, whole = case["buckets"], case["whole"]
                    say(f"{arm}: up in {time.monotonic() - began:.0f} s, {buckets}")
                    continue
                found.append(case)
                if len(found) % 50 == 0 or self.rehearsal:
                    say(f"  {case}")
        except RuntimeError as error:
            self.fail(arm, error)
            return
        row = row_of(arm, found, buckets, whole, time.monotonic() - began)
        self.rows[self.key(row)] = row
        say(shown(row))
        self.write()


def shown(row: Row) -> str:
    """One row in one line."""
    parts = ", ".join(f"{n} {part}" for part, n in row["different"].items())
    return (
        f"{row['arm']}: {row['cases']} cases, {row['tally']['different']} different "
        f"({parts}), graphs in all: {row['replayed']}, as expected: "
        f"{row['as_expected']}, first {row['first']}, {row['seconds']} s"
    )


def main(args: argparse.Namespace) -> int:
    """Run the arms; 0 if every row is as expected."""
    run = Run(args)
    run.path.parent.mkdir(parents=True, exist_ok=True)
    run.keep_earlier(args.arms)
    matrix.make_models(run.models, args.layers, run.rehearsal, ())
    for arm in args.arms:
        if run.left() < 0:
            run.not_run.append(arm)
            continue
        run.one(arm)
    for row in run.rows.values():
        say(shown(row))
    return run.finish()
