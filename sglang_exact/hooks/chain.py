# SPDX-License-Identifier: Apache-2.0
"""Every verified block is one chain: NGRAM drafts one path, every drafter is checked.

Why: a row of verify is computed as if the rows before it were its prefix. The host's
    n-gram trie adds a path for every suffix that matches and pads with token 0 under
    the root (sglang/kernels/jit/csrc/ngram_corpus/trie.cpp:232, result.cpp:38), with
    a breadth of 1 as well: siblings, which its tree acceptance takes.
What: the trie is asked for one token at a time, so it gives the first child of the
    longest suffix it knows: the most recent one (BFS) or the most frequent one (PROB).
    Asked again behind that token until the block is full, which makes one path from
    the root; where nothing is known the host's padding goes on. Before a block is
    uploaded its mask has to be the triangle; for the drafters that bring no mask the
    number of branches has to be 1. Anything else raises.
Scope: NGRAM without external corpora; EAGLE, NEXTN, DFLASH, DFlash2 and DSpark are
    only checked.
Retire when: the host drafts chains from its trie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.base import HOST_SCHEDULER, Unsupported, hook, refuse_unknown
from sglang_exact.reasons import Reason, message

if TYPE_CHECKING:
    import numpy as np

_SPECULATIVE = "sglang.srt.speculative"
_CORPUS = f"{_SPECULATIVE}.cpp_ngram.ngram_corpus.NgramCorpus"
_WORKER = f"{_SPECULATIVE}.ngram_worker.NGRAMWorker"
ONE_TOKEN = 2
"""Width of the trie's answer: the committed token and one draft."""


@hook(
    f"{_CORPUS}.batch_get",
    "AROUND",
    name="ngram_chain",
    relies_on=(f"{_CORPUS}.erase_match_state",),
)
def chains(
    original_fn: Callable[..., tuple[np.ndarray, np.ndarray]],
    self: Any,
    req_ids: Sequence[str],
    batch_tokens: Sequence[Sequence[int]],
    total_lens: Sequence[int],
    **unknown: object,
) -> tuple[np.ndarray, np.ndarray]:
    """Around NgramCorpus.batch_get: one path per request.

    batch_tokens: the last tokens of each request; total_lens: its whole length.
    Returns ids int64 [bs * width], column 0 the last token, and the mask int64
    [bs * width * width], as the host does.
    """
    refuse_unknown("NgramCorpus.batch_get", unknown)
    import numpy as np

    width = self.draft_token_num
    paths = [list(tokens) for tokens in batch_tokens]
    # A state follows one path; the host's would mix drafts that were rejected in.
    walks = [f"chain of {rid}" for rid in req_ids]
    for step in range(width - 1):
        lens = [length + step for length in total_lens]
        ids, _ = original_fn(self, walks, paths, lens)
        for path, token in zip(paths, ids.reshape(-1, ONE_TOKEN)[:, 1], strict=True):
            path.append(int(token))
    self.erase_match_state(walks)
    blocks = np.array([path[-width:] for path in paths], dtype=np.int64)
    return blocks.reshape(-1), _triangles(len(paths), width).reshape(-1)


@hook(f"{_CORPUS}.__init__", "AROUND", name="ngram_chain_corpus")
def one_token_corpus(
    original_fn: Callable[..., None],
    self: Any,
    max_trie_depth: int = 18,
    min_bfs_breadth: int = 1,
    max_bfs_breadth: int = 8,
    draft_token_num: int = 8,
    match_type: str = "BFS",
    capacity: int = 1000000,
    external_sam_budget: int = 0,
    external_corpus_max_tokens: int = 10000000,
    **unknown: object,
) -> None:
    """Around NgramCorpus.__init__: the trie answers with one draft token."""
    refuse_unknown("NgramCorpus.__init__", unknown)
    original_fn(
        self,
        max_trie_depth=max_trie_depth,
        min_bfs_breadth=min_bfs_breadth,
        max_bfs_breadth=max_bfs_breadth,
        draft_token_num=ONE_TOKEN,
        match_type=match_type,
        capacity=capacity,
        external_sam_budget=external_sam_budget,
        external_corpus_max_tokens=external_corpus_max_tokens,
    )
    self.draft_token_num = draft_token_num


@hook(f"{HOST_SCHEDULER}.add_external_corpus", "AROUND", name="external_corpus")
def add_external_corpus(
    original_fn: Callable[..., Any], self: Any, recv_req: Any
) -> Any:
    """Around Scheduler.add_external_corpus: refused, in the host's own answer."""
    from sglang.srt.managers.io_struct import AddExternalCorpusReqOutput

    reason = Reason(
        "/add_external_corpus",
        "the trie of what this server wrote (a chain comes from one trie)",
        "leave the corpus out",
    )
    return AddExternalCorpusReqOutput(success=False, message=message([reason]))


def _triangles(count: int, width: int) -> np.ndarray:
    """Masks of chains, int64 [count, width, width]."""
    import numpy as np

    rows = np.arange(width)
    triangle = (rows[:, None] >= rows).astype(np.int64)
    masks: np.ndarray = np.broadcast_to(triangle, (count, width, width))
    return masks


@hook(
    f"{_WORKER}._prepare_draft_tokens",
    "AROUND",
    name="verify_chain_ngram",
    relies_on=(
        f"{_WORKER}._prepare_for_speculative_decoding",
        "sglang.kernels.ops.speculative.reconstruct_tree."
        "reconstruct_indices_from_tree_mask_func",
    ),
)
def ngram_block(
    original_fn: Callable[..., tuple[np.ndarray, np.ndarray]], self: Any, batch: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Around NGRAMWorker._prepare_draft_tokens: raise unless every block is a chain.

    Raises Unsupported.
    """
    ids, mask = original_fn(self, batch)
    width = self.draft_token_num
    found = mask.reshape(-1, width, width) != 0
    trees = (found != _triangles(len(found), width)).any(axis=(1, 2))
    if trees.any():
        first = int(trees.argmax())
        raise Unsupported(
            f"found a draft tree for {int(trees.sum())} of {len(found)} requests "
            f"(parents {_parents(found[first])}), expected chains; fix: install the "
            "pinned host release, and drop SGLANG_EXACT_TEST_DISABLE_HOOKS"
        )
    return ids, mask


def _parents(mask: np.ndarray) -> list[int]:
    """The nearest ancestor of each row, -1 for the root."""
    return [max([j for j in range(i) if row[j]], default=-1)
            for i, row in enumerate(mask)]  # fmt: skip


def _check_branches(verify_input: Any, width: int | None = None) -> None:
    """Raise Unsupported unless a block without a mask of its own is a chain."""
    tokens = verify_input.draft_token_num
    if verify_input.topk != 1 or width not in (None, tokens):
        raise Unsupported(
            f"found a draft tree (topk {verify_input.topk}, {tokens} tokens, depth "
            f"{width}), expected a chain; fix: pass --speculative-eagle-topk 1"
        )


@hook(
    f"{_SPECULATIVE}.eagle_utils.eagle_prepare_for_verify",
    "AROUND",
    name="verify_chain_eagle",
)
def eagle_block(
    original_fn: Callable[..., Any],
    verify_input: Any,
    req_to_token_pool: Any,
    batch: Any,
    target_worker: Any,
    **unknown: object,
) -> Any:
    """Around eagle_prepare_for_verify, of EAGLE, EAGLE3 and MTP."""
    refuse_unknown("eagle_prepare_for_verify", unknown)
    _check_branches(verify_input, verify_input.max_tree_depth)
    return original_fn(verify_input, req_to_token_pool, batch, target_worker)


@hook(
    f"{_SPECULATIVE}.dflash_info.DFlashVerifyInput.prepare_for_verify",
    "AROUND",
    name="verify_chain_dflash",
)
def dflash_block(
    original_fn: Callable[..., Any],
    self: Any,
    batch: Any,
    target_worker: Any,
    **kw: Any,
) -> Any:
    """Around DFlashVerifyInput.prepare_for_verify, of DFLASH, DFlash2 and DSpark."""
    _check_branches(self)
    return original_fn(self, batch, target_worker, **kw)
