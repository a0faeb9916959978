# SPDX-License-Identifier: Apache-2.0
"""compose.yaml: one recipe in three services, and flags that the overlay accepts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import docker_build
import pytest
import warm
from compose_file import COMPOSE, EXAMPLE, ROOT, flags, load, pairs, variables

from sglang_exact import __version__
from sglang_exact.rehearsal.environment import environment

RECIPE = {
    "--model-path": "Qwen/Qwen3.8-27B",
    "--max-running-requests": "8",
    "--chunked-prefill-size": "8192",
    "--context-length": "262144",
    "--mem-fraction-static": "0.88",
}
SPECULATION = {
    "--speculative-algorithm": "DFLASH",
    "--speculative-draft-model-path": "z-lab/Qwen3.8-27B-DFlash2",
    "--speculative-num-draft-tokens": "8",
}
WHERE = {"--host": "0.0.0.0", "--port": "30000"}
# What the CPU engine needs; none of it is about speculation or exactness.
CPU = (
    "--device", "cpu", "--skip-tokenizer-init", "--attention-backend", "triton",
    "--disable-overlap-schedule", "--skip-server-warmup",
    "--speculative-draft-attention-backend", "triton",
    "--speculative-draft-load-format", "dummy",
)  # fmt: skip


def test_recipe() -> None:
    assert pairs(flags("exact")) == RECIPE | SPECULATION | WHERE
    assert pairs(flags("plain")) == RECIPE | WHERE
    assert pairs(flags("verify")) == RECIPE | SPECULATION


def test_one_command_starts_the_exact_server_alone() -> None:
    services = load()["services"]
    assert [n for n, s in services.items() if not s.get("profiles")] == ["exact"]
    assert services["plain"]["profiles"] == ["plain"]
    assert services["verify"]["profiles"] == ["verify"]


def test_every_variable_is_explained_with_its_default() -> None:
    shown = {}
    for line in EXAMPLE.read_text().splitlines():
        name, equals, value = line.removeprefix("#").partition("=")
        if equals and name.isupper():
            shown.setdefault(name, set()).add(value)
    found = variables()
    assert set(shown) == set(found)
    for name, defaults in found.items():
        assert len(defaults) == 1, name
        if name not in ("HF_CACHE", "RESULTS"):
            assert shown[name] == defaults, name
    # A file that sets nothing by itself can be copied as it is.
    assert all(x.startswith("#") or not x for x in EXAMPLE.read_text().splitlines())
    assert "=" not in "".join(
        x for x in EXAMPLE.read_text().splitlines() if x.startswith("HF_TOKEN")
    )


def test_every_variable_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "docker.md").read_text(encoding="utf-8")
    missing = [name for name in variables() if f"`{name}`" not in guide]
    # The image's name and the size of shared memory need no words.
    assert set(missing) <= {"IMAGE", "SHM_SIZE"}


def test_versions_agree() -> None:
    service = load()["services"]["exact"]
    assert service["image"] == f"sglang-exact:{__version__}"
    base = service["build"]["args"]["BASE_IMAGE"]
    assert f"ARG BASE_IMAGE={base}" in (ROOT / "docker/Dockerfile").read_text()
    version = base.split(":v")[1].split("-")[0]
    assert f"ARG SGLANG_VERSION={version}" in (ROOT / "docker/Dockerfile").read_text()
    assert load()["volumes"]["jit"]["name"].endswith(version)


@pytest.mark.parametrize("name", ["exact", "plain", "verify"])
def test_container_settings(name: str) -> None:
    service = load()["services"][name]
    assert service["shm_size"] == "16gb"
    assert service["ulimits"] == {"memlock": -1, "stack": 67108864, "nofile": 65536}
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "network_mode", "ipc", "pid"} & set(service)
    (gpu,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert gpu == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
    targets = {line.split(":")[0]: line.split(":")[1] for line in service["volumes"]}
    assert targets == {
        "huggingface": "/cache/huggingface",
        "jit": "/cache/sglang",
        "results": "/cache/results",
    }
    assert set(targets) == set(load()["volumes"])


CACHES = """
import json, os
from sglang.srt import environ
def kept():
    return [*environ.third_party_cache_defaults().values(),
            environ.envs.SGLANG_DG_CACHE_DIR.get()]
set_by_image = kept()
del os.environ["SGLANG_CACHE_DIR"]
print(json.dumps([set_by_image, kept()]))
"""


@pytest.mark.host
def test_compiled_kernels_stay_in_a_volume(tmp_path: Path) -> None:
    """Else every new container compiles for minutes; the host says where they go."""
    (text,) = [item.text for item in docker_build.read() if item.name == "ENV"]
    environ = dict(word.split("=") for word in text.split())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CACHES],
        env={**os.environ, **environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    mounts = dict(x.split(":") for x in load()["services"]["exact"]["volumes"])
    here, otherwise = json.loads(done.stdout.splitlines()[-1])
    assert len(here) > 4
    assert all(f"{path}/".startswith(f"{mounts['jit']}/") for path in here)
    assert all(path.startswith(str(tmp_path)) for path in otherwise)


@pytest.mark.parametrize("name", ["exact", "plain"])
def test_port_and_health(name: str) -> None:
    """The port is this machine's alone unless asked otherwise."""
    service = load()["services"][name]
    assert service["ports"] == [
        {"target": 30000, "published": "30000", "host_ip": "127.0.0.1"}
    ]
    other = load({"BIND": "0.0.0.0", "PORT": "8000"})["services"][name]["ports"]
    assert other == [{"target": 30000, "published": "8000", "host_ip": "0.0.0.0"}]
    health = service["healthcheck"]
    assert health["test"] == ["CMD", "python3", "/opt/sglang-exact/health.py"]
    assert health["start_period"] == "30m"
    text = (ROOT / "docker/Dockerfile").read_text()
    for key in ("start_period", "interval", "timeout", "retries"):
        assert f"--{key.replace('_', '-')}={health[key]}" in text


def test_no_secret_in_the_file() -> None:
    assert variables()["HF_TOKEN"] == {""}
    assert "api-key" not in COMPOSE.read_text()


def check(folder: Path, models: Path, service: str, **changes: str) -> tuple[int, str]:
    """Resolve the service's flags in the host, as its launcher does before it serves.

    The model is the tiny one with the real one's context; the launcher ends before
    weights load.
    """
    folder.mkdir()
    config = json.loads((models / "target" / "config.json").read_text())
    config["max_position_embeddings"] = 262144
    (folder / "config.json").write_text(json.dumps(config))
    given = pairs(flags(service))
    assert given["--model-path"] == RECIPE["--model-path"]
    given["--model-path"] = str(folder)
    if "--speculative-draft-model-path" in given:
        given["--speculative-draft-model-path"] = str(models / "dflash2")
    given |= changes
    words = [word for pair in given.items() for word in pair]
    more = [
        word
        for flag, value in zip([*CPU], [*CPU[1:], ""], strict=True)
        if flag.startswith("--")
        and ("speculative" not in flag or "--speculative-algorithm" in given)
        for word in ([flag] if value.startswith("--") or not value else [flag, value])
    ]
    base = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    launcher = ["-m", "sglang_exact.launch_server", *words, *more, "--exact-check"]
    done = warm.run(launcher, env=environment(base), merged=True, timeout=180)
    return done.returncode, done.stdout


@pytest.mark.host
@pytest.mark.parametrize(
    "service", ["exact", pytest.param("plain", marks=pytest.mark.slow)]
)
def test_flags_are_accepted(service: str, tmp_path: Path, tiny_models: Path) -> None:
    status, text = check(tmp_path / "model", tiny_models, service)
    assert status == 0, text
    assert "this setup can be served exactly" in text


@pytest.mark.host
def test_wrong_flags_are_refused(tmp_path: Path, tiny_models: Path) -> None:
    """The control: the same machinery refuses what breaks exactness."""
    changes = {"--speculative-num-draft-tokens": "64", "--kv-cache-dtype": "fp8_e4m3"}
    status, text = check(tmp_path / "model", tiny_models, "exact", **changes)
    assert status == 3, text
    assert "--speculative-num-draft-tokens 64" in text
    assert "--kv-cache-dtype fp8_e4m3" in text
