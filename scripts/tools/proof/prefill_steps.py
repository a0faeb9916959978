# SPDX-License-Identifier: Apache-2.0
"""Steps of a model in this process, with a prefill graph and without: their bits."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

SHAPES = ("one", "several", "continued", "kept")
"""A step of one prompt, of three, of a prompt whose first chunk came before, and of
three whose states at their last chunk are kept, as the prefix cache has it."""
OF_THREE = ("several", "kept")
PREFIX, CHUNK, SEED = 64, 64, 20261201


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
