# SPDX-License-Identifier: Apache-2.0
"""The verifier's fake server with a chat endpoint and prompt ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from fake_server import FakeServer

CHAT = "/v1/chat/completions"


@dataclass
class BenchServer(FakeServer):
    """A server of the usual kinds that also answers conversations."""

    async def start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_route("*", "/flush_cache", self.flush)
        app.router.add_post("/generate", self.generate)
        app.router.add_post(CHAT, self.chat)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def chat(self, request: web.Request) -> web.Response:
        """The same answers as /generate gives for the conversation as text."""
        if self._denied(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        asked = await request.json()
        self.calls.append(asked)
        self.requests += 1
        kinds = self.lies.kinds
        if "error-500" in kinds:
            return web.json_response({"error": {"message": "boom"}}, status=500)
        text = "".join(f"<{m['role']}>{m['content']}" for m in asked["messages"])
        answer, _ = self._generate(
            {
                "text": text,
                "return_logprob": asked["logprobs"],
                "sampling_params": {
                    "temperature": asked["temperature"],
                    "max_new_tokens": asked["max_tokens"],
                    "ignore_eos": asked["ignore_eos"],
                },
            },
            kinds,
        )
        choice = {"meta_info": answer["meta_info"], "message": {"content": ""}}
        if asked.get("return_token_ids") and "no-token-ids" not in kinds:
            choice["response_token_ids"] = answer["output_ids"]
        body = json.dumps({"choices": [choice]}).encode()
        return web.Response(body=body, content_type="application/json")

    def _generate(
        self, body: dict[str, Any], kinds: set[str]
    ) -> tuple[dict[str, Any], list[int]]:
        answer, steps = super()._generate(body, kinds)
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = self._context(body)
        return answer, steps
