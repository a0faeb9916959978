# SPDX-License-Identifier: Apache-2.0
"""What a block of tokens changes in a stream."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from request_tools import Bytes, byte_request, cuts_of, stock

from sglang_exact.hooks.streamed_parts import responses_by_parts


class _Streamed:
    """The host's way from accepted tokens to the text that a client has received."""

    def __init__(self, case: dict[str, Any], stream: bool = True) -> None:
        from sglang.srt.managers.detokenizer_manager import DetokenizerManager

        self.req = byte_request(**case)
        self.req.stream = stream
        self.detokenizer = object.__new__(DetokenizerManager)
        vars(self.detokenizer).update(
            vocab_size=None,
            decode_status={},
            disable_tokenizer_batch_decode=True,
            is_tool_call_parser_gpt_oss=False,
            tool_close_token_ids=(),
            tokenizer=Bytes(),
        )
        self.text = ""

    def send(self) -> None:
        from sglang.srt.managers.scheduler_components import output_streamer

        out = output_streamer._GenerationStreamAccumulator(
            return_logprob=False,
            return_hidden_states=False,
            return_routed_experts=False,
            return_indexer_topk=False,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
            disaggregation_mode=None,
            default_stream_interval=1,
            default_force_stream_interval=3,
            get_cached_tokens_details=lambda req: None,
            is_request_level_customized_info_key=lambda key: False,
            current_weight_version=None,
        )
        out.accept(req=self.req)
        if out.rids:
            payload = SimpleNamespace(
                rids=out.rids,
                decoded_texts=out.decoded_texts,
                decode_ids=out.decode_ids_list,
                read_offsets=out.read_offsets,
                finished_reasons=out.finished_reasons,
                no_stop_trim=out.no_stop_trim,
                skip_special_tokens=out.skip_special_tokens,
                spaces_between_special_tokens=out.spaces_between_special_tokens,
            )
            texts = self.detokenizer._decode_batch_token_id_output(payload)
            self.text += texts[0]


STREAMED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"stop": ["cd"]}, "abcdef"),
    ({"stop": ["cd"], "no_stop_trim": True}, "abcdef"),
    ({"stop_regex": ["cde"]}, "abcdef"),
    ({"stop_regex": ["c.e"]}, "abcdef"),
    ({"stop": ["\u4e2d\u6587"]}, "a\u4e2d\u6587b"),
    ({"stop": ["x\u00e9"]}, "a x\u00e9bc"),
    ({"stop": ["zz"]}, "a\u4e2db"),
)


def _streamed(
    case: dict[str, Any], text: str, blocks: list[int], stream: bool = True
) -> str:
    streamed = _Streamed(case, stream)
    req = streamed.req
    left = list(text.encode())
    while left and not req.finished():
        block, left = left[: blocks[0]], left[blocks[0] :]
        blocks = blocks[1:]
        req.output_ids.extend(block)
        req.update_finish_state(len(block))
        if not left and not req.finished():
            from sglang.srt.managers.schedule_batch import FINISH_LENGTH

            req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        streamed.send()
    return streamed.text


def _stream_differences(stream: bool = True) -> list[int]:
    wrong = []
    for i, (case, text) in enumerate(STREAMED):
        case = {"max_new_tokens": 20, **case}
        total = len(text.encode())
        texts = {_streamed(case, text, cut, stream) for cut in cuts_of(total, 4)}
        if len(texts) > 1 or texts != {_streamed(case, text, [total])}:
            wrong.append(i)
    return wrong


def test_streamed_text_does_not_depend_on_blocks() -> None:
    assert _stream_differences() == []


def test_control_host_streams_what_it_trims() -> None:
    from sglang.srt.managers.schedule_batch import Req

    with stock(Req, "check_match_stop_str_prefix"):
        assert {2, 4} <= set(_stream_differences())


def test_text_does_not_depend_on_blocks() -> None:
    assert _stream_differences(stream=False) == []


def test_control_host_keeps_a_piece_of_a_stop_string() -> None:
    from sglang.srt.managers.scheduler_components import output_streamer

    with stock(output_streamer._GenerationStreamAccumulator, "accept"):
        assert {0, 2} <= set(_stream_differences(stream=False))
        case, text = STREAMED[0]
        assert _streamed(case, text, [1] * 6, stream=False) == "abc"
        assert _streamed(case, text, [2] * 3, stream=False) == "ab"


CALLS = (
    "use <tool_call> now</think>\n\nok",
    'why</think>Look.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    '</think><tool_call>\n{"name": "now", "arguments": {"a": "b c"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {"a": [1, 23]}}\n</tool_call>',
    "a</think>b <\n<tool_call>\n<function=now>\n<parameter=a>\nx < y\n</parameter>\n"
    "</function>\n</tool_call>",
)


def _parsed(pieces: list[str], parser: str) -> Any:
    """Reasoning, text and calls that a client has received."""
    from sglang.srt.entrypoints.openai.protocol import Function, Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    tool = Tool(type="function", function=Function(name="now", parameters={}))
    reasoning = ReasoningParser("qwen3", True, True)
    tools = FunctionCallParser([tool], parser)
    thought, text, calls = "", "", dict[int, str]()
    for i, piece in enumerate([*pieces, None]):
        if piece is None:
            more, rest = reasoning.parse_stream_end()
        else:
            more, rest = reasoning.parse_stream_chunk(piece)
        thought += more or ""
        said, found = tools.parse_stream_chunk(rest or "")
        if i == len(pieces):
            end_text, end_calls = tools.parse_stream_end()
            said, found = said + end_text, [*found, *end_calls]
        text += said
        for call in found:
            known = calls.get(call.tool_index, "")
            calls[call.tool_index] = known + (call.name or "") + call.parameters
    return thought, text, calls


def _parser_differences() -> list[Any]:
    wrong = []
    for parser in ("qwen25", "hermes", "qwen3_coder"):
        for i, text in enumerate(CALLS):
            one = _parsed(list(text), parser)
            for width in (2, 3, 7, 16, len(text)):
                pieces = [text[k : k + width] for k in range(0, len(text), width)]
                if _parsed(pieces, parser) != one:
                    wrong.append((parser, i, width))
    return wrong


def test_streamed_calls_do_not_depend_on_blocks() -> None:
    assert _parser_differences() == []
    thought, text, calls = _parsed([CALLS[1]], "hermes")
    assert (thought, calls) == ("why", {0: "now{}"})
    assert text.startswith("Look.\n\n")


def test_control_host_loses_calls_of_a_block() -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    with stock(ReasoningParser, "parse_stream_chunk"):
        assert any(i == 0 for _, i, _ in _parser_differences())
    with stock(FunctionCallParser, "parse_stream_chunk"):
        assert any(i == 1 for _, i, _ in _parser_differences())


def _parsed_whole(text: str, parser: str) -> Any:
    """Reasoning, text and calls of an answer without streaming."""
    from sglang.srt.entrypoints.openai.protocol import Function, Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    tool = Tool(type="function", function=Function(name="now", parameters={}))
    tools = FunctionCallParser([tool], parser)
    thought, rest = ReasoningParser("qwen3", True, True).parse_non_stream(text)
    calls: list[Any] = []
    if tools.has_tool_call(rest or ""):
        rest, calls = tools.parse_non_stream(rest or "")
    return thought, rest, dict(enumerate(f"{c.name}{c.parameters}" for c in calls))


COMPLETE = (("hermes", 1), ("qwen25", 1), ("qwen25", 2), ("qwen3_coder", 3))
"""Parsers, and calls of theirs that are all there."""


def test_complete_calls_are_alike_streamed_or_whole() -> None:
    """What is promised: not line breaks around calls, nor what is left of others."""
    for parser, i in COMPLETE:
        one, other = _parsed([CALLS[i]], parser), _parsed_whole(CALLS[i], parser)
        assert (one[0], one[2]) == (other[0], other[2]), (parser, i)
        assert one[1].rstrip() == other[1].rstrip()


def test_control_hosts_parsers_split_streams_otherwise() -> None:
    assert _parsed([CALLS[1]], "qwen25")[1] == "Look.\n\n"
    assert _parsed_whole(CALLS[1], "qwen25")[1] == "Look."
    broken = CALLS[1].removesuffix("}\n</tool_call>")
    assert _parsed([broken], "hermes") != _parsed_whole(broken, "hermes")


ENDS = tuple(
    "a</think>x " + end for end in ("<", "<tool_ca", "</tool_ca", "<func", "<p", "y")
)


def _lost_ends() -> list[tuple[str, str]]:
    """Answers without a call, whose end a stream does not send."""
    parsers = ("hermes", "qwen25", "qwen3_coder")
    return [
        (parser, text)
        for parser in parsers
        for text in ENDS
        if _parsed(list(text), parser) != _parsed_whole(text, parser)
    ]


def test_streamed_text_is_sent_to_its_end() -> None:
    assert _lost_ends() == []
    for parser, i in COMPLETE:
        assert "</" not in _parsed([CALLS[i]], parser)[1]


def test_control_host_drops_the_beginning_of_a_tag_that_is_none() -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    with stock(FunctionCallParser, "parse_stream_end"):
        lost = _lost_ends()
    assert {parser for parser, _ in lost} == {"hermes", "qwen25", "qwen3_coder"}
    assert not any(text == ENDS[-1] for _, text in lost)


TWO_CALLS = (
    "a</think>Both.\n\n<tool_call>\n<function=now>\n<parameter=a>\nx < y\n</parameter>"
    "\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>\nB"
)


def _chat(
    texts: list[str], parsers: bool, incremental: bool, logprobs: bool = False
) -> list[Any]:
    """What a chat stream sends: [kind, text] in order, neighbours of a kind joined."""
    from sglang.srt import runtime_context
    from sglang.srt.entrypoints.openai import serving_chat
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    settings = SimpleNamespace(incremental_streaming_output=incremental)
    runtime_context.get_serving = serving_chat.get_serving = lambda: settings
    server = object.__new__(serving_chat.OpenAIServingChat)
    vars(server).update(
        _encoding_adapter=None,
        reasoning_parser="qwen3" if parsers else None,
        tool_call_parser="qwen3_coder" if parsers else None,
        tokenizer_manager=SimpleNamespace(tokenizer=None),
        template_manager=SimpleNamespace(force_reasoning=True),
    )
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    messages = [{"role": "user", "content": "?"}]
    request = ChatCompletionRequest(
        model="m", messages=messages, tools=[tool] if parsers else None
    )
    state: dict[str, Any] = {
        "index": 0,
        "request": request,
        "created": 0,
        "stream_offsets": {},
        "reasoning_parser_dict": {},
        "parser_dict": {},
        "has_tool_calls": {},
        "continuous_usage_stats": False,
        **{f"{kind}_tokens": {} for kind in ("prompt", "reasoning", "completion")},
    }
    sent: list[Any] = []

    async def run() -> None:
        for i, text in enumerate(texts):
            shown = text if incremental else "".join(texts[: i + 1])
            given = {
                **state,
                "content": {"text": shown, "meta_info": {"id": "r"}},
                "choice_logprobs": {"content": [{"token": str(i)}]}
                if logprobs
                else None,
                "finish_reason_type": "stop" if i == len(texts) - 1 else None,
            }
            async for event in server._generate_stream_content(**given):
                sent.extend(_deltas(json.loads(event.removeprefix("data: "))))

    asyncio.run(run())
    joined: list[Any] = []
    for kind, piece in sent:
        if joined and joined[-1][0] == kind and kind != "logprobs":
            joined[-1][1] += piece
        else:
            joined.append([kind, piece])
    return joined


def _deltas(event: Any) -> list[Any]:
    choice = event["choices"][0]
    delta = choice["delta"]
    found = [
        (kind, delta[kind])
        for kind in ("reasoning_content", "content")
        if delta.get(kind)
    ]
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        name, more = function.get("name") or "", function.get("arguments") or ""
        found.append((f"call {call['index']}", name + more))
    if choice.get("logprobs"):
        found += [("logprobs", i["token"]) for i in choice["logprobs"]["content"]]
    return found


def _chat_differences() -> list[int]:
    wrong = []
    for incremental in (False, True):
        one = _chat(list(TWO_CALLS), True, incremental)
        for width in (2, 3, 7, 16, 40, len(TWO_CALLS)):
            pieces = [TWO_CALLS[k : k + width] for k in range(0, len(TWO_CALLS), width)]
            if _chat(pieces, True, incremental) != one:
                wrong.append(width)
    return wrong


def test_streamed_chat_keeps_its_order() -> None:
    assert _chat_differences() == []
    assert _chat([TWO_CALLS], True, False) == [
        ["reasoning_content", "a"],
        ["content", "Both.\n\n"],
        ["call 0", 'now{"a": "x < y"}'],
        ["content", "\n"],
        ["call 1", "now{}"],
        ["content", "\nB"],
    ]


def test_control_host_sends_text_before_the_end_of_a_call() -> None:
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    with stock(OpenAIServingChat, "_generate_stream_content"):
        assert 40 in _chat_differences()


def _tokens_with_logprobs(texts: list[str]) -> list[str]:
    sent = _chat(texts, False, False, logprobs=True)
    return [piece for kind, piece in sent if kind == "logprobs"]


def test_streamed_logprobs_are_all_sent() -> None:
    assert _tokens_with_logprobs(["a", "", "b", ""]) == ["0", "1", "2", "3"]


def test_control_host_drops_logprobs_without_text() -> None:
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    with stock(OpenAIServingChat, "_generate_stream_content"):
        assert _tokens_with_logprobs(["a", "", "b", ""]) == ["0", "2"]


def _steps_of_responses(hooked: bool, incremental: bool) -> list[Any]:
    """Text and reason of the steps that /v1/responses sees of one block.

    The module of its class needs packages that this environment may not have.
    """
    from sglang.srt import runtime_context
    from sglang.srt.entrypoints.openai import serving_chat

    class Responses(serving_chat.OpenAIServingChat):
        async def _responses_stream_generator_non_harmony(
            self, request: Any, settings: Any, outputs: Any, *more: Any
        ) -> Any:
            async for step in outputs:
                reason = step["meta_info"]["finish_reason"]
                yield step["text"], reason and reason["type"]

    settings = SimpleNamespace(incremental_streaming_output=incremental)
    runtime_context.get_serving = lambda: settings
    server = object.__new__(Responses)
    server._encoding_adapter = None
    if hooked:
        responses_by_parts(None, server)

    async def outputs() -> Any:
        for text, reason in (("a ", None), ("</a>\n\nb c\n<d", {"type": "stop"})):
            shown = text if incremental or reason is None else "a " + text
            yield {"text": shown, "meta_info": {"finish_reason": reason}}

    async def run() -> list[Any]:
        name = "_responses_stream_generator_non_harmony"
        return [step async for step in getattr(server, name)(None, None, outputs())]

    return asyncio.run(run())


def test_streamed_responses_are_taken_by_parts() -> None:
    parts = ["a ", "</a>", "\n\n", "b c\n", "<d"]
    steps = _steps_of_responses(True, incremental=True)
    assert [text for text, _ in steps] == parts
    assert [reason for _, reason in steps] == [None] * 4 + ["stop"]
    whole = ["".join(parts[: i + 1]) for i in range(len(parts))]
    steps = _steps_of_responses(True, incremental=False)
    assert [text for text, _ in steps] == whole
    assert [reason for _, reason in steps] == [None] * 4 + ["stop"]


def test_control_host_takes_a_block_of_a_response_whole() -> None:
    assert len(_steps_of_responses(False, incremental=True)) == 2
