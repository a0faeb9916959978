# SPDX-License-Identifier: Apache-2.0
"""Verify: its rows are decode steps, for every drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from request_tools import (
    VOCAB,
    WIDTH,
    batch_info,
    cuts_of,
    decode_step,
    make_request,
    serve,
)

from sglang_exact.hooks import accept, base, penalties, verify_sampling

MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.3},
    {"temperature": 1.2, "sampling_seed": 8, "repetition_penalty": 1.7},
    {"temperature": 0.0, "logit_bias": {"11": 4.0}},
    {"temperature": 0.0, "min_new_tokens": 9},
    {"temperature": 1.1, "sampling_seed": 9, "top_p": 0.8},
)


def _forward(info: Any, reqs: list[Any]) -> Any:
    """The forward's copy of the settings, with the notes of `_forward_isolation`."""
    forward = info.copy_for_forward()
    serial = [verify_sampling.is_serial(req) for req in reqs]
    setattr(forward, verify_sampling._ROWS, serial)
    orchestrator = info.penalizer_orchestrator
    if orchestrator.is_required:
        copies = penalties.copies(orchestrator)
        setattr(forward, verify_sampling._PENALIZERS, copies)
    return forward


def _differing(held_still: bool) -> list[tuple[int, int]]:
    """Rows whose token or logits are not decode's after the drafts before them."""
    torch.manual_seed(2)
    reqs = [make_request(**given) for given in MIXED]
    emitted = [[7, 7, 8, 2]] * len(MIXED)
    info, batch = serve(reqs, emitted)
    logits = torch.randn(len(MIXED) * WIDTH, VOCAB) * 2
    prefix = torch.arange(20, 20 + len(MIXED))
    drafts = torch.randint(3, 12, (len(MIXED), WIDTH))
    forward = _forward(info, batch.reqs)
    changed = logits.clone()
    told = drafts.clone()
    if held_still:
        told[:, 1:] = VOCAB - 1
    block = verify_sampling.Block(changed, forward, prefix, told)
    chosen = verify_sampling.choose(block)
    found = []
    for row, given in enumerate(MIXED):
        for step in range(WIDTH):
            before = emitted[0] + drafts[row, 1 : step + 1].tolist()
            alone, alive = serve([make_request(**given)], [before])
            at = row * WIDTH + step
            ids, adjusted = decode_step(
                alone, logits[at : at + 1], prefix[row : row + 1] + step
            )
            same = torch.equal(
                adjusted.view(torch.int32), changed[at].view(1, -1).view(torch.int32)
            )
            if not same or ids.tolist() != [chosen[row, step].item()]:
                found.append((row, step))
            del alive
    # The originals have not counted the drafts.
    after = info.copy_for_forward()
    assert torch.equal(after.acc_additive_penalties, forward.acc_additive_penalties)
    return found


def test_verify_row_is_the_decode_step() -> None:
    """Penalties and min_new_tokens of a row are those after the drafts before it."""
    assert _differing(held_still=False) == []


def test_control_rows_that_are_not_followed_differ() -> None:
    found = _differing(held_still=True)
    assert {row for row, _ in found} == {1, 2}
    assert all(step > 0 for _, step in found)


def _counted(blocks: list[list[list[int]]], once: bool) -> Any:
    """Penalties of a batch after blocks of tokens for each request."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    reqs = [make_request(**given) for given in MIXED]
    info, batch = batch_info(reqs)
    owner = SimpleNamespace(reqs=reqs, sampling_info=info, device="cpu")
    count = ScheduleBatch.cumulate_penalty_output_tokens
    for block in blocks:
        for req, ids in zip(reqs, block, strict=True):
            req.output_ids.extend(ids)
        (count.__wrapped__ if once else count)(owner)
    del batch
    return info.copy_for_forward()


def _count_differences(once: bool) -> int:
    """Additive penalties that are not those of one token after the other."""
    torch.manual_seed(3)
    streams = torch.randint(3, 12, (len(MIXED), 9)).tolist()
    cuts = [cuts_of(9, 4)[17 * row] for row in range(len(MIXED))]
    blocks = []
    for step in range(max(map(len, cuts))):
        starts = [sum(sizes[:step]) for sizes in cuts]
        blocks.append(
            [
                ids[begin : begin + size] if size else []
                for ids, begin, size in zip(
                    streams,
                    starts,
                    ([*sizes, *[0] * 9][step] for sizes in cuts),
                    strict=True,
                )
            ]
        )
    one_by_one = [[[ids[step]] for ids in streams] for step in range(9)]
    want, found = _counted(one_by_one, False), _counted(blocks, once)
    return sum(
        int((getattr(want, name) != getattr(found, name)).sum())
        for name in ("acc_additive_penalties", "acc_scaling_penalties")
    )


def test_every_token_of_a_block_is_counted_once() -> None:
    assert _count_differences(once=False) == 0


def test_control_the_host_counts_the_last_token_of_a_block() -> None:
    assert _count_differences(once=True) > 0


def test_nan_is_sanitised_in_verify() -> None:
    """NaN never wins where decode would not let it; off, it wins in both."""
    from sglang.srt.environ import envs

    for given in ({"temperature": 0.0}, {"temperature": 0.0, "logit_bias": {"1": 1.0}}):
        for sanitise in (True, False):
            info, batch = batch_info([make_request(**given)])
            forward = _forward(info, batch.reqs)
            logits = torch.zeros(WIDTH, VOCAB)
            logits[:, 9] = 5.0
            logits[2, 4] = float("nan")
            drafts = torch.ones(1, WIDTH, dtype=torch.int64)
            block = verify_sampling.Block(
                logits.clone(), forward, torch.tensor([5]), drafts
            )
            with envs.SGLANG_SANITIZE_NAN_LOGITS.override(sanitise):
                chosen = verify_sampling.choose(block)
                ids, _ = decode_step(info, logits[2:3], torch.tensor([7]))
            assert chosen[0].tolist() == [9, 9, ids[0], 9]
            assert ids.tolist() == [9 if sanitise else 4]
            del batch


def test_serial_drafts_are_made_wrong() -> None:
    info, _ = batch_info([make_request(), make_request()])
    setattr(info, verify_sampling._ROWS, [False, True])
    chosen = torch.tensor([[4, 5, 6, 7], [4, 5, VOCAB - 1, 7]])
    drafts = torch.tensor([[3, 4, 5, 6], [3, 4, 5, VOCAB - 1]])
    wrong = verify_sampling.wrong_where_serial(drafts, chosen, info)
    assert wrong[0].tolist() == drafts[0].tolist()
    assert wrong[1, 0] == 3
    assert (wrong[1, 1:] != chosen[1, :-1]).all()
    assert ((wrong >= 0) & (wrong < VOCAB)).all()


def _accepted(reqs: list[Any], drafts: Any, logits: Any, **given: Any) -> Any:
    """What DFLASH's acceptance is told, and the worker it belongs to."""
    info, batch = batch_info(reqs)
    forward = _forward(info, batch.reqs)
    worker = SimpleNamespace(_selector_sample=("ids", "probabilities"))
    told = accept.accept_dflash(
        lambda self, **told: told,
        worker,
        candidates=drafts,
        next_token_logits=logits,
        sampling_info=forward,
        draft_input=None,
        prefix_lens=torch.tensor([10] * len(reqs)),
        bs=len(reqs),
        **given,
    )
    return told, worker


def test_dflash_acceptance_compares_with_decode() -> None:
    """Greedy rows beside a sampled one and a counted one; the selector has no say."""
    torch.manual_seed(4)
    logits = torch.randn(3 * WIDTH, VOCAB)
    drafts = torch.randint(3, VOCAB, (3, WIDTH))
    reqs = [
        make_request(temperature=0.0),
        make_request(sampling_seed=4),
        make_request(temperature=0.0, presence_penalty=1.0),
    ]
    greedy = logits.argmax(-1).view(3, WIDTH)
    told, worker = _accepted(reqs, drafts, logits)
    assert worker._selector_sample is None
    assert torch.equal(told["target_predict"][0], greedy[0])
    assert told["target_predict"][2, 0] == greedy[2, 0]
    assert not torch.equal(told["target_predict"][1], greedy[1])
    assert torch.equal(told["candidates"], drafts)


def test_eagle_acceptance_compares_with_decode() -> None:
    """The host's own greedy acceptance, on stand-ins: EAGLE, NEXTN and NGRAM."""
    from sglang.srt.speculative import eagle_utils

    torch.manual_seed(5)
    reqs = [
        make_request(temperature=0.0, logit_bias={"6": 2.0}),
        make_request(sampling_seed=4, top_p=0.9),
        make_request(temperature=0.0, presence_penalty=1.0),
    ]
    count = len(reqs)
    logits = torch.randn(count * WIDTH, VOCAB) * 2
    info, owner = batch_info(reqs)
    prefix = torch.full((count,), 30)
    drafts = torch.full((count, WIDTH), 3)
    for step in range(1, WIDTH):
        # What a row chooses depends on the drafts before it.
        block = verify_sampling.Block(
            logits.clone(), _forward(info, reqs), prefix, drafts
        )
        drafts[:, step] = verify_sampling.choose(block)[:, step - 1]
    drafts[1, 3] = (drafts[1, 3] + 1) % VOCAB
    block = verify_sampling.Block(logits.clone(), _forward(info, reqs), prefix, drafts)
    chosen = verify_sampling.choose(block)
    forward = _forward(info, reqs)
    order = torch.arange(count * WIDTH).view(count, WIDTH)
    nexts = torch.tensor([[*range(1, WIDTH), -1]] * count)
    verify = SimpleNamespace(
        draft_token=drafts.reshape(-1),
        draft_token_num=WIDTH,
        max_tree_depth=WIDTH,
        tree_topk=1,
        retrieve_index=order,
        retrieve_next_token=nexts,
        retrieve_next_sibling=torch.full_like(nexts, -1),
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        device="cpu",
        seq_lens=prefix,
        sampling_info=forward,
    )
    output = SimpleNamespace(next_token_logits=logits)
    predict, lengths, index = eagle_utils.eagle_sample(verify, batch, output)
    assert lengths.tolist() == [4, 3, 4]
    for row, length in enumerate(lengths.tolist()):
        emitted = predict[index[row, :length].long()].tolist()
        assert emitted == chosen[row, :length].tolist(), row
    # Logprobs are computed from the adjusted logits afterwards.
    assert output.next_token_logits is logits
    assert torch.equal(logits, block.logits)
    del owner


def test_argmax_without_logits_is_refused_when_it_is_not_the_answer() -> None:
    drafts, argmax = torch.ones(1, WIDTH), torch.ones(1, WIDTH)
    plain = [make_request(temperature=0.0)]
    told, _ = _accepted(plain, drafts, None, target_predict=argmax)
    assert told["target_predict"] is argmax
    counted = [make_request(temperature=0.0, frequency_penalty=1.0)]
    for reqs in (counted, [make_request(sampling_seed=1)]):
        with pytest.raises(base.Unsupported):
            _accepted(reqs, drafts, None, target_predict=argmax)


def _skips_logits(host: bool) -> bool:
    """Whether a block of a penalised request is judged by an argmax per shard."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    ask = DFlashWorkerV2._can_skip_verify_logits
    info, _ = batch_info([make_request(temperature=0.0, frequency_penalty=1.0)])
    batch = SimpleNamespace(has_grammar=False, return_logprob=False)
    worker = SimpleNamespace(_selector_sample=None)
    ask = ask.__wrapped__ if host else ask
    return bool(ask(worker, batch, info.copy_for_forward()))


def test_verify_logits_are_gathered_over_ranks() -> None:
    assert not _skips_logits(host=False)


def test_control_host_skips_logits_that_penalties_would_change() -> None:
    assert _skips_logits(host=True)


def test_dspark_folds_only_plain_greedy_steps() -> None:
    for given, fold in (({}, True), ({"repetition_penalty": 1.5}, False)):
        reqs = [make_request(temperature=0.0, **given)]
        info, batch = batch_info(reqs)
        forward = _forward(info, reqs)
        assert accept.may_fold(forward) is fold
        del batch


def test_unmarked_batch_is_refused() -> None:
    info, _ = batch_info([make_request()])
    with pytest.raises(base.Unsupported):
        verify_sampling.serial_of(info)
