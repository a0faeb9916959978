# SPDX-License-Identifier: Apache-2.0
"""What the host makes of its arguments is looked at, by whichever name they came.

One process of the installed host resolves every case, as the launcher would.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import warm
from launching import flags

from sglang_exact.rehearsal import models
from sglang_exact.rehearsal.environment import environment
from sglang_exact.rehearsal.server import draft_flags

pytestmark = pytest.mark.host

RESOLVE = """
import json, os, sys
from sglang.srt.server_args import prepare_server_args
from sglang_exact import hooks, scope, settings
from sglang_exact.hooks import registered
from sglang_exact.hooks.rank import setup_reasons

def reasons(words, variables):
    os.environ.update(variables)
    config, _ = settings.read(os.environ)
    registered.write(hooks.decide(config, (hooks.MAIN,)))
    try:
        args = prepare_server_args(words)
        found = scope.fill(args)
        if not found:
            args.resolve_once()
            found = setup_reasons(args)
        return [reason.found for reason in found]
    finally:
        for name in variables:
            del os.environ[name]

cases = json.load(sys.stdin)
found = {}
for name, (words, variables) in cases.items():
    try:
        found[name] = reasons(words, variables)
    except (ValueError, AssertionError, SystemExit) as error:
        found[name] = [f"the host: {error}"]
print("ANSWER " + json.dumps(found))
"""

PREFILL, DECODE = '{"prefill": {"backend": "%s"}}', '{"decode": {"backend": "%s"}}'
BUCKETS = '{"prefill": {"backend": "breakable", "bs": [9000000]}}'
BREAKABLE = ["--cuda-graph-backend-prefill", "breakable"]
EXPERTS = '{"model_type": "qwen3_5_moe_text", "num_experts": 4}'
QUANTIZED = '{"quantization_config": {"quant_method": "fp8"}}'
LONG = '{"max_position_embeddings": 9000000}'
# Name -> (flags, variables, what is found; nothing if it is served).
CASES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "plain": ([], {}, ""),
    "prefill full": (["--cuda-graph-backend-prefill", "full"], {}, "prefill graphs"),
    "prefill breakable": (BREAKABLE, {}, ""),
    "prefill breakable json": (["--cuda-graph-config", PREFILL % "breakable"], {}, ""),
    "prefill json": (
        ["--cuda-graph-config", PREFILL % "full"],
        {},
        "prefill graphs full",
    ),
    # The host: what is written in JSON counts more than a flag.
    "prefill json over a flag": (
        [*BREAKABLE, "--cuda-graph-config", PREFILL % "full"],
        {},
        "prefill graphs full",
    ),
    "prefill sizes": ([*BREAKABLE, "--cuda-graph-max-bs-prefill", "64"], {}, ""),
    "prefill buckets": (
        ["--cuda-graph-config", BUCKETS],
        {},
        "prefill graphs of up to 9000000",
    ),
    "prefill context": (
        [*BREAKABLE, "--cuda-graph-prefill-max-context", "512"],
        {},
        "prefill graphs of contexts up to 512",
    ),
    "no prefill graphs": (["--disable-prefill-cuda-graph"], {}, ""),
    "prefill off": (["--cuda-graph-backend-prefill", "disabled"], {}, ""),
    "decode json": (
        ["--cuda-graph-config", DECODE % "breakable"],
        {},
        "decode graphs breakable",
    ),
    "decode off": (["--cuda-graph-config", DECODE % "disabled"], {}, ""),
    "graphs off": (["--disable-cuda-graph"], {}, ""),
    "grpc": (["--grpc-mode"], {}, "--grpc-mode True"),
    "smg": (["--smg-grpc-mode"], {}, "--smg-grpc-mode True"),
    "smg short": (["--smg-grpc-m"], {}, "--smg-grpc-mode True"),
    "grpc port": (["--grpc-port", "51000"], {}, "--grpc-port 51000"),
    "grpc variable": ([], {"SGLANG_GRPC_PORT": "51000"}, "--grpc-port 51000"),
    "tp": (["--tensor-parallel-size", "4"], {}, "--tp-size 4"),
    "ep": (["--ep", "2"], {}, "--ep-size 2"),
    "hicache": (["--enable-hicache"], {}, "--enable-hierarchical-cache"),
    "offload": (["--offload-group-size", "2"], {}, "--offload-group-size 2"),
    "monokernel": (["--monokernel-backend", "amd"], {}, "--enable-amd-monokernel"),
    "debug": (["--debug-cuda-graph"], {}, "--debug-cuda-graph True"),
    "gguf": (["--load-format", "gguf"], {}, "--load-format gguf"),
    "bitsandbytes": (["--load-format", "bitsandbytes"], {}, "--load-format bitsand"),
    "loader": (
        ["--model-loader-extra-config", '{"enable_multithread_load": true}'],
        {},
        "",
    ),
    "quantized": (
        ["--json-model-override-args", QUANTIZED],
        {},
        "a quantized checkpoint",
    ),
    "experts": (["--json-model-override-args", EXPERTS], {}, "a text model of type"),
    "requests": (["--max-running-requests", "300"], {}, "--max-running-requests 300"),
    "requests at most": (["--max-running-requests", "256"], {}, ""),
    "whole prompts": (["--chunked-prefill-size", "-1"], {}, ""),
    "long prompts": (
        ["--chunked-prefill-size", "-1", "--json-model-override-args", LONG],
        {},
        "up to 9000000 prompt tokens",
    ),
    "long chunks": (["--chunked-prefill-size", "9000000"], {}, "up to 9000000 prompt"),
    "rehearsal on a gpu": (
        ["--device", "cuda"],
        {},
        "SGLANG_EXACT_TEST_REHEARSAL=1 with --device cuda",
    ),
    "draft tokens": (["DFLASH", "--speculative-dflash-block-size", "4"], {}, ""),
    "many draft tokens": (
        ["DFLASH", "--speculative-dflash-block-size", "64"],
        {},
        "--speculative-num-draft-tokens 64",
    ),
}
# Name -> (file of the checkpoint, what it holds, what is found).
FP8 = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
CACHE = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
INT8 = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": []}
FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "modelopt": ("hf_quant_config.json", FP8, "a quantized checkpoint (modelopt_fp8)"),
    # The host makes nothing of it: bfloat16 layers and cache.
    "cache alone": ("hf_quant_config.json", CACHE, ""),
    "modelslim": (
        "quant_model_description.json",
        {"model.layers.0.mlp.up_proj.weight": "W8A8"},
        "a quantized checkpoint (modelslim)",
    ),
    "compression": (
        "config.json",
        {"compression_config": INT8},
        "a quantized checkpoint (compression_config",
    ),
    "vocabulary": ("config.json", {"vocab_size": 510}, "a vocabulary of 510 tokens"),
}


def checkpoint(folder: Path, base: Path, name: str, content: dict[str, Any]) -> Path:
    """A model folder with `content` in the file `name`, beside the config of `base`."""
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    file = folder / name
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **content}))
    return folder


@pytest.fixture(scope="module")
def resolved(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: Path
) -> dict[str, list[str]]:
    """What is found in every case."""
    folder = tmp_path_factory.mktemp("resolved")
    draft = models.make_draft(folder / "draft", "dflash")
    cases: dict[str, tuple[list[str], dict[str, str]]] = {}
    for name, (words, variables, _) in CASES.items():
        if words[:1] == ["DFLASH"]:
            words = [*draft_flags("dflash", draft)[:-2], *words[1:]]
        cases[name] = (flags(tiny_models / "target", *words), variables)
    for name, (file, content, _) in FILES.items():
        model = checkpoint(folder / name, tiny_models / "target", file, content)
        cases[name] = (flags(model), {})
    done = warm.run(["-c", RESOLVE], env=environment(), stdin=json.dumps(cases))
    answers = [x for x in done.stdout.splitlines() if x.startswith("ANSWER ")]
    assert answers, done.stdout + done.stderr
    found: dict[str, list[str]] = json.loads(answers[-1].removeprefix("ANSWER "))
    return found


WANT = {n: c[2] for n, c in CASES.items()} | {n: f[2] for n, f in FILES.items()}


@pytest.mark.parametrize("name", WANT)
def test_what_is_resolved_is_looked_at(
    resolved: dict[str, list[str]], name: str
) -> None:
    if not WANT[name]:
        assert resolved[name] == []
    else:
        assert any(found.startswith(WANT[name]) for found in resolved[name]), resolved[
            name
        ]
