# SPDX-License-Identifier: Apache-2.0
"""Checks of the request hooks against the host's own classes.

Run as a program in a rehearsal environment: prints one JSON object that maps the name
of every check to "" or to a traceback. `test_requests_in_host.py` runs it once.
"""

from __future__ import annotations

import json
import os
import traceback
from array import array
from types import SimpleNamespace
from typing import Any

VOCAB, WIDTH = 96, 4
BAD = float("inf")


def _settings(**given: Any) -> Any:
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"temperature": 1.0, **given})
    params.normalize(SimpleNamespace(eos_token_id=2))
    return params


def _request(**given: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Req

    processor = given.pop("processor", None)
    req = Req("r", "", array("q", [5, 6, 7]), _settings(**given))
    req.custom_logit_processor = processor
    req.eos_token_ids = {2}
    req.tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)
    return req


class Batch:
    """What SamplingBatchInfo and the penalizers need of a ScheduleBatch."""

    device = "cpu"

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs


def _info(reqs: list[Any]) -> tuple[Any, Batch]:
    """Sampling settings of a batch, as the scheduler makes them."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    batch = Batch(reqs)
    return SamplingBatchInfo.from_schedule_batch(batch, VOCAB), batch


def _sampler() -> Any:
    from sglang.srt.layers.sampler import Sampler

    sampler = object.__new__(Sampler)
    vars(sampler).update(
        rl_on_policy_target=None,
        enable_deterministic=True,
        use_log_softmax_logprob=False,
        use_ascend_backend=False,
    )
    return sampler


def _emit(info: Any, logits: Any, positions: Any) -> Any:
    """The host's decode step on adjusted copies of the logits: ids, logits."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    logits = logits.clone()
    info.apply_logits_bias(logits)
    adjusted = _sampler()._preprocess_logits(logits.clone(), info)
    count = logits.shape[0]
    ids = _sampler().forward(
        LogitsProcessorOutput(next_token_logits=logits),
        info,
        False,
        [0] * count,
        [None] * count,
        positions,
    )
    return ids.long(), adjusted


SAMPLED = (
    {"temperature": 0.0},
    {"temperature": 1.0, "sampling_seed": 3},
    {"temperature": 1.4, "sampling_seed": 4, "top_p": 0.7},
    {"temperature": 1.7, "sampling_seed": 5, "top_k": 9},
    {"temperature": 2.0, "sampling_seed": 6, "min_p": 0.2},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 30},
)


def check_neighbours_do_not_move_a_draw() -> None:
    """Alone, and in one batch with every other setting, 40 steps."""
    import torch

    torch.manual_seed(1)
    together, _ = _info([_request(**given) for given in SAMPLED])
    for step in range(40):
        logits = torch.randn(len(SAMPLED), VOCAB) * 2
        positions = torch.full((len(SAMPLED),), 10 + step)
        both, _ = _emit(together, logits, positions)
        for row, given in enumerate(SAMPLED):
            alone, _ = _info([_request(**given)])
            ids, _ = _emit(alone, logits[row : row + 1], positions[:1])
            assert ids.tolist() == both[row : row + 1].tolist(), (step, row)


def control_neighbours_move_the_hosts_draw() -> None:
    """The host's own functions give an unfiltered row another token beside top-p."""
    import torch
    from sglang.srt.layers import sampler

    torch.manual_seed(1)
    moved = 0
    for step in range(20):
        probs = torch.softmax(torch.randn(1, VOCAB) * 2, dim=-1)
        seed, position = torch.tensor([3]), torch.tensor([10 + step])
        alone = sampler.sampling_from_probs_torch(probs.clone(), seed, position)
        beside = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs.clone(),
            torch.tensor([1 << 30]),
            torch.tensor([1.0]),
            torch.tensor([0.0]),
            False,
            seed,
            position,
        )
        moved += int(alone.tolist() != beside.tolist())
    assert moved > 0


def _close_pair() -> Any:
    """Logits whose largest entry has a higher id than one a softmax cannot tell."""
    import torch

    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1e-3
    logits[0, 9] = torch.nextafter(torch.tensor(1e-3), torch.tensor(1.0))
    probs = torch.softmax(logits, dim=-1)
    assert probs[0, 5] == probs[0, 9]
    return logits


def check_greedy_row_is_argmax_in_any_batch() -> None:
    import torch

    info, _ = _info([_request(temperature=0.0), _request(sampling_seed=1)])
    logits = torch.cat([_close_pair(), torch.randn(1, VOCAB)])
    ids, _ = _emit(info, logits, torch.tensor([3, 3]))
    assert ids[0] == 9
    tied = torch.zeros(2, VOCAB)
    tied[:, 40] = tied[:, 11] = 1.0
    assert _emit(info, tied, torch.tensor([3, 3]))[0][0] == 11


def control_greedy_row_loses_its_argmax_in_the_host() -> None:
    import torch
    from sglang.srt.layers import sampler

    probs = torch.softmax(_close_pair(), dim=-1)
    ids = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        torch.tensor([1]),
        torch.tensor([1.0]),
        torch.tensor([0.0]),
        False,
        torch.tensor([42]),
        torch.tensor([3]),
    )
    assert ids.tolist() != [9]


def check_top_p_keeps_what_its_sum_allows() -> None:
    """Sums are exact, so the cut is where real numbers put it."""
    import torch

    from sglang_exact.hooks.sampling import support

    probs = torch.tensor([[0.25, 0.5, 0.125, 0.125]])
    for top_p, kept in ((0.5, [1, 0]), (0.76, [1, 0, 2]), (1.0, [0, 1, 2, 3])):
        info = SimpleNamespace(
            need_top_k_sampling=False,
            need_top_p_sampling=True,
            need_min_p_sampling=False,
            top_ks=torch.tensor([1 << 30]),
            top_ps=torch.tensor([top_p]),
            min_ps=torch.tensor([0.0]),
        )
        found = support(probs, info, slice(0, 1)).nonzero()[:, 1].tolist()
        assert found == sorted(kept), (top_p, found)


def _serve(reqs: list[Any], emitted: list[list[int]]) -> Any:
    """Settings of a batch whose requests have emitted tokens before."""
    import torch

    info, batch = _info(reqs)
    for ids in zip(*emitted, strict=True):
        if info.penalizer_orchestrator.is_required:
            info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor(ids))
    return info, batch


MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.3},
    {"temperature": 1.2, "sampling_seed": 8, "repetition_penalty": 1.7},
    {"temperature": 0.0, "logit_bias": {"11": 4.0}},
    {"temperature": 0.0, "min_new_tokens": 9},
    {"temperature": 1.1, "sampling_seed": 9, "top_p": 0.8},
)
SERIAL = (False, True, True, False, True, False)


def check_verify_row_is_the_decode_step() -> None:
    """Every row that can be accepted has decode's token and decode's logits."""
    import torch

    from sglang_exact.hooks import verify_sampling

    torch.manual_seed(2)
    reqs = [_request(**given) for given in MIXED]
    emitted = [[7, 7, 8, 2]] * len(MIXED)
    info, batch = _serve(reqs, emitted)
    logits = torch.randn(len(MIXED) * WIDTH, VOCAB) * 2
    prefix = torch.arange(20, 20 + len(MIXED))
    forward = info.copy_for_forward()
    serial = [verify_sampling.is_serial(req) for req in batch.reqs]
    assert tuple(serial) == SERIAL
    setattr(forward, verify_sampling._ROWS, serial)
    changed = logits.clone()
    block = verify_sampling.Block(changed, forward, prefix, WIDTH)
    chosen = verify_sampling.choose(block)
    for row, given in enumerate(MIXED):
        for step in range(1 if serial[row] else WIDTH):
            alone, alive = _serve([_request(**given)], emitted[:1])
            at = row * WIDTH + step
            ids, adjusted = _emit(
                alone, logits[at : at + 1], prefix[row : row + 1] + step
            )
            assert ids.tolist() == [chosen[row, step].item()], (row, step)
            same = torch.equal(
                adjusted.view(torch.int32), changed[at].view(1, -1).view(torch.int32)
            )
            assert same, (row, step)
            del alive


def check_nan_is_sanitised_in_verify() -> None:
    """NaN never wins where decode would not let it; off, it wins in both."""
    import torch
    from sglang.srt.environ import envs

    from sglang_exact.hooks import verify_sampling

    for given in ({"temperature": 0.0}, {"temperature": 0.0, "logit_bias": {"1": 1.0}}):
        for sanitise in (True, False):
            info, batch = _info([_request(**given)])
            forward = info.copy_for_forward()
            setattr(forward, verify_sampling._ROWS, [False])
            logits = torch.zeros(WIDTH, VOCAB)
            logits[:, 9] = 5.0
            logits[2, 4] = float("nan")
            block = verify_sampling.Block(
                logits.clone(), forward, torch.tensor([5]), WIDTH
            )
            with envs.SGLANG_SANITIZE_NAN_LOGITS.override(sanitise):
                chosen = verify_sampling.choose(block)
                ids, _ = _emit(info, logits[2:3], torch.tensor([7]))
            assert chosen[0].tolist() == [9, 9, ids[0], 9]
            assert ids.tolist() == [9 if sanitise else 4]
            del batch


def check_serial_drafts_are_made_wrong() -> None:
    import torch

    from sglang_exact.hooks import verify_sampling

    info, _ = _info([_request(), _request(frequency_penalty=1.0)])
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
    import torch

    from sglang_exact.hooks import accept, verify_sampling

    info, _ = _info(reqs)
    forward = info.copy_for_forward()
    serial = [verify_sampling.is_serial(req) for req in reqs]
    setattr(forward, verify_sampling._ROWS, serial)
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


def check_dflash_acceptance_compares_with_decode() -> None:
    """Greedy rows beside a sampled one and a counted one; the selector has no say."""
    import torch

    torch.manual_seed(4)
    logits = torch.randn(3 * WIDTH, VOCAB)
    drafts = torch.randint(3, VOCAB, (3, WIDTH))
    reqs = [
        _request(temperature=0.0),
        _request(sampling_seed=4),
        _request(temperature=0.0, presence_penalty=1.0),
    ]
    greedy = logits.argmax(-1).view(3, WIDTH)
    told, worker = _accepted(reqs, drafts, logits)
    assert worker._selector_sample is None
    assert torch.equal(told["target_predict"][0], greedy[0])
    assert torch.equal(told["target_predict"][2], greedy[2])
    assert not torch.equal(told["target_predict"][1], greedy[1])
    assert torch.equal(told["candidates"][:2], drafts[:2])
    assert (told["candidates"][2, 1:] != told["target_predict"][2, :-1]).all()


def check_eagle_acceptance_compares_with_decode() -> None:
    """The host's own greedy acceptance, on stand-ins: EAGLE, NEXTN and NGRAM."""
    import torch
    from sglang.srt.speculative import eagle_utils

    from sglang_exact.hooks import verify_sampling

    torch.manual_seed(5)
    reqs = [
        _request(temperature=0.0, logit_bias={"6": 2.0}),
        _request(sampling_seed=4, top_p=0.9),
        _request(temperature=0.0, presence_penalty=1.0),
    ]
    count = len(reqs)
    logits = torch.randn(count * WIDTH, VOCAB) * 2
    info, owner = _info(reqs)
    forward = info.copy_for_forward()
    serial = [verify_sampling.is_serial(req) for req in reqs]
    setattr(forward, verify_sampling._ROWS, serial)
    prefix = torch.full((count,), 30)
    block = verify_sampling.Block(logits.clone(), forward, prefix, WIDTH)
    chosen = verify_sampling.choose(block)
    drafts = torch.full((count, WIDTH), 3)
    drafts[:, 1:] = chosen[:, :-1]
    drafts[1, 3] = (chosen[1, 2] + 1) % VOCAB
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
    assert lengths.tolist() == [4, 3, 1]
    for row, length in enumerate(lengths.tolist()):
        emitted = predict[index[row, :length].long()].tolist()
        assert emitted == chosen[row, :length].tolist(), row
    # Logprobs are computed from the adjusted logits afterwards.
    assert output.next_token_logits is logits
    assert torch.equal(logits, block.logits)
    del owner


def check_argmax_without_logits_is_refused_when_it_is_not_the_answer() -> None:
    import torch

    from sglang_exact.hooks import verify_sampling

    drafts, argmax = torch.ones(1, WIDTH), torch.ones(1, WIDTH)
    plain = [_request(temperature=0.0)]
    told, _ = _accepted(plain, drafts, None, target_predict=argmax)
    assert told["target_predict"] is argmax
    counted = [_request(temperature=0.0, frequency_penalty=1.0)]
    for reqs in (counted, [_request(sampling_seed=1)]):
        try:
            _accepted(reqs, drafts, None, target_predict=argmax)
        except verify_sampling.UnsupportedAccept:
            continue
        raise AssertionError("expected a refusal")


def _skips_logits(host: bool) -> bool:
    """Whether a block of a penalised request is judged by an argmax per shard."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    ask = DFlashWorkerV2._can_skip_verify_logits
    info, _ = _info([_request(temperature=0.0, frequency_penalty=1.0)])
    batch = SimpleNamespace(has_grammar=False, return_logprob=False)
    worker = SimpleNamespace(_selector_sample=None)
    ask = ask.__wrapped__ if host else ask
    return bool(ask(worker, batch, info.copy_for_forward()))


def check_verify_logits_are_gathered_over_ranks() -> None:
    assert not _skips_logits(host=False)


def control_host_skips_logits_that_penalties_would_change() -> None:
    assert _skips_logits(host=True)


def check_dspark_folds_only_plain_greedy_steps() -> None:
    from sglang_exact.hooks import accept, verify_sampling

    for given, fold in (({}, True), ({"repetition_penalty": 1.5}, False)):
        reqs = [_request(temperature=0.0, **given)]
        info, batch = _info(reqs)
        forward = info.copy_for_forward()
        setattr(forward, verify_sampling._ROWS, [verify_sampling.is_serial(reqs[0])])
        assert accept.may_fold(forward) is fold
        del batch


def check_unmarked_batch_is_refused() -> None:
    from sglang_exact.hooks import verify_sampling

    info, _ = _info([_request()])
    try:
        verify_sampling.serial_of(info)
    except verify_sampling.UnsupportedAccept:
        return
    raise AssertionError("expected a refusal")


def _penalised(logits: Any, order: list[int]) -> Any:
    """Live penalizers (no overlap) in a given order, on a copy of the logits."""
    given = {"frequency_penalty": 1.1, "presence_penalty": 0.7}
    info, batch = _serve(
        [_request(repetition_penalty=1.3, **given)], [[3, 3, 4, 5, 5, 5]]
    )
    orchestrator = info.penalizer_orchestrator
    items = sorted(orchestrator.penalizers.items(), key=lambda item: item[0].__name__)
    orchestrator.penalizers = dict(items[i] for i in order)
    logits = logits.clone()
    info._apply_pre_grammar_logits_transforms(logits)
    copied = info.copy_for_forward()
    overlapped = _LOGITS.clone()
    copied._apply_pre_grammar_logits_transforms(overlapped)
    del batch
    return logits, overlapped


_LOGITS: Any = None


def _orders() -> tuple[int, int]:
    """Distinct results over orders, without and with overlap."""
    global _LOGITS
    import torch

    torch.manual_seed(3)
    _LOGITS = torch.randn(1, VOCAB) * 3
    live, copied = set(), set()
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1], [1, 3, 2, 0]):
        without, with_overlap = _penalised(_LOGITS, order)
        live.add(tuple(without.view(torch.int32)[0].tolist()))
        copied.add(tuple(with_overlap.view(torch.int32)[0].tolist()))
    return len(live | copied), len(live)


def check_penalties_have_one_order() -> None:
    assert _orders() == (1, 1)


def control_penalties_have_many_orders_in_the_host() -> None:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    hooked = SamplingBatchInfo._apply_pre_grammar_logits_transforms
    SamplingBatchInfo._apply_pre_grammar_logits_transforms = hooked.__wrapped__
    try:
        everything, live = _orders()
    finally:
        SamplingBatchInfo._apply_pre_grammar_logits_transforms = hooked
    assert live > 1 and everything > live


class Letters:
    """A tokenizer whose pieces are letters; id 2 ends."""

    eos_token_id = 2
    additional_stop_token_ids = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(i) for i in ids if i > 2)


STOPS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"stop": ["cd"]}, "ab\x02cdef"),
    ({"stop": ["ef", "bc"]}, "abcdefgh"),
    ({"stop": ["de"]}, "abcdefgh"),
    ({"stop": ["cd"], "max_new_tokens": 3}, "abcdefgh"),
    ({"stop_token_ids": {100}, "stop": ["ef"]}, "abcdefgh"),
    ({"stop_token_ids": {103}, "stop": ["fg"], "ignore_eos": True}, "ab\x02defgh"),
    ({"stop_regex": ["d.f"], "stop": ["gh"]}, "abcdefgh"),
    ({"stop_regex": ["b$"]}, "abcdefgh"),
    ({"max_new_tokens": 5}, "abcdefgh"),
    ({}, "abc\x02efgh"),
    ({"stop": ["bc"]}, "ab" + chr(5000) + "cdefg"),
)


def _stopped(case: dict[str, Any], stream: str, blocks: list[int], stock: bool) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"max_new_tokens": 8, **case})
    params.normalize(Letters())
    req = Req("r", "", array("q", [5]), params, vocab_size=4096)
    req.tokenizer = Letters()
    check = Req.update_finish_state
    if stock:
        check = check.__wrapped__
    left = [ord(c) for c in stream]
    while left and not req.finished():
        size = min(blocks[0], len(left)) if blocks else 1
        blocks = blocks[1:]
        req.output_ids.extend(left[:size])
        left = left[size:]
        check(req, size)
    end = len(req.output_ids) if req.finished_len is None else req.finished_len
    reason = req.finished_reason
    return list(req.output_ids[:end]), reason and json.dumps(reason.to_json())


def _cuts(total: int) -> list[list[int]]:
    """Every way to cut a stream into blocks of 1 to 4 tokens."""
    if total == 0:
        return [[]]
    return [
        [size, *rest]
        for size in range(1, min(4, total) + 1)
        for rest in _cuts(total - size)
    ]


def _stop_differences(stock: bool) -> list[int]:
    wrong = []
    for i, (case, stream) in enumerate(STOPS):
        plain = _stopped(case, stream, [1] * len(stream), stock=True)
        cuts = _cuts(len(stream))
        if any(_stopped(case, stream, cut, stock) != plain for cut in cuts):
            wrong.append(i)
    return wrong


def check_blocks_stop_where_single_tokens_do() -> None:
    assert _stop_differences(stock=False) == []


def control_host_stops_elsewhere() -> None:
    wrong = _stop_differences(stock=True)
    assert {0, 1} <= set(wrong), wrong


def check_custom_processor_sees_one_row() -> None:
    import torch
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import ProcessorEntry

    def centre(logits: Any, params: Any) -> Any:
        assert logits.shape[0] == len(params) == 1
        return logits - logits.max()

    info = SimpleNamespace(
        custom_logit_processor={
            1: ProcessorEntry(centre, [0, 2], torch.tensor([0, 2]))
        },
        custom_params=[{"a": 1}, None, {"b": 2}],
    )
    logits = torch.randn(3, VOCAB)
    expected = logits.clone()
    for row in (0, 2):
        expected[row] -= logits[row].max()
    sampler.apply_custom_logit_processor(logits, info)
    assert torch.equal(logits, expected)


def check_every_sampling_parameter_is_classified() -> None:
    """A new field of the host turns this red until somebody says what it does."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_exact.hooks import requests

    groups = (requests.PARALLEL, requests.SERIAL, requests.REFUSED)
    known = frozenset().union(*groups)
    assert sum(map(len, groups)) == len(known)
    assert known == set(SamplingParams.__struct_fields__)


def _request_classes() -> list[Any]:
    """Every class of the host that carries a request for tokens, from HTTP inwards."""
    from sglang.srt.entrypoints.anthropic import protocol as anthropic
    from sglang.srt.entrypoints.ollama import protocol as ollama
    from sglang.srt.entrypoints.openai import protocol as openai
    from sglang.srt.managers import io_struct

    return [
        io_struct.GenerateReqInput,
        io_struct.TokenizedGenerateReqInput,
        openai.CompletionRequest,
        openai.ChatCompletionRequest,
        openai.ResponsesRequest,
        openai.ScoringRequest,
        anthropic.AnthropicMessagesRequest,
        ollama.OllamaChatRequest,
        ollama.OllamaGenerateRequest,
    ]


def _fields(kind: Any) -> set[str]:
    """Field names of a dataclass, a msgspec struct or a pydantic model."""
    for name in ("model_fields", "__dataclass_fields__", "__struct_fields__"):
        found = getattr(kind, name, None)
        if found:
            return set(found)
    raise AssertionError(f"{kind} has no fields")


def _unclassified(groups: Any) -> list[str]:
    known = frozenset().union(*groups)
    return [
        f"{kind.__name__}.{name}"
        for kind in _request_classes()
        for name in sorted(_fields(kind) - known)
    ]


def check_every_request_field_is_classified() -> None:
    """A new field of the host turns this red until somebody says what it does."""
    import request_fields

    groups = request_fields.GROUPS
    known = frozenset().union(*groups)
    assert sum(map(len, groups)) == len(known), "a field is in two groups"
    assert _unclassified(groups) == []
    stale = known - frozenset().union(*map(_fields, _request_classes()))
    assert stale == frozenset(), stale


def control_a_field_left_out_is_found() -> None:
    import request_fields

    groups = [g - {"kv_hints"} for g in request_fields.GROUPS]
    assert _unclassified(groups) == [
        "GenerateReqInput.kv_hints",
        "TokenizedGenerateReqInput.kv_hints",
    ]


def check_refused_fields_are_refused_one_by_one() -> None:
    """Each alone is a reason; the others of the group never reach the scheduler."""
    from sglang_exact.hooks import requests

    for name in (
        *("return_hidden_states", "return_sampling_mask", "multimodal_inputs"),
        *("input_embeds", "positional_embed_overrides", "token_type_ids", "session"),
        *("lora_id", "token_indices_to_pool", "multi_item_delimiter_indices"),
    ):
        req = _request()
        assert hasattr(req, name), name
        setattr(req, name, [1])
        assert len(requests.request_reasons(req)) == 1, name


def check_serial_parameters_make_a_request_serial() -> None:
    from sglang_exact.hooks import requests

    values = {
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.2,
        "min_new_tokens": 1,
    }
    for name in requests.SERIAL:
        req = _request(**({name: values[name]} if name in values else {}))
        if name not in values:
            req.grammar = object()
        assert requests.is_serial(req), name
    assert requests.is_serial(_request(processor="text"))
    assert not requests.is_serial(_request(logit_bias={"3": 1.0}, top_p=0.5))


def check_refusals_name_every_reason() -> None:
    from sglang_exact.hooks import requests

    req = _request(logit_bias={"3": float("inf")})
    req.return_hidden_states = True
    req.lora_id = "adapter"
    req.multimodal_inputs = SimpleNamespace(mm_items=[])
    req.custom_logit_processor = '{"callable": "00"}'
    found = requests.text_of(requests.request_reasons(req))
    words = ("return_hidden_states", "lora_path", "image", "logit_bias")
    for word in (*words, "does not load"):
        assert word in found, word
    assert requests.request_reasons(_request()) == []


def check_refused_request_ends_no_batch() -> None:
    """The host still forms a batch with it; its processor must not be loaded there."""
    from sglang_exact.hooks import requests

    for given in ({"processor": '{"callable": "00"}'}, {"logit_bias": {"3": BAD}}):
        req = _request(**given)
        assert requests.request_reasons(req)
        requests.check_request(None, req)
        assert req.to_finish is not None
        info, batch = _info([req])
        assert not info.has_custom_logit_processor
        assert info.logit_bias is None
        del batch


def control_refused_request_ends_the_batch_in_the_host() -> None:
    req = _request(processor='{"callable": "00"}')
    try:
        _info([req])
    except Exception as error:  # noqa: BLE001
        assert "invalid load key" in str(error), error
        return
    raise AssertionError("expected the host to fail")


def check_no_processor_is_unpickled_unasked() -> None:
    """A pickle may run anything when it is loaded; this one would leave a mark."""
    import tempfile

    import dill
    from sglang.srt.sampling import sampling_batch_info

    from sglang_exact.hooks import requests

    mark = os.path.join(tempfile.mkdtemp(), "mark")

    class Mark:
        def __reduce__(self) -> Any:
            return (os.mkdir, (mark,))

    req = _request()
    req.custom_logit_processor = json.dumps({"callable": dill.dumps(Mark()).hex()})
    given = sampling_batch_info.get_exec
    off = SimpleNamespace(features=SimpleNamespace(enable_custom_logit_processor=False))
    sampling_batch_info.get_exec = lambda: off
    try:
        assert requests.request_reasons(req) == []
        assert not os.path.exists(mark)
    finally:
        sampling_batch_info.get_exec = given
    requests.request_reasons(req)
    assert os.path.exists(mark)


def check_greedy_request_has_temperature_one() -> None:
    from sglang_exact.hooks import requests

    req = _request(temperature=0.3, top_k=1)
    requests.check_request(None, req)
    assert req.sampling_params.temperature == 1.0
    req = _request(temperature=0.3, top_k=2)
    requests.check_request(None, req)
    assert req.sampling_params.temperature == 0.3


def check_requests_that_must_not_arrive() -> None:
    """Refused before the scheduler sees them, with every reason at once."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    from sglang_exact.hooks import requests

    def arrive(cut: bool, count: int, reserved: int, **fields: Any) -> str:
        manager = SimpleNamespace(
            allow_auto_truncate=cut, context_len=64, num_reserved_tokens=reserved
        )
        sampling = {"max_new_tokens": fields.pop("new", 8)}
        obj = GenerateReqInput(
            input_ids=[5] * count, sampling_params=sampling, **fields
        )
        try:
            requests.check_arrival(manager, obj, obj.input_ids)
        except ValueError as error:
            return str(error)
        return ""

    assert arrive(False, 60, 4) == "", "the host refuses it itself"
    assert arrive(True, 52, 4) == arrive(True, 52, 4, new=None) == ""
    assert "72 tokens" in arrive(True, 60, 4)
    assert "context length" in arrive(True, 64, 0, new=None)
    both = arrive(False, 4, 0, image_data="a", positional_embed_overrides={"a": 1})
    assert "image" in both and "positional_embed_overrides" in both


def check_requests_that_generate_nothing() -> None:
    from sglang_exact.hooks import requests

    batch = SimpleNamespace(is_prefill_only=True)
    assert requests.take_the_sampler(None, batch) is None
    assert batch.is_prefill_only is False
    for new, start, expected in ((0, -1, 3), (0, 1, 1), (4, -1, -1)):
        req = _request(max_new_tokens=new)
        req.logprob_start_len = start
        requests.check_request(None, req)
        assert req.logprob_start_len == expected


def check_images_are_not_said_to_be_understood() -> None:
    from sglang_exact.hooks import requests

    config = SimpleNamespace(
        is_image_understandable_model=True, is_audio_understandable_model=True
    )
    requests.say_what_is_understood(None, SimpleNamespace(model_config=config))
    assert not any(vars(config).values())


def check_last_result_is_taken_for_counted_requests() -> None:
    from collections import deque

    from sglang_exact.hooks import penalties

    def scheduler(*reqs: Any) -> Any:
        taken: list[Any] = []
        return SimpleNamespace(
            enable_overlap=True,
            result_queue=deque([(Batch(list(reqs)), "result")]),
            last_batch="batch",
            taken=taken,
            process_batch_result=lambda batch, result: taken.append(result),
        )

    counted = scheduler(_request(), _request(presence_penalty=1.0))
    penalties.take_last_result(counted, None, None)
    assert counted.taken == ["result"] and counted.last_batch is None
    free = scheduler(_request(), _request(logit_bias={"3": 1.0}))
    penalties.take_last_result(free, None, None)
    assert free.taken == [] and len(free.result_queue) == 1


def _install() -> None:
    """The request hooks, applied by the host's registry as in a rank."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_exact.hooks import accept, penalties, sampling, stop, vocab_parallel

    single = (stop.HOOK, vocab_parallel.HOOK)
    for hook in (*sampling.HOOKS, *penalties.HOOKS, *accept.HOOKS, *single):
        HookRegistry.register(hook.target, hook.replacement, HookType[hook.kind])
    HookRegistry.apply_hooks()


def _context() -> None:
    """The few runtime settings that the host's classes ask for."""
    from sglang.srt.speculative import eagle_utils

    eagle_utils.get_spec = lambda: SimpleNamespace(
        speculative_use_rejection_sampling=False
    )
    from sglang.srt.managers import schedule_batch
    from sglang.srt.sampling import sampling_batch_info

    schedule_batch.get_parallel = lambda: SimpleNamespace(tp_rank=1)

    def exec_settings() -> Any:
        return SimpleNamespace(
            deterministic=SimpleNamespace(enable_deterministic_inference=True),
            features=SimpleNamespace(
                enable_custom_logit_processor=True, enable_watermark=False
            ),
            kernel=SimpleNamespace(sampling_backend="pytorch"),
        )

    from sglang.srt.layers import sampler

    sampling_batch_info.get_exec = exec_settings
    sampler.get_exec = exec_settings


def main() -> None:
    _context()
    _install()
    outcome = {}
    for name, check in list(globals().items()):
        if name.startswith(("check_", "control_")):
            try:
                check()
                outcome[name] = ""
            except Exception:  # noqa: BLE001
                outcome[name] = traceback.format_exc()
    print(json.dumps(outcome))  # noqa: T201


if __name__ == "__main__":
    main()
