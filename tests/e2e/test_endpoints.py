# SPDX-License-Identifier: Apache-2.0
"""Every way in answers as plain decoding does, or refuses in words.

One plain server, and a speculative one in a child process of another program; native,
OpenAI, Anthropic and Ollama endpoints; parallel sampling, nothing to generate, the end
of the context. Half of the drafts are wrong.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from endpoint_cases import (
    CONTEXT,
    REFUSED,
    SERVED,
    STREAMED,
    TEXT,
    Endpoint,
    put_together,
    steady,
)
from request_cases import ChildServer, TextServer
from traffic import prompt, small_models, speak_json

from sglang_exact.hooks.copies import seed_of_copy
from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal.server import Server, draft_flags

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = ("--context-length", str(CONTEXT), "--served-model-name", "default")
NAMES = [case.name for case in SERVED]
BY_NAME = {case.name: case for case in SERVED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_models(tmp_path_factory.mktemp("endpoint-models"))
    speak_json(folder / "target")
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Server]:
    with TextServer(folder / "target", flags=FLAGS) as server:
        yield server


def ask(server: Server, case: Endpoint) -> Any:
    """The comparable part of the answer, or the text of the refusal."""
    try:
        return steady(server.client.request(case.path, case.body))
    except RuntimeError as error:
        return str(error)


@pytest.fixture(scope="module")
def expected(plain: Server) -> dict[str, Any]:
    """What plain decoding answers to each request alone."""
    found = {case.name: ask(plain, case) for case in SERVED}
    refused = {name: text for name, text in found.items() if isinstance(text, str)}
    assert refused == {}
    return found


@pytest.fixture(scope="module")
def spec(folder: Path, plain: Server) -> Iterator[Server]:
    plan = folder / "oracle.json"
    native = [case for case in SERVED if "input_ids" in case.body]
    known = [
        (case.body["input_ids"], plain.generate(case.body["input_ids"], 8).ids)
        for case in native
        if case.name != "n_sampled" and len(case.body["input_ids"]) < CONTEXT // 2
    ]
    copies = BY_NAME["n_sampled"].body
    answers = plain.client.request("/generate", copies)
    known.append((copies["input_ids"], tuple(answers[1]["output_ids"])))
    oracle.write_plan(plan, 0.5, known)
    flags = [*FLAGS, *draft_flags("dflash", folder / "dflash")]
    env = {oracle.VARIABLE: str(plan)}
    with ChildServer(folder / "target", flags=flags, env=env) as server:
        yield server


def together(server: Server) -> dict[str, Any]:
    """Every request at once."""
    with ThreadPoolExecutor(len(SERVED)) as pool:
        found = list(pool.map(lambda case: ask(server, case), SERVED))
    return dict(zip(NAMES, found, strict=True))


def test_plain_server_answers_alike_in_company(
    plain: Server, expected: dict[str, Any]
) -> None:
    found = together(plain)
    assert {n: found[n] for n in NAMES if found[n] != expected[n]} == {}


@pytest.mark.parametrize("company", [False, True])
def test_endpoints(spec: Server, expected: dict[str, Any], company: bool) -> None:
    if company:
        found = together(spec)
    else:
        found = {case.name: ask(spec, case) for case in SERVED}
    assert {n: found[n] for n in NAMES if found[n] != expected[n]} == {}


def _lines(server: Server, case: Endpoint) -> list[bytes]:
    request = urllib.request.Request(
        server.url + case.path,
        json.dumps(case.body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as lines:
        return list(lines)


@pytest.mark.parametrize("case", STREAMED, ids=lambda case: case.name)
def test_streams_are_whole(
    plain: Server, spec: Server, expected: dict[str, Any], case: Endpoint
) -> None:
    whole = put_together([json.dumps(expected[case.name]).encode()])
    assert whole[0]
    for server in (plain, spec):
        assert steady(list(put_together(_lines(server, case)))) == steady(list(whole))


def _with(case: Endpoint, **sampling: Any) -> Endpoint:
    params = {**case.body["sampling_params"], **sampling}
    return case._replace(body={**case.body, "sampling_params": params})


def test_copies_are_drawn_apart(spec: Server, expected: dict[str, Any]) -> None:
    """Copy 0 is the answer to n = 1; copy i that to a request with its seed."""
    case = BY_NAME["n_sampled"]
    copies = expected[case.name]
    assert len({tuple(copy["output_ids"]) for copy in copies}) == 3
    for i, copy in enumerate(copies):
        assert ask(spec, _with(case, n=1, sampling_seed=seed_of_copy(None, i))) == copy
    assert ask(spec, _with(case, n=1)) == copies[0]
    first, second = expected["n"]
    assert first["output_ids"] == second["output_ids"], "greedy"
    four = [tuple(a["output_ids"]) for a in expected["n_in_a_batch"]]
    assert four[0] != four[1] and four[2] != four[3]
    for name, text in (
        ("chat_sampled", lambda c: c["message"]["content"]),
        ("completions_sampled", lambda c: c["text"]),
    ):
        choices = expected[name]["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        pairs = list(zip(choices[::2], choices[1::2], strict=True))
        assert all(text(one) != text(other) for one, other in pairs), name


def test_copies_of_a_stream(
    plain: Server, spec: Server, expected: dict[str, Any]
) -> None:
    """Each copy has the answer that it has without streaming."""
    native, chat = BY_NAME["n_sampled"], BY_NAME["chat_sampled"]
    for server in (plain, spec):
        ids, texts = {}, dict.fromkeys((0, 1), "")
        for case in (native, chat):
            streamed = case._replace(body={**case.body, "stream": True})
            for line in _lines(server, streamed):
                if not line.startswith(b"data: {"):
                    continue
                found = json.loads(line.removeprefix(b"data: "))
                if case is native:
                    ids[found["index"]] = found["output_ids"]
                for choice in found.get("choices", ()):
                    texts[choice["index"]] += choice["delta"].get("content") or ""
        wanted = [copy["output_ids"] for copy in expected[native.name]]
        assert [ids[i] for i in range(3)] == wanted
        choices = expected[chat.name]["choices"]
        assert texts == {c["index"]: c["message"]["content"] for c in choices}


def test_ollama_ends_where_it_says(expected: dict[str, Any]) -> None:
    ends = {name: expected[name] for name in NAMES if name.startswith("ollama")}
    for name in ("ollama_generate", "ollama_chat", "ollama_sampled"):
        assert (ends[name]["done_reason"], ends[name]["eval_count"]) == ("length", 4)
    long = ends["ollama_context_end"]
    # The host keeps two tokens of the context to itself.
    assert long["prompt_eval_count"] == len(TEXT) * 26 // 2
    assert long["prompt_eval_count"] + long["eval_count"] == CONTEXT - 2
    assert ends["ollama_past_the_context"]["message"]["content"] == long["response"]
    schema = ends["ollama_schema"]
    assert set(json.loads(schema["message"]["content"])) == {"a", "b"}
    assert schema["done_reason"] == "stop"


def test_comparison_sees_a_difference(plain: Server, expected: dict[str, Any]) -> None:
    """Control: another prompt, another seed and one logprob fewer are seen."""
    for name, change in (
        ("labels", {"input_ids": prompt(77, 9)}),
        ("chat_sampled", {"seed": 10}),
        ("completions", {"logprobs": 1}),
    ):
        case = BY_NAME[name]
        found = ask(plain, case._replace(body={**case.body, **change}))
        assert found != expected[name], name


def test_child_process_has_the_hooks_of_http(plain: Server, spec: Server) -> None:
    """A retraction that reached the scheduler would end the server."""
    found = [server.info()["sglang_exact"] for server in (plain, spec)]
    assert [x["http"]["roles"] for x in found] == [["main"], ["main", "scheduler"]]
    assert found[0]["http"]["hooks"] == found[1]["http"]["hooks"] != []
    assert [x["roles"] for x in found] == [["scheduler"]] * 2
    with pytest.raises(RuntimeError, match="HTTP 400.*mode 'retract'"):
        spec.client.request("/pause_generation", {"mode": "retract"})
    assert spec.client.is_ready()


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_refused_in_words(plain: Server, spec: Server, case: Endpoint) -> None:
    """Status 4xx with the field in words, plain and speculative; the server goes on."""
    for server in (plain, spec):
        text = ask(server, case)
        assert isinstance(text, str), text
        assert "HTTP 4" in text, text
        assert case.name in text, text
    assert plain.client.is_ready() and spec.client.is_ready()
