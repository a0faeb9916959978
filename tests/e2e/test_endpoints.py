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
    Endpoint,
    put_together,
    steady,
)
from request_cases import ChildServer, TextServer
from traffic import prompt, small_models, speak_json

from sglang_exact.rehearsal import oracle
from sglang_exact.rehearsal.server import Server, draft_flags

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = ("--context-length", str(CONTEXT))
NAMES = [case.name for case in SERVED]


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
        if len(case.body["input_ids"]) < CONTEXT // 2
    ]
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


def _streamed(server: Server, case: Endpoint) -> tuple[str, list[Any]]:
    request = urllib.request.Request(
        server.url + case.path,
        json.dumps(case.body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as lines:
        return put_together(lines)


@pytest.mark.parametrize("case", STREAMED, ids=lambda case: case.name)
def test_streams_are_whole(
    plain: Server, spec: Server, expected: dict[str, Any], case: Endpoint
) -> None:
    whole = put_together([json.dumps(expected[case.name]).encode()])
    assert whole[0]
    for server in (plain, spec):
        assert steady(list(_streamed(server, case))) == steady(list(whole))


def test_comparison_sees_a_difference(plain: Server, expected: dict[str, Any]) -> None:
    """Control: another prompt, another seed and one logprob fewer are seen."""
    by_name = {case.name: case for case in SERVED}
    for name, change in (
        ("labels", {"input_ids": prompt(77, 9)}),
        ("chat_sampled", {"seed": 10}),
        ("completions", {"logprobs": 1}),
    ):
        case = by_name[name]
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
