# SPDX-License-Identifier: Apache-2.0
"""Every variable that the host reads has a place in the tables."""

from __future__ import annotations

import ast
import importlib.util
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from sglang_exact import variables
from sglang_exact.host import VERSION, compat
from sglang_exact.host import source as host
from sglang_exact.host import variables as host_variables
from tools.pins import changes as host_changes

TABLES = variables.tables()
HARMLESS = [name for names in TABLES.harmless.values() for name in names]


def found(**environ: str) -> list[str]:
    return [reason.found for reason in variables.reasons(environ)]


def test_nothing_to_say() -> None:
    assert found() == []
    assert found(PATH="x", HOME="9", HF_HOME="9", LD_LIBRARY_PATH="x") == []


@pytest.mark.parametrize("name", TABLES.settled)
def test_settled(name: str) -> None:
    for value in TABLES.settled[name]:
        assert found(**{name: f" {value.upper()} "}) == []
    assert found(**{name: "9"}) == [f"{name}=9"]


def test_harmless() -> None:
    for name in HARMLESS:
        if not name.startswith("SGLANG_SIMULATE_ACC_"):
            assert found(**{name.replace("*", "X"): "9"}) == []


@pytest.mark.parametrize(
    "name",
    [
        "DUMPER_SOURCE_PATCHER_CONFIG",
        "DUMPER_SERVER_PORT",
        "SGLANG_DEBUG_REVERT_PR",
        "SGL_DEBUG_REVERT_PR",
        "SGLANG_USE_AITER",
        "SGLANG_EXACT_CHUNK_FILL",
        "SGLANG_OF_ANOTHER_RELEASE",
        "TRITON_OF_ANOTHER_RELEASE",
        "USE_TRITON_W8A8_FP8_KERNEL",
        "CUBLAS_WORKSPACE_CONFIG",
        "DG_JIT_NVCC_COMPILER",
    ],
)
def test_refused(name: str) -> None:
    """Whatever is not settled is refused, and its value, a password say, not shown."""
    (reason,) = variables.reasons({name: "/secret"})
    assert reason.found == f"{name} is set"
    assert "secret" not in str(reason)
    assert reason.fix == f"unset {name}"
    assert found(**{name: ""}) == []


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("SGLANG_USE_AITER", "False", True),
        ("SGLANG_USE_AITER", "0", True),
        ("SGLANG_USE_AITER", "1", False),
        ("SGLANG_EXACT_CHUNK_FILL", "1", True),
        ("SGLANG_EXACT_CHUNK_FILL", "0", False),
        ("SGLANG_DEBUG_REVERT_PR", "0", True),
        ("SGLANG_ROPE_CACHE_ALIGN", "128", True),
        ("SGLANG_ROPE_CACHE_ALIGN", "64", False),
    ],
)
def test_the_hosts_default_changes_nothing(name: str, value: str, good: bool) -> None:
    assert (found(**{name: value}) == []) is good


def test_the_interpreter_is_for_the_rehearsal() -> None:
    assert found(TRITON_INTERPRET="1") == ["TRITON_INTERPRET=1"]
    assert found(TRITON_INTERPRET="1", SGLANG_EXACT_TEST_REHEARSAL="1") == []


@pytest.mark.parametrize(
    ("length", "mode", "good"),
    [
        ("1", "real-draft-token", True),
        ("0", "", True),
        ("1", "", False),
        ("1", "fixed", False),
        ("2", "real-draft-token", False),
    ],
)
def test_forced_acceptance(length: str, mode: str, good: bool) -> None:
    """Only "reject every draft" keeps the answers; more commits unverified drafts."""
    environ = {variables.SIMULATED_LENGTH: length, variables.SIMULATED_MODE: mode}
    assert (variables.reasons(environ) == []) is good


READS = """
import os
from os import environ
from sglang.srt.utils import get_bool_env_var, get_int_env_var
KEY = "BY_CONSTANT"
class Envs:
    DECLARED = EnvBool(False)
    RENAMED_VAR = EnvStrWithAlias("x", deprecated_name="OLD_NAME")
a = os.environ.get("BY_GET", "1")
b = os.getenv("BY_GETENV")
c = os.environ["BY_INDEX"]
d = get_bool_env_var("BY_BOOL", "true")
e = get_int_env_var(
    "BY_INT",
    3,
)
f = "BY_IN" in os.environ
g = environ.setdefault("BY_SETDEFAULT", "2")
h = os.environ.get(KEY)
os.environ["ONLY_WRITTEN"] = "1"
"""


def test_how_a_variable_is_found(tmp_path: Path) -> None:
    """Each way of reading one, in Python and in sources compiled on the machine."""
    folder = tmp_path / "srt" / "deep"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text(READS)
    (folder / "b.cuh").write_text('auto x = std::getenv("BY_CUDA");\n')
    read = host_variables.read(tmp_path)
    assert {name: sorted(defaults) for name, defaults in read.items()} == {
        "DECLARED": ["False"],
        "RENAMED_VAR": ["'x'"],
        "OLD_NAME": [],
        "BY_GET": ["'1'"],
        "BY_GETENV": [],
        "BY_INDEX": [],
        "BY_BOOL": ["'true'"],
        "BY_INT": ["3"],
        "BY_IN": [],
        "BY_SETDEFAULT": ["'2'"],
        "BY_CONSTANT": [],
        "BY_CUDA": [],
    }


@pytest.mark.host
def test_every_variable_of_the_host_is_classified() -> None:
    """One more, or another default, fails here: judge it, then scripts/pin_host."""
    pins = compat.load(VERSION)
    assert pins is not None
    now = host_changes.inventory(host_changes.find_tree())["variables"]
    assert now == pins.inventory["variables"]
    names = {entry.partition(" = ")[0] for entry in now}
    assert len(names) > 1000
    for name in names:
        allowed, why = variables.judged(name)
        listed = any(fnmatchcase(name, pattern) for pattern in HARMLESS)
        settled = name in TABLES.settled
        assert listed if allowed is None else settled or why, name
    # No line of the tables speaks of what the host does not read.
    own = {"SGLANG_API_KEY", "SGLANG_VERSION"}
    own.add("SGLANG_BATCH_INVARIANT_OPS_SMALL_M_TRITON")
    for pattern in [*TABLES.settled, *HARMLESS]:
        if pattern.startswith("SGLANG_") and pattern not in own:
            assert any(fnmatchcase(name, pattern) for name in names), pattern


# Where the host sets variables on its way to serving, whatever the model.
SETS = (
    "sglang.srt.arg_groups.serving_hook.handle_environment_variables",
    "sglang.srt.arg_groups.attention_hook.handle_deterministic_inference",
    "sglang.srt.entrypoints.engine._set_envs_and_config",
    "sglang.srt.utils.common.set_cuda_arch",
)
# Set under a flag that is refused.
UNDER_A_FLAG = {"SGLANG_USE_BREAKABLE_CUDA_GRAPH": "debug_cuda_graph"}


def sets(node: ast.AST) -> dict[str, set[str]]:
    """Variable -> values that code gives it; "?" where they are computed."""
    found: dict[str, set[str]] = {}
    for inner in ast.walk(node):
        match inner:
            case ast.Call(
                func=ast.Attribute(attr="set", value=ast.Attribute(attr=name)),
                args=[value],
            ):
                pass
            case ast.Assign(
                targets=[ast.Subscript(slice=ast.Constant(value=str() as name))],
                value=value,
            ) if "environ" in ast.unparse(inner.targets[0]):
                pass
            case _:
                continue
        text = str(value.value) if isinstance(value, ast.Constant) else "?"
        found.setdefault(name, set()).add(text)
    return found


@pytest.mark.host
def test_what_the_host_sets_on_its_way_is_accepted_in_its_ranks() -> None:
    """A rank inherits it: refused there, no server would start on a GPU."""
    seen: dict[str, set[str]] = {}
    for target in SETS:
        for name, values in sets(host.definition(target)).items():
            seen.setdefault(name, set()).update(values)
    assert {"SGLANG_OPT_FP8_WO_A_GEMM", "NCCL_ALGO", "SGLANG_RUN_ID"} <= seen.keys()
    assert seen["SGLANG_OPT_FP8_WO_A_GEMM"] == {"False"}
    for name, values in seen.items():
        if name in UNDER_A_FLAG:
            assert found(**{name: "1"}), name
            continue
        for value in values - {"?"}:
            assert found(**{name: value}) == [], (name, value)


@pytest.mark.host
def test_every_variable_of_triton_is_looked_at() -> None:
    """Those of other GPUs and of its own tests aside, by name in its list of knobs."""
    spec = importlib.util.find_spec("triton.knobs")
    assert spec is not None and spec.origin is not None
    names = {
        node.args[0].value
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "").startswith("env_")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value).isupper()
    }
    assert len(names) > 30
    for name in names:
        judged = variables.judged(name)[0] is not None
        listed = any(fnmatchcase(name, pattern) for pattern in HARMLESS)
        assert judged or listed, name


@pytest.mark.host
def test_defaults_are_of_the_installed_host() -> None:
    assert host.version("sglang") == compat.pinned_versions()[-1]
    assert variables.host_defaults()["SGLANG_USE_AITER"][0] == ""


def test_tritons_own_assembler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer would name another one, in every process that imports it."""
    monkeypatch.setattr(variables, "own_ptxas", lambda: "/Own/ptxas-blackwell")
    environ: dict[str, str] = {}
    variables.pin_ptxas(environ)
    assert environ == {variables.PTXAS: "/Own/ptxas-blackwell"}
    assert variables.reasons(environ) == []
    # A given one is kept, and refused, but for Triton's own.
    environ[variables.PTXAS] = "/usr/local/cuda/bin/ptxas"
    variables.pin_ptxas(environ)
    (reason,) = variables.reasons(environ)
    assert reason.found == f"{variables.PTXAS} is set"
    # Without Triton there is nothing to name.
    monkeypatch.setattr(variables, "own_ptxas", lambda: None)
    environ.clear()
    variables.pin_ptxas(environ)
    assert environ == {}


def test_where_tritons_assembler_lies() -> None:
    pytest.importorskip("triton")
    found = variables.own_ptxas()
    assert found and Path(found).name == "ptxas-blackwell" and Path(found).exists()
