# SPDX-License-Identifier: Apache-2.0
"""Every RUN of the Dockerfile, run here: on the installed host, without Docker."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deep_gemm_wheels import wheel_root
from docker_build import (
    DOCKERFILE,
    OURS_TO_SET,
    ROOT,
    Build,
    Failed,
    base_image,
    distribution,
    read,
    runs,
    site_packages,
)

from sglang_exact import __version__
from sglang_exact.host import VERSION

STEPS = ROOT / "docker" / "steps"
SETTINGS = {"USER_ID": str(os.getuid())}
# The DeepGEMM without the fence is an older one than the pinned.
WAIVED = {"SGLANG_EXACT_ALLOW_UNPINNED_HOST": "1"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The image of a host whose DeepGEMM lacks the fence, so that it gets it."""
    folder = tmp_path_factory.mktemp("image")
    base = base_image(folder / "base", wheel_root("0.2.2"))
    return Build(folder / "stages", base, SETTINGS, WAIVED).run()


def step(base: Path, *words: str | Path, **variables: str) -> tuple[int, str]:
    """Run one step with the base's Python; status and output."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(OURS_TO_SET)}
    environ.pop("PYTHONPATH", None)
    environ["PATH"] = f"{base / 'bin'}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(
        [str(word) for word in words],
        env={**environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_every_run_is_a_file() -> None:
    """Nothing is done in the Dockerfile itself, so that nothing escapes the tests."""
    found = runs()
    assert len(found) == 6
    for line in found:
        match = re.match(r"(sh|python3) /opt/sglang-exact/steps/([\w.]+)( |$)", line)
        assert match is not None, line
        assert (STEPS / match.group(2)).is_file()
        assert not set(line) & set(";&|<>`"), line
    used = {Path(word).name for line in found for word in line.split()}
    assert {path.name for path in STEPS.iterdir() if path.suffix != ".pyc"} - {
        "__pycache__"
    } <= used


def test_last_steps_run_as_the_account_that_serves() -> None:
    names = [item.name for item in read()]
    texts = [item.text for item in read()]
    user = len(names) - 1 - names[::-1].index("USER")
    assert texts[user] == "${USER_ID}"
    assert "check.sh" in texts[user + 1]
    assert not any(name in ("COPY", "ADD") for name in names[user:])


def test_digest_is_given_or_absent() -> None:
    """A digest in the file has to be a real one: there is none, or 64 digits."""
    for digest in re.findall(r"sha256:(\w+)", DOCKERFILE.read_text()):
        assert re.fullmatch(r"[0-9a-f]{64}", digest)
    first = read()[0]
    assert first.name == "ARG"
    assert first.text == f"BASE_IMAGE=lmsysorg/sglang:v{VERSION}-cu130"


@pytest.mark.host
def test_image(built: Build) -> None:
    site = site_packages(built.base)
    assert f"install: sglang_exact-{__version__}" in built.text
    assert "added nothing else" in built.text
    assert (site / "sglang_exact" / "host" / "pins").is_dir()
    assert "[FAIL]" not in built.text
    assert f"[ok  ] sglang_exact: {__version__}" in built.text
    assert "Nothing fails." in built.text
    assert "added: sglang-exact" in built.text
    assert built.user == SETTINGS["USER_ID"]


@pytest.mark.host
def test_header_is_patched(built: Build) -> None:
    from sglang_exact.host import headers

    assert "0.2.2: patched in place" in built.text
    assert "0.2.2: fenced" in built.text
    install = headers.Install("0.2.2", site_packages(built.base))
    assert headers.reasons(install, headers.load_manifest()) == []
    # The control: the wheel it came from has no fence.
    untouched = headers.Install("0.2.2", wheel_root("0.2.2"))
    assert headers.reasons(untouched, headers.load_manifest()) != []


@pytest.mark.host
def test_folders_belong_to_the_account(built: Build) -> None:
    for name in ("home", "huggingface", "sglang", "results"):
        assert built.inside(f"/cache/{name}").stat().st_uid == os.getuid()
    accounts = built.inside("/etc/passwd").read_text().splitlines()
    assert sum(line.split(":")[2] == SETTINGS["USER_ID"] for line in accounts) == 1


@pytest.mark.host
def test_replaced_torch_is_found(built: Build, tmp_path: Path) -> None:
    """The control of `compare`: another version, and a package that is gone."""
    record = tmp_path / "base.json"
    before = json.loads(built.inside("/opt/sglang-exact/base.json").read_text())
    assert before["torch"][0] == "2.14.1"
    before["torch"][0] = "2.14.0"
    before["vanished"] = ["1.0", "/somewhere"]
    record.write_text(json.dumps(before))
    status, text = step(built.base, "python3", STEPS / "base.py", "compare", record)
    assert status == 1
    assert "found torch 2.14.1" in text and "expected 2.14.0" in text
    assert "found no vanished" in text
    status, text = step(built.base, "sh", STEPS / "check.sh", STEPS / "base.py", record)
    assert status == 1
    assert "doctor" not in text


@pytest.mark.host
def test_doctor_ends_the_build(built: Build, tmp_path: Path) -> None:
    record = built.inside("/opt/sglang-exact/base.json")
    check = (STEPS / "check.sh", STEPS / "base.py", record)
    assert step(built.base, "sh", *check, **WAIVED)[0] == 0
    status, text = step(built.base, "sh", *check, **WAIVED, FLA_USE_FAST_OPS="1")
    assert status == 1
    assert "[FAIL] environment" in text and "USER_ID=0" in text
    status, text = step(built.base, "sh", *check)
    assert status == 1
    assert "[FAIL] stack: found sgl-deep-gemm 0.2.2" in text
    assert text.count("[FAIL]") == 1


@pytest.mark.host
def test_wrong_base_is_refused(tmp_path: Path) -> None:
    """Every reason at once, and the build ends at this step."""
    base = base_image(tmp_path / "base", cuda="")
    (base / "bin" / "nvcc").unlink()
    out = tmp_path / "base.json"
    line = ("record", out, "--sglang", "0.5.22", "--cuda", "13")
    status, text = step(
        base,
        *(base / "bin" / "python3", STEPS / "base.py", *line),
        PATH=str(tmp_path),
        CUDA_HOME=str(tmp_path),
    )
    assert status == 1
    for found in (
        f"found SGLang {VERSION}",
        "found torch built for CUDA none",
        "no nvcc",
    ):
        assert found in text
    with pytest.raises(Failed, match=f"found SGLang {VERSION}; expected 0.5.22"):
        Build(tmp_path / "stages", base, {**SETTINGS, "SGLANG_VERSION": "0.5.22"}).run()


@pytest.mark.host
def test_base_is_never_upgraded(built: Build, tmp_path: Path) -> None:
    """A package that is too old for this one is refused, not replaced."""
    base = base_image(tmp_path / "base")
    distribution(site_packages(base), "rich", "1.0")
    wheels = built.inside("/opt/sglang-exact/wheels")
    status, text = step(base, "python3", STEPS / "install.py", wheels)
    assert status == 1
    assert "found rich 1.0; expected >=13" in text
    assert "typer" not in text
    empty = tmp_path / "empty"
    empty.mkdir()
    status, text = step(base, "python3", STEPS / "install.py", empty)
    assert status == 1 and "found wheels none" in text


@pytest.mark.host
def test_missing_packages_come_under_a_constraint(built: Build, tmp_path: Path) -> None:
    """Of two versions on offer pip takes the one beside which nothing moves."""
    wheel = tmp_path / "links"
    base = base_image(tmp_path / "base")
    site = site_packages(base)
    (site / "host.pth").unlink()
    have = ("packaging", "rich", "aiohttp", "orjson", "jinja2", "msgspec", "click")
    for name in have:
        distribution(site, name, {"jinja2": "3.1.6", "orjson": "3.13"}.get(name, "24"))
    shutil.copytree(Path(__import__("packaging").__file__).parent, site / "packaging")
    for version, needs in (("0.20", "click<25"), ("0.21", "click>=25")):
        fake_wheel(wheel, "typer", version, needs)
    fake_wheel(wheel, "click", "25")
    wheels = built.inside("/opt/sglang-exact/wheels")
    status, text = step(
        base,
        *("python3", STEPS / "install.py", wheels),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(wheel),
    )
    assert status == 0, text
    assert "added ['typer>=0.20']" in text
    assert (site / "typer-0.20.dist-info").is_dir()
    assert not (site / "click-25.dist-info").exists()


def fake_wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """A wheel that holds nothing but its metadata."""
    import zipfile

    folder.mkdir(exist_ok=True)
    info = distribution(folder, name, version, *needs)
    (info / "WHEEL").write_text(
        "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for item in info.iterdir():
            file.write(item, f"{info.name}/{item.name}")
    shutil.rmtree(info)


def test_unknown_header_ends_the_build(tmp_path: Path) -> None:
    base = base_image(tmp_path / "base", wheel_root("0.2.3.post2"))
    (header,) = site_packages(base).rglob("sm120_bf16_gemm.cuh")
    patch = ROOT / "scripts" / "apply_patches"
    assert step(base, "sh", STEPS / "headers.sh", patch)[0] == 0
    header.write_text(header.read_text() + "\n// edited\n")
    status, text = step(base, "sh", STEPS / "headers.sh", patch)
    assert status == 2
    assert "expected sha256" in text or "sha256" in text


def test_accounts(tmp_path: Path) -> None:
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0::/root:/bin/sh\n")
    uid = os.getuid()
    lines = 1 if uid == 0 else 2
    for _ in range(2):
        status, _ = step(
            Path(sys.prefix), "sh", STEPS / "user.sh", str(uid), tmp_path / "c", passwd
        )
        assert status == 0
        assert len(passwd.read_text().splitlines()) == lines
    for wrong in ("", "me", "-1"):
        status, text = step(
            Path(sys.prefix), "sh", STEPS / "user.sh", wrong, tmp_path / "c", passwd
        )
        assert status == 1 and "expected a number" in text
    if uid == 0:
        step(Path(sys.prefix), "sh", STEPS / "user.sh", "1234", tmp_path / "c", passwd)
        assert (tmp_path / "c" / "home").stat().st_uid == 1234
        assert f"sglang-exact:x:1234:1234::{tmp_path / 'c'}/home" in passwd.read_text()


def test_image_is_what_the_wheel_is(built: Build) -> None:
    """The context leaves out what the Dockerfile does not copy."""
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = set()
    for item in read():
        if item.name == "COPY" and not item.text.startswith("--from"):
            copied |= set(item.text.split()[:-1])
    assert copied == allowed
    assert "*" in ignored
