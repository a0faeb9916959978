# SPDX-License-Identifier: Apache-2.0
"""Drafts: NGRAM's are one path of the host's real trie, trees are refused."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_exact.hooks import base, chain

DEPTH, WIDTH, CAPACITY = 6, 5, 4000
WAYS = ("BFS", "PROB")
TWO_WAYS_ON = ([5, 6, 7], [9, 6, 8, 3])
"""After 5, 6 comes 7; after 6 alone came 8 more recently."""


def _corpus(way: str = "BFS", capacity: int = CAPACITY, width: int = WIDTH) -> Any:
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    return NgramCorpus(
        max_trie_depth=DEPTH,
        min_bfs_breadth=1,
        max_bfs_breadth=1,
        draft_token_num=width,
        match_type=way,
        capacity=capacity,
    )


def _host_tree(corpus: Any, context: list[int], width: int) -> Any:
    """What the host's trie answers by itself: ids [width] and mask [width, width]."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    get = NgramCorpus.batch_get.__wrapped__
    ids, mask = get(corpus, ["host"], [context[-DEPTH:]], [len(context)])
    corpus.erase_match_state(["host"])
    return ids, mask.reshape(width, width)


def _host_corpus(width: int = WIDTH) -> Any:
    """The host's corpus without the hooks."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    corpus = object.__new__(NgramCorpus)
    NgramCorpus.__init__.__wrapped__(
        corpus,
        max_trie_depth=DEPTH,
        min_bfs_breadth=1,
        max_bfs_breadth=1,
        draft_token_num=width,
        capacity=CAPACITY,
    )
    return corpus


def _put(corpus: Any, texts: list[list[int]]) -> None:
    corpus.batch_put(texts)
    corpus.synchronize()


class _Model:
    """The trie in Python: every window's prefixes, how often and when last."""

    def __init__(self) -> None:
        self.ways: dict[tuple[int, ...], dict[int, list[int]]] = {}
        self.clock = 0

    def put(self, text: list[int]) -> None:
        for start in range(len(text)):
            window = text[start : start + DEPTH]
            for i, token in enumerate(window):
                self.clock += 1
                ways = self.ways.setdefault(tuple(window[:i]), {})
                seen = ways.setdefault(token, [0, 0])
                seen[0], seen[1] = seen[0] + 1, self.clock

    def path(self, context: list[int], way: str) -> list[int]:
        """The last token and the chain behind it."""
        path = list(context)
        for _ in range(WIDTH - 1):
            known = {}
            for size in range(1, min(len(path), DEPTH) + 1):
                known = self.ways.get(tuple(path[-size:]), known)
            path.append(self._best(known, way))
        return path[-WIDTH:]

    @staticmethod
    def _best(known: dict[int, list[int]], way: str) -> int:
        if not known:
            return 0
        if way == "BFS":
            return max(known, key=lambda token: known[token][1])
        return min(known, key=lambda token: (-known[token][0], token))


def _is_triangle(mask: Any, count: int, width: int = WIDTH) -> bool:
    triangle = np.tril(np.ones((width, width), dtype=mask.dtype))
    return bool((mask.reshape(count, width, width) == triangle).all())


def _text(rng: random.Random, size: int) -> list[int]:
    """Text that comes back to what it said: a few segments over a few tokens."""
    parts = [[rng.randrange(1, 7) for _ in range(rng.randint(1, 4))] for _ in range(3)]
    text: list[int] = []
    while len(text) < size:
        text += rng.choice(parts)
    return text


def test_a_draft_is_the_longest_suffix_first() -> None:
    """The host proposes 8 and 7 behind one row; the chain takes 7, and then nothing."""
    corpus = _corpus(width=4)
    _put(corpus, list(TWO_WAYS_ON))
    ids, mask = corpus.batch_get(["a", "b"], [[4, 5, 6], [1, 6]], [3, 2])
    assert ids.tolist() == [6, 7, 0, 0, 6, 8, 3, 0]
    assert _is_triangle(mask, 2, 4)
    assert ids.dtype == mask.dtype == "int64"


def test_chains_are_paths_of_the_real_trie() -> None:
    """Any text, either way of matching, batches, and requests that come back."""
    rng = random.Random(3)
    for round_ in range(60):
        way = WAYS[round_ % 2]
        corpus, model = _corpus(way), _Model()
        requests = [_text(rng, rng.randint(1, 12)) for _ in range(rng.randint(1, 4))]
        for _ in range(4):
            names = [f"r{i}" for i in range(len(requests))]
            tails = [text[-DEPTH:] for text in requests]
            lens = [len(text) for text in requests]
            ids, mask = corpus.batch_get(names, tails, lens)
            found = ids.reshape(-1, WIDTH).tolist()
            assert _is_triangle(mask, len(requests))
            assert found == [model.path(tail, way) for tail in tails], (round_, way)
            for text, block in zip(requests, found, strict=True):
                # Some drafts are kept, then comes a token of the text's own.
                text += [*block[1 : rng.randint(1, WIDTH)], rng.randrange(1, 7)]
            _put(corpus, [text[-DEPTH:] for text in requests])
            for text in requests:
                model.put(text[-DEPTH:])
    assert corpus._req_id_to_state_id == {}


def test_chains_outlive_a_full_trie() -> None:
    """A trie that drops its oldest paths still brings chains, of any width."""
    rng = random.Random(4)
    for width in (1, 2, 8, 16):
        corpus = _corpus(capacity=DEPTH + 1, width=width)
        for _ in range(20):
            text = _text(rng, 30)
            _put(corpus, [text])
            ids, mask = corpus.batch_get(["a"], [text[-DEPTH:]], [len(text)])
            assert _is_triangle(mask, 1, width)
            assert ids[0] == text[-1] and set(ids) <= set(range(7))
        corpus.reset()
        ids, _ = corpus.batch_get(["a"], [[9, 5]], [2])
        assert ids.tolist() == [5] + [0] * (width - 1)


def test_control_the_hosts_trie_brings_trees() -> None:
    """With a breadth of 1: siblings by two suffixes, and padding under the root."""
    corpus = _host_corpus(width=4)
    _put(corpus, list(TWO_WAYS_ON))
    ids, mask = _host_tree(corpus, [4, 5, 6], 4)
    assert ids[0] == 6 and set(ids[1:]) == {7, 8, 3}
    assert not _is_triangle(mask, 1, 4)
    ids, mask = _host_tree(corpus, [100, 200], 4)
    assert ids.tolist() == [200, 0, 0, 0] and not _is_triangle(mask, 1, 4)
    rng, trees = random.Random(5), 0
    for _ in range(50):
        text = _text(rng, 40)
        _put(corpus, [text])
        trees += not _is_triangle(_host_tree(corpus, text[-DEPTH:], 4)[1], 1, 4)
    assert trees > 5


def _links(mask: Any, width: int) -> tuple[Any, Any]:
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    return _derive_tree_links(mask.astype(bool), 1, width)


def _parent_of(mask: Any, row: int) -> int:
    return max(j for j in range(row) if mask[row, j])


def test_control_the_hosts_acceptance_takes_siblings() -> None:
    """Two rows that hang on one: a chain's arithmetic saw the first as a prefix."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    corpus = _host_corpus(width=4)
    _put(corpus, list(TWO_WAYS_ON))
    ids, mask = _host_tree(corpus, [4, 5, 6], 4)
    # The target wants the second of two siblings, whichever the hash table puts there.
    assert _parent_of(mask, 1) == _parent_of(mask, 2) == 0
    want = [int(ids[2]), 1, 1, 1]
    next_token, next_sibling = _links(mask, 4)
    accepted = torch.full((1, 4), -1, dtype=torch.int32)
    verify_tree_greedy_func(
        predicts=torch.zeros(4, dtype=torch.int32),
        accept_index=accepted,
        accept_token_num=torch.zeros(1, dtype=torch.int32),
        candidates=torch.from_numpy(ids).view(1, 4),
        retrieve_index=torch.arange(4).view(1, 4),
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        target_predict=torch.tensor([want]),
        topk=-1,
    )
    assert accepted[0, :2].tolist() == [0, 2]


def _worker() -> Any:
    """The host's worker without its target, two requests at most."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    worker = object.__new__(NGRAMWorker)
    worker.draft_token_num, worker.max_trie_depth = WIDTH, DEPTH
    worker.max_batch_size, worker.device = 2, "cpu"
    worker.enable_overlap = False
    worker.ngram_corpus = _corpus()
    worker._init_preallocated_tensors()
    _put(worker.ngram_corpus, list(TWO_WAYS_ON))
    return worker


def _host_worker() -> Any:
    """The same with what the host's trie answers by itself."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    corpus, worker = _host_corpus(), _worker()
    _put(corpus, list(TWO_WAYS_ON))
    get = NgramCorpus.batch_get.__wrapped__
    worker.ngram_corpus = SimpleNamespace(
        synchronize=lambda: None, batch_get=lambda *asked: get(corpus, *asked)
    )
    return worker


def _decode_batch() -> Any:
    def one(ids: list[int], rid: str) -> Any:
        return SimpleNamespace(origin_input_ids_unpadded=ids, output_ids=[6], rid=rid)

    return SimpleNamespace(
        reqs=[one([4, 5], "a"), one([9], "b")],
        forward_mode=SimpleNamespace(is_decode=lambda: True),
        grammar_needs_sync=lambda: False,
        has_grammar=False,
        seq_lens=torch.tensor([2, 1]),
        seq_lens_cpu=torch.tensor([2, 1]),
        req_pool_indices=torch.tensor([1, 2]),
        req_to_token_pool=SimpleNamespace(
            req_to_token=torch.arange(48, dtype=torch.int32).view(3, 16)
        ),
    )


def test_the_worker_hands_over_chains() -> None:
    """From the trie to what verify is given: ids, positions and links of one path."""
    from sglang.srt.speculative import ngram_worker

    batch = _decode_batch()
    ngram_worker.prepare_mamba_track_for_verify = lambda batch: None
    _worker()._prepare_for_speculative_decoding(batch)
    given = batch.spec_info
    assert given.draft_token.tolist() == [6, 7, 0, 0, 0, 6, 8, 3, 0, 0]
    assert given.positions.tolist() == [2, 3, 4, 5, 6, 1, 2, 3, 4, 5]
    assert given.retrieve_index.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert given.retrieve_next_token.tolist() == [[1, 2, 3, 4, -1]] * 2
    assert given.retrieve_next_sibling.tolist() == [[-1] * WIDTH] * 2


def test_a_tree_is_refused_in_every_verify() -> None:
    """One bit of one request's mask is enough; the message shows the parents."""
    good = chain._triangles(3, WIDTH).copy()
    worker = SimpleNamespace(draft_token_num=WIDTH)
    for row, column in ((2, 1), (0, 4), (4, 0), (3, 3)):
        mask = good.copy()
        mask[1, row, column] ^= 1
        with pytest.raises(base.Unsupported, match="a draft tree for 1 of 3 requests"):
            chain.ngram_block(lambda *a, m=mask: ([], m.reshape(-1)), worker, None)
    with pytest.raises(base.Unsupported, match="2 of 2 requests"):
        _host_worker()._prepare_draft_tokens(_decode_batch())
    ids, mask = chain.ngram_block(lambda *a: ([7], good.reshape(-1)), worker, None)
    assert ids == [7] and mask.shape == (3 * WIDTH * WIDTH,)


def test_external_corpora_are_refused() -> None:
    found = chain.add_external_corpus(lambda *a: None, None, None)
    assert found.success is False and "one trie" in found.message


def test_other_drafters_may_not_branch() -> None:
    """EAGLE and DFLASH bring no mask that the host reads: topk and depth tell."""

    def served(topk: int, depth: int) -> bool:
        block = SimpleNamespace(topk=topk, draft_token_num=4, max_tree_depth=depth)
        try:
            chain.eagle_block(lambda *a: True, block, None, None, None)
        except base.Unsupported:
            return False
        assert chain.dflash_block(lambda *a, **k: True, block, None, None)
        return True

    assert served(1, 4)
    assert not served(2, 4) and not served(1, 3) and not served(-1, 4)


def _asked_of_the_trie(requests: list[Any]) -> list[list[int]]:
    """What NGRAM looks up with overlap, where the last block was [8, 9]."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.ngram_worker import NGRAMWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    asked: list[list[int]] = []

    def get(ids: list[str], tokens: list[list[int]], lengths: list[int]) -> Any:
        asked.extend(tokens)
        mask = np.tril(np.ones((2, 2), np.int64))
        return np.zeros(len(ids) * 2, np.int64), np.tile(mask.ravel(), len(ids))

    batch = object.__new__(ScheduleBatch)
    batch.reqs, batch.has_grammar = requests, False
    batch.spec_algorithm = SpeculativeAlgorithm.NGRAM
    batch.spec_info = SimpleNamespace(
        accept_tokens=torch.tensor([8, 9] * len(requests)),
        accept_lens=torch.tensor([2] * len(requests)),
    )
    worker = SimpleNamespace(
        draft_token_num=2,
        enable_overlap=True,
        max_trie_depth=DEPTH,
        ngram_corpus=SimpleNamespace(synchronize=lambda: None, batch_get=get),
        _efficient_concat_last_n=lambda a, b, n: [*a, *b][-n:],
    )
    NGRAMWorker._prepare_draft_tokens(worker, batch)
    return asked


def _request(known: list[int], **sampling: float) -> Any:
    params = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    return SimpleNamespace(
        rid="a",
        origin_input_ids_unpadded=[1, 2],
        output_ids=known,
        custom_logit_processor=None,
        sampling_params=SimpleNamespace(**(params | sampling)),
    )


def test_ngram_looks_up_every_token_once() -> None:
    # The last result of a request with penalties is taken before the next step.
    counted = _request([7, 8, 9], frequency_penalty=0.5)
    assert _asked_of_the_trie([counted]) == [[1, 2, 7, 8, 9]]
    # Of others it waits.
    assert _asked_of_the_trie([_request([7])]) == [[1, 2, 7, 8, 9]]


def test_control_the_host_looks_up_the_last_block_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    host = ScheduleBatch.grammar_needs_sync.__wrapped__
    monkeypatch.setattr(ScheduleBatch, "grammar_needs_sync", host)
    counted = _request([7, 8, 9], frequency_penalty=0.5)
    assert _asked_of_the_trie([counted]) == [[2, 7, 8, 9, 8, 9]]
