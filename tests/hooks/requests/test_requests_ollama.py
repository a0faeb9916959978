# SPDX-License-Identifier: Apache-2.0
"""The Ollama endpoints on the host's own classes.

The manager behind them is a fake that yields given outputs.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from request_tools import Bytes, stock

from sglang_exact.hooks import ollama

FINISH = {"type": "length", "length": 4}
KINDS = ("chat", "generate")
MESSAGES = [{"role": "user", "content": "a"}]


class _Template(Bytes):
    """A tokenizer with a chat template."""

    def apply_chat_template(self, messages: Any, **unused: object) -> list[int]:
        from jinja2 import TemplateError

        if messages[0]["role"] == "nobody":
            raise TemplateError("no such role")
        return self.encode("".join(m["content"] for m in messages))


class _Manager:
    """What OllamaServing needs of the host's manager; keeps the requests."""

    served_model_name = "m"

    def __init__(self, texts: list[str], finish: Any, incremental: bool) -> None:
        self.texts, self.finish, self.incremental = texts, finish, incremental
        self.tokenizer: Any = _Template()
        self.asked: list[Any] = []

    async def generate_request(self, obj: Any, request: Any) -> Any:
        self.asked.append(obj)
        if isinstance(self.finish, ValueError):
            raise self.finish
        count = len(self.texts)
        steps = range(count) if obj.stream else range(count - 1, count)
        for i in steps:
            so_far = "".join(self.texts[: i + 1])
            meta = {
                "finish_reason": self.finish if i == count - 1 else None,
                "prompt_tokens": 7,
                "completion_tokens": i + 1,
            }
            shown = self.texts[i] if self.incremental and obj.stream else so_far
            yield {"text": shown, "meta_info": meta}


def _ask(
    kind: str,
    texts: list[str] | None = None,
    finish: Any = FINISH,
    incremental: bool = False,
    tokenizer: bool = True,
    **body: Any,
) -> tuple[int, list[Any], list[Any]]:
    """Status, JSON lines and requests to the manager of one call of the endpoint."""
    from sglang.srt import runtime_context
    from sglang.srt.entrypoints.ollama import protocol
    from sglang.srt.entrypoints.ollama.serving import OllamaServing

    settings = SimpleNamespace(incremental_streaming_output=incremental)
    runtime_context.get_serving = lambda: settings
    manager = _Manager(["a", "bc"] if texts is None else texts, finish, incremental)
    if not tokenizer:
        manager.tokenizer = None
    serving = OllamaServing(manager)
    asked = {"messages": MESSAGES} if kind == "chat" else {"prompt": "a"}
    body = {"model": "m", **asked, **body}
    form = getattr(protocol, f"Ollama{kind.title()}Request")

    async def parsed() -> Any:
        return body

    async def run() -> tuple[int, list[Any]]:
        handle = getattr(serving, f"handle_{kind}")
        answer = await handle(form(**body), SimpleNamespace(json=parsed))
        if hasattr(answer, "body_iterator"):
            return answer.status_code, [
                json.loads(line) async for line in answer.body_iterator
            ]
        if hasattr(answer, "model_dump"):
            return 200, [answer.model_dump()]
        return answer.status_code, [json.loads(answer.body)]

    status, lines = asyncio.run(run())
    return status, lines, manager.asked


def _sampling(**options: Any) -> dict[str, Any]:
    status, lines, asked = _ask("chat", stream=False, options=options)
    assert status == 200, lines
    return dict(asked[0].sampling_params)


def test_ollama_options_become_sampling_parameters() -> None:
    assert _sampling() == {"max_new_tokens": 2048}
    given = {
        **{"seed": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1},
        **{"presence_penalty": 1, "frequency_penalty": 2, "stop": ["a"]},
        **{"num_predict": 9.0, "num_ctx": 64, "repeat_penalty": 1.0, "mirostat": None},
    }
    assert _sampling(**given) == {
        **{"sampling_seed": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3},
        **{"min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 2},
        **{"stop": ["a"], "max_new_tokens": 9},
    }
    for unlimited in (-1, -2):
        assert _sampling(num_predict=unlimited) == {"max_new_tokens": None}
    assert _sampling(num_predict=0) == {"max_new_tokens": 0}
    assert _sampling(top_k=0)["top_k"] == -1


def test_control_host_hands_on_a_seed_that_does_not_exist() -> None:
    from sglang.srt.entrypoints.ollama.serving import OllamaServing
    from sglang.srt.sampling.sampling_params import SamplingParams

    with stock(OllamaServing, "_convert_options_to_sampling_params"):
        found = _sampling(seed=5, num_predict=-1)
    assert found == {"seed": 5, "max_new_tokens": -1}
    with pytest.raises(TypeError):
        SamplingParams(**found)


def test_ollama_parameters_are_the_hosts() -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    names = {name for name, _ in ollama.SERVED.values()}
    assert names <= set(SamplingParams.__struct_fields__)
    groups = (ollama.SERVED, ollama.NEUTRAL, ollama.IGNORED)
    assert sum(map(len, groups)) == len(frozenset().union(*groups))


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    *(({"options": {n: "x"}}, n) for n in ("temperature", "top_k", "seed", "min_p")),
    ({"options": {"temperature": float("nan")}}, "temperature"),
    ({"options": {"seed": True}}, "seed"),
    ({"options": {"num_predict": 1.5}}, "num_predict"),
    ({"options": {"num_predict": -3}}, "num_predict"),
    ({"options": {"stop": [1]}}, "stop"),
    ({"options": {"stop": {"a": 1}}}, "stop"),
    ({"options": {"repeat_penalty": 1.1}}, "repeat_penalty"),
    ({"options": {"mirostat": 2}}, "mirostat"),
    ({"options": {"temprature": 0}}, "temprature"),
    ({"options": {"format": "json"}}, "option format"),
    ({"think": True}, "think"),
    ({"think": False}, "think"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"logprobs": True}, "logprobs"),
    ({"images": ["aGk="]}, "images"),
)
CHAT_WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"messages": [{**MESSAGES[0], "images": ["aGk="]}]}, "images of a message"),
    ({"messages": [{**MESSAGES[0], "tool_calls": [{}]}]}, "tool_calls of a message"),
    ({"messages": [{"role": "nobody", "content": "a"}]}, "no such role"),
    ({"messages": [{"role": "user", "content": ""}]}, "a prompt of no tokens"),
)
GENERATE_WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"suffix": "b"}, "suffix"),
    ({"template": "b"}, "template"),
    ({"context": [1]}, "context"),
)


def test_ollama_says_what_it_does_not_serve() -> None:
    more = {"chat": CHAT_WRONG, "generate": GENERATE_WRONG}
    for kind in KINDS:
        for body, word in (*WRONG, *more[kind]):
            for stream in (False, True):
                status, lines, asked = _ask(kind, stream=stream, **body)
                assert (status, asked) == (400, []), (kind, body, lines)
                assert word in lines[0]["error"], (kind, body, lines)
        both = {"images": ["aGk="], "options": {"seed": "x", "top_k": "y"}}
        text = _ask(kind, **both)[1][0]["error"]
        assert all(word in text for word in ("images", "seed", "top_k")), text
        empty = {"images": [], "tools": [], "think": None, "suffix": "", "context": []}
        assert _ask(kind, stream=False, **empty)[0] == 200
        assert _ask(kind, tokenizer=False)[0] == 400
        assert "tokenizer" in _ask(kind, tokenizer=False)[1][0]["error"]


def test_control_host_drops_what_it_does_not_serve() -> None:
    from sglang.srt.entrypoints.ollama.serving import OllamaServing

    with stock(OllamaServing, "handle_generate"):
        assert _ask("generate", images=["aGk="])[0] == 200
        assert _ask("generate", format="json")[0] == 200
    with stock(OllamaServing, "handle_chat"):
        assert _ask("chat", tools=[{"type": "function"}])[0] == 200


def test_ollama_formats_are_grammars() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for kind in KINDS:
        for given, expected in (("json", {"type": "object"}), (schema, schema)):
            asked = _ask(kind, stream=False, format=given, options={"seed": 1})[2]
            params = asked[0].sampling_params
            assert json.loads(params["json_schema"]) == expected
            assert params["sampling_seed"] == 1


def test_ollama_answers_end_alike_streamed_or_not() -> None:
    blocks = (["a", "b", "c", "d"], ["a", "bcd"], ["ab", "", "cd", ""], ["abcd"])
    for kind in KINDS:
        for incremental in (False, True):
            for texts in blocks:
                for finish in (FINISH, {"type": "stop", "matched": 2}):
                    _ends_alike(kind, texts, finish, incremental)


def _text(kind: str, line: Any) -> str:
    text: str = line["message"]["content"] if kind == "chat" else line["response"]
    return text


def _ends_alike(kind: str, texts: list[str], finish: Any, incremental: bool) -> None:
    given = {"texts": texts, "finish": finish, "incremental": incremental}
    (whole,) = _ask(kind, stream=False, **given)[1]
    status, lines, _ = _ask(kind, stream=True, **given)
    assert status == 200
    assert "".join(_text(kind, line) for line in lines) == _text(kind, whole) == "abcd"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all(_text(kind, line) for line in lines[:-1])
    last = lines[-1]
    for name in ("done_reason", "prompt_eval_count", "eval_count"):
        assert last[name] == whole[name], name
    assert set(last) == set(whole)
    assert (last["done_reason"], last["eval_count"]) == (finish["type"], len(texts))


def _streams_of_the_host(kind: str, texts: list[str]) -> list[Any]:
    from sglang.srt.entrypoints.ollama.serving import OllamaServing

    with stock(OllamaServing, f"_stream_{kind}_response"):
        return _ask(kind, stream=True, texts=texts)[1]


def test_control_host_drops_the_last_block_of_an_ollama_stream() -> None:
    for kind in KINDS:
        for texts, sent in ((["a", "b", "c", "d"], "abc"), (["a", "bcd"], "a")):
            lines = _streams_of_the_host(kind, texts)
            assert "".join(_text(kind, line) for line in lines) == sent
            assert lines[-1]["done_reason"] == "stop"
            assert "eval_count" not in lines[-1]


def test_ollama_errors_have_a_status() -> None:
    ended = {"type": "abort", "status_code": 503, "message": "taken back"}
    for kind in KINDS:
        for stream in (False, True):
            status, lines, _ = _ask(kind, finish=ValueError("too long"), stream=stream)
            assert (status, lines) == (400, [{"error": "too long"}])
        status, lines, _ = _ask(kind, texts=["a"], finish=ended, stream=True)
        assert (status, lines) == (503, [{"error": "taken back"}])
        status, lines, _ = _ask(kind, texts=["a", "b"], finish=ended, stream=True)
        assert (status, lines[-1]) == (200, {"error": "taken back"})


def test_control_host_streams_nothing_instead_of_an_error() -> None:
    from sglang.srt.entrypoints.ollama.serving import OllamaServing

    # Its error comes after the headers.
    late = pytest.raises(ValueError, match="too long")
    with stock(OllamaServing, "_stream_chat_response"), late:
        _ask("chat", finish=ValueError("too long"), stream=True)


def test_ollama_answers_to_nothing_asked() -> None:
    """A client loads a model by a request without a message."""
    status, lines, asked = _ask("chat", stream=False, messages=[])
    assert (status, asked, lines[0]["done_reason"]) == (200, [], "load")


def test_ollama_ends_with_the_context() -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    def left(params: Any, reserved: int = 0) -> Any:
        manager = SimpleNamespace(context_len=64, num_reserved_tokens=reserved)
        obj = GenerateReqInput(input_ids=[5] * 50, sampling_params=params)
        obj.normalize_batch_and_arguments()
        ollama.end_with_the_context(manager, obj, obj.input_ids)
        return obj.sampling_params["max_new_tokens"]

    asked = ollama.sampling_params
    assert left(asked(None, {"num_predict": 14})) == 14
    assert left(asked(None, {"num_predict": 15})) is None
    assert left(asked(None, {"num_predict": 14}), reserved=4) is None
    assert left(asked(None, {"num_predict": -1})) is None
    assert left(asked(None)) is None, "2048, if the client says nothing"
    assert left({"max_new_tokens": 15}) == 15, "a native request gets its 400"
