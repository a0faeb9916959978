# SPDX-License-Identifier: Apache-2.0
"""A planted error: one bit of one logprob of one answer, between server and client.

What `sglang-exact verify` has to find. A proxy on the loopback interface passes
everything on as it came, but for the lowest bit of the mantissa of one number.
"""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple

from sglang_exact.client.bits import bits_to_float, float32_bits, show
from sglang_exact.client.process import free_port

_PASSED_ON = ("Content-Type",)


class Planted(NamedTuple):
    """The bit that was flipped.

    Attributes:
        prompt_sha256: of the prompt's decimal ids joined by commas.
        position: of the token in the answer, from 0.
        token: its id.
        before, after: float32 bit patterns of its logprob.
    """

    prompt_sha256: str
    position: int
    token: int
    before: int
    after: int


def plant(asked: Mapping[str, Any], answer: dict[str, Any]) -> Planted | None:
    """Flip the bit in the middle of an answer of POST /generate, in place.

    Args:
        asked: body of the request.
        answer: decoded; its chosen logprob changes, its top list does not.

    Returns:
        What was done; None for an answer without logprobs or without finite ones.
    """
    meta = answer.get("meta_info") or {}
    pairs = meta.get("output_token_logprobs") or []
    if not pairs or "input_ids" not in asked:
        return None
    position = len(pairs) // 2
    bits = float32_bits(pairs[position][0])
    if bits is None:
        return None
    pairs[position][0] = bits_to_float(bits ^ 1)
    text = ",".join(map(str, asked["input_ids"]))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Planted(digest, position, pairs[position][1], bits, bits ^ 1)


def is_named(planted: Planted | None, arm: Mapping[str, Any]) -> bool:
    """Whether an arm of the verifier's result names this bit and nothing else."""
    found = arm.get("first_divergence")
    if planted is None or not found or arm["different"] != 1:
        return False
    return bool(
        found["prompt_sha256"] == planted.prompt_sha256
        and found["position"] == planted.position
        and found["what"] == ["logprobs"]
        and found["ulps"] == 1
        and found["ids"] == {"served": planted.token, "reference": planted.token}
        and found["logprobs"]
        == {"served": show(planted.after), "reference": show(planted.before)}
    )


class Proxy:
    """Passes HTTP on to a server, as a context manager; plants one bit.

    Args:
        url: of the server.
        number: of the answer with logprobs that is changed, from 1; later ones with
            the same prompt are not.
    """

    def __init__(self, url: str, number: int = 2) -> None:
        self.target, self.number = url, number
        self.planted: Planted | None = None
        self._seen = 0
        self._lock = threading.Lock()
        # A proxy of the environment has no business with a local server.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", free_port()), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Base URL of the proxy."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def forward(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the server's answer, with the bit if it is due.

        A server that does not answer is a 502.
        """
        request = urllib.request.Request(
            self.target + path,
            body,
            {"Content-Type": "application/json"},
            method=method,
        )
        try:
            with self._opener.open(request) as answer:
                status, headers, raw = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            status, headers, raw = error.code, error.headers, error.read()
        except OSError as error:
            return 502, {}, str(error).encode()
        if status == 200 and path == "/generate" and body is not None:
            raw = self._with_bit(json.loads(body), raw)
        kept = {name: headers[name] for name in _PASSED_ON if name in headers}
        return status, kept, raw

    def _with_bit(self, asked: Mapping[str, Any], raw: bytes) -> bytes:
        if asked.get("stream") or not asked.get("return_logprob"):
            return raw
        with self._lock:
            self._seen += 1
            if self._seen != self.number:
                return raw
            answer = json.loads(raw)
            self.planted = plant(asked, answer)
            return json.dumps(answer).encode()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if self.command == "POST" else None
        status, headers, raw = self.proxy.forward(self.command, self.path, body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = _pass_on

    def log_message(self, *_: Any) -> None:
        """Nothing: the verifier keeps the record."""
