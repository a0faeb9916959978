# SPDX-License-Identifier: Apache-2.0
"""Run files for the report: read, described, and grouped by set-up.

A set-up is everything but speculation that moves a number: model, dtype, GPU, host and
overlay version, kind of weights, oracle or not, and the verb's own settings. Rows of
different set-ups never share a table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from sglang_exact.bench.run import BenchRun, RunError, load
from sglang_exact.client.wire import clean

FIELDS = (
    "model_path",
    "revision",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "device",
    "tp_size",
    "dp_size",
    "pp_size",
)
"""Of every server; `attention_backend` and the like are part of what is compared."""
# Not part of a set-up: which servers took part, and where a file lay.
_FREE_SETTINGS = {"plain", "base", "prompt_file"}
NOT_KNOWN = "not known"


class Loaded(NamedTuple):
    """A run, the name of its file and the hash of its bytes."""

    name: str
    sha256: str
    run: BenchRun

    def title(self) -> str:
        """For a table's column: the label, or the file's name."""
        return self.run.label or self.name


class Group(NamedTuple):
    """Runs of one verb and one set-up; `number` is that of the set-up."""

    verb: str
    number: int
    setup: dict[str, str]
    runs: list[Loaded]


def load_all(paths: Iterable[Path]) -> tuple[list[Loaded], list[str]]:
    """Every readable run, and what is wrong with the other files."""
    found: list[Loaded] = []
    problems: list[str] = []
    for path in paths:
        try:
            run = load(path)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except (RunError, OSError) as error:
            problems.append(str(error))
            continue
        if any(one.sha256 == digest for one in found):
            problems.append(f"{path}: the same run is given twice")
            continue
        found.append(Loaded(_name(path, found), digest, run))
    return found, problems


def _name(path: Path, found: Sequence[Loaded]) -> str:
    taken = {one.name for one in found}
    name, count = path.name, 2
    while name in taken:
        name, count = f"{path.name} ({count})", count + 1
    return name


def servers(run: BenchRun) -> list[dict[str, Any]]:
    """The servers of a record that are objects."""
    found = run.provenance.get("servers")
    return [s for s in found if isinstance(s, dict)] if isinstance(found, list) else []


def _object(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What a record says there, if it is an object."""
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def facts(server: Mapping[str, Any]) -> dict[str, str]:
    """What one server says of the things that make up a set-up."""
    fields, exact = _object(server, "fields"), _object(server, "attestation")
    tests = _object(exact, "test_settings")
    found = {key: shown(fields.get(key)) for key in FIELDS if key in fields}
    found["host version"] = shown(server.get("version"))
    if exact:
        found["overlay version"] = shown(exact.get("version"))
        found["GPU"] = shown(exact.get("gpu"))
    elif "accelerator" in fields:
        found["GPU"] = shown(fields["accelerator"])
    dummy = fields.get("load_format") == "dummy" or tests.get("dummy_weights")
    found["weights"] = "random" if dummy else "the model's"
    if tests.get("oracle"):
        found["acceptance"] = "set by an oracle"
    if tests.get("disabled_hooks"):
        found["disabled hooks"] = shown(tests["disabled_hooks"])
    if tests.get("deep_gemm_default"):
        found["DeepGEMM"] = "deterministic algorithms off"
    return found


def setup(run: BenchRun) -> dict[str, str]:
    """The set-up of a run; a value that its servers do not share names them all."""
    values: dict[str, dict[str, None]] = {}
    for server in servers(run):
        for key, value in facts(server).items():
            values.setdefault(key, {})[value] = None
    gpus = run.provenance.get("gpu")
    for gpu in gpus if isinstance(gpus, list) else ():
        if isinstance(gpu, dict):
            values.setdefault("GPU", {})[shown(gpu.get("name"))] = None
            values.setdefault("driver", {})[shown(gpu.get("driver_version"))] = None
    found = {key: " | ".join(sorted(names)) for key, names in values.items()}
    if not found:
        found["servers"] = NOT_KNOWN
    return found


def settings(run: BenchRun) -> dict[str, str]:
    """The verb's settings that decide whether two runs may be compared."""
    found = {
        key: shown(value)
        for key, value in run.settings.items()
        if key not in _FREE_SETTINGS
    }
    # Not where a prompt lay, but what it was.
    prompts = {str(r["prompt_sha256"])[:16] for r in run.rows if "prompt_sha256" in r}
    if prompts:
        found["prompts"] = ", ".join(sorted(prompts))
    return found


def mixed(run: BenchRun) -> list[str]:
    """What the servers of one run do not share, beside speculation.

    A server that is not under the overlay has no overlay version; that is what such
    runs compare, and is not reported.
    """
    found = []
    each = [(s.get("name"), facts(s)) for s in servers(run)]
    for key in dict.fromkeys(k for _, one in each for k in one):
        values = {one[key] for _, one in each if key in one}
        if len(values) > 1:
            named = ", ".join(f"{name}: {one.get(key, '-')}" for name, one in each)
            found.append(f"{key} differs between the servers of this run ({named})")
    return found


def warnings(run: BenchRun) -> list[str]:
    """What a reader must know before any number."""
    found = [] if run.complete else ["not complete: the run was cut off"]
    described = [facts(s) for s in servers(run)]
    if any(one.get("weights") == "random" for one in described):
        found.append("random weights")
    if any("acceptance" in one for one in described):
        found.append("acceptance was set by an oracle, it is not a draft model's")
    if not described:
        found.append("the servers of this run are not known")
    return [*found, *mixed(run)]


def remarks(run: BenchRun) -> list[str]:
    """What stands below the tables of a run."""
    return [*run.notes, *mixed(run), *([] if run.complete else ["not complete"])]


def group(found: Sequence[Loaded], verbs: Sequence[str] = ()) -> list[Group]:
    """Runs of one verb, set-up and settings together, in the order they came.

    Groups are in the order of `verbs`, those of other verbs last.
    """
    numbers: dict[str, int] = {}
    groups: dict[tuple[str, str, str], Group] = {}
    for one in found:
        own = setup(one.run)
        key = _key(own)
        number = numbers.setdefault(key, len(numbers) + 1)
        place = (one.run.verb, key, _key(settings(one.run)))
        groups.setdefault(place, Group(one.run.verb, number, own, [])).runs.append(one)
    order = {verb: place for place, verb in enumerate(verbs)}
    return sorted(
        groups.values(), key=lambda g: (order.get(g.verb, len(order)), g.number)
    )


def other_settings(groups: Sequence[Group]) -> list[str]:
    """What the groups of one verb and set-up differ in, each against the first."""
    first: dict[tuple[str, int], Group] = {}
    found = []
    for one in groups:
        base = first.setdefault((one.verb, one.number), one)
        if base is one:
            continue
        lines = apart(settings(one.runs[0].run), settings(base.runs[0].run))
        names = " and ".join(g.runs[0].title() for g in (one, base))
        found.append(
            f"{one.verb}: {names} have other settings and separate tables "
            f"({clean('; '.join(lines), 800)})"
        )
    return found


def _key(values: Mapping[str, str]) -> str:
    return orjson.dumps(values, option=orjson.OPT_SORT_KEYS).decode()


def setups(groups: Sequence[Group]) -> dict[int, dict[str, str]]:
    """Every set-up by its number."""
    return {g.number: g.setup for g in sorted(groups, key=lambda g: g.number)}


def apart(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """What two set-ups differ in."""
    return [
        f"{key}: {one.get(key, NOT_KNOWN)} against {other.get(key, NOT_KNOWN)}"
        for key in dict.fromkeys([*one, *other])
        if one.get(key) != other.get(key)
    ]


def shown(value: Any) -> str:
    """Any JSON value as one line of text."""
    if value is None:
        return NOT_KNOWN
    return value if isinstance(value, str) else orjson.dumps(value).decode()
