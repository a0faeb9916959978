# SPDX-License-Identifier: Apache-2.0
"""Any bytes from a server end in a Sample or in BadAnswer."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_exact.client import facts as server
from sglang_exact.client.http import Client, redact_url
from sglang_exact.client.wire import (
    BadAnswer,
    StreamReader,
    clean,
    error_text,
    load_json,
    parse_answer,
)


def answer(**changes: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "completion_tokens": 2,
        "prompt_tokens": 3,
        "output_token_logprobs": [[-0.5, 4, None], [-1.5, 9, None]],
        "output_top_logprobs": [[[-0.5, 4, None]], [[-1.5, 9, None]]],
    }
    return {"output_ids": [4, 9], "meta_info": meta | changes}


def test_whole_answer() -> None:
    sample = parse_answer(answer(), logprobs=True)
    assert sample.ids == (4, 9)
    assert sample.logprobs == (0xBF000000, 0xBFC00000)
    assert sample.finish == "length:2"


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": None},
        {"finish_reason": {"type": "abort", "message": "x"}},
        {"completion_tokens": None},
        {"completion_tokens": True},
        {"completion_tokens": 3},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[-0.5, 4]]},
        {"output_token_logprobs": [[-0.5, 4], [-1.5, 8]]},
        {"output_token_logprobs": [["-0.5", 4], [-1.5, 9]]},
        {"output_token_logprobs": [[-0.5, 4], [10**400, 9]]},
        {"output_top_logprobs": [[]]},
        {"output_top_logprobs": [7, 8]},
        {"spec_verify_ct": -1},
        {"spec_verify_ct": "many"},
        {"spec_correct_drafts_histogram": [1, -2]},
    ],
)
def test_inconsistent_answer_is_bad(changes: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer):
        parse_answer(answer(**changes), logprobs=True)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "null", "-1e300"])
def test_value_that_is_no_finite_float32_has_no_bits(text: str) -> None:
    raw = json.dumps(answer()).replace("-0.5, 4, null", f"{text}, 4, null", 1)
    sample = parse_answer(load_json(raw.encode()), logprobs=True)
    assert sample.logprobs[0] is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([[], {}, [[None, 1]], [[-0.5, 4], [-1.5, 9]]]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
META = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(answer()["meta_info"], JSON)
    | {"spec_verify_ct": JSON, "spec_correct_drafts_histogram": JSON},
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()), JSON, META)
def test_garbage_is_bad_answer_only(raw: bytes, ids: Any, meta: Any) -> None:
    reader = StreamReader()
    error_text(raw)
    with contextlib.suppress(BadAnswer):
        parse_answer(load_json(raw), logprobs=True)
    with contextlib.suppress(BadAnswer):
        parse_answer({"output_ids": ids, "meta_info": meta}, logprobs=True)
    with contextlib.suppress(BadAnswer):
        parse_answer(answer(**meta), logprobs=True)
    with contextlib.suppress(BadAnswer):
        reader.feed(b"data: " + raw)
        reader.feed(raw)
        reader.finish(logprobs=True)


def test_stream_that_rewrites_tokens_is_bad() -> None:
    reader = StreamReader()
    first = {"output_ids": [4], "meta_info": {"completion_tokens": 1}}
    other = {"output_ids": [5, 9], "meta_info": {"completion_tokens": 2}}
    reader.feed(b"data: " + json.dumps(first).encode())
    with pytest.raises(BadAnswer, match="changed tokens already sent"):
        reader.feed(b"data: " + json.dumps(other).encode())


def test_clean_removes_terminal_control() -> None:
    assert clean("a\x1b[31m\nb\u202e") == "a [31m b"
    assert len(clean("x" * 9999)) == 300


def test_deep_json_is_bad_answer() -> None:
    with pytest.raises(BadAnswer):
        load_json(b"[" * 200_000)


def test_server_fields_hold_no_secret() -> None:
    client = Client("http://h:1", key="s3cret")
    found = server._plain({"note": "key s3cret", "api_key": "s3cret"}, client)
    assert found == {"note": "key ***"}
    assert "api_key" not in server.FIELDS
    assert "launch_command" not in server.FIELDS


def test_url_is_redacted() -> None:
    assert redact_url("http://u:p@h:30000/v/?k=1") == "http://h:30000/v"
    assert Client("http://u:p@h:30000/v1/").url == "http://h:30000"
    assert redact_url("http://[::1]:3/") == "http://[::1]:3"
    with pytest.raises(ValueError, match="expected http"):
        Client("h:30000")
