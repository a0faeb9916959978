# SPDX-License-Identifier: Apache-2.0
"""Which files of a site-packages a server of one text model needs.

Everything is taken but what is listed here, each with its reason. Whether what is left
suffices is not argued: `unpack` imports the server's modules and runs doctor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

OWN = "sglang-exact"
# Distributions that nothing on the way of a text model imports. (MTP's graph capture
# imports flash_mla whatever backend serves, and that needs a driver to load.)
LEFT_OUT = {
    "tilelang": "kernels of other models",
    "z3-solver": "of tilelang",
    "pyarrow": "of datasets",
    "pandas": "of datasets",
    "datasets": "benchmark data",
    "modelscope": "another model hub",
    "modelscope-hub": "another model hub",
    "numba": "image processing",
    "llvmlite": "of numba",
    "anthropic": "a client of a remote service",
    "timm": "image models",
    "py-spy": "a profiler",
    "nvidia-mathdx": "headers of device libraries that no served kernel includes",
}
# Parts of distributions that are taken. (triton imports every backend that its entry
# points name, so the one of another vendor stays.)
LEFT_OUT_PATHS = {
    r"(^|/)__pycache__/": "made again",
    r"\.pyi$": "for type checkers",
    r"^torch/(test|share)/": "tests",
    r"^torch/testing/_internal/(generated|opinfo)/": "tests",
    r"^triton/_C/libproton": "a profiler",
    r"^triton/backends/nvidia/lib/cupti/": "of the profiler",
    r"^triton/backends/nvidia/bin/(nvdisasm|cuobjdump)$": "disassemblers",
    r"^triton/FileCheck$": "tests",
    r"^nvidia/cu\d+/lib/libnvperf_": "a profiler",
    r"^nvidia/cu\d+/lib/libnvrtc(-builtins)?\.alt\.": "second copy of a compiler",
    r"^sgl_kernel/flash_ops\.": "FA3 attention, which exactness refuses",
    r"^sgl_kernel/(infllm_ops|flashmla_ops)\.": "attention of other models",
    r"^sglang/multimodal_gen/": "image generation",
    r"^sglang/test/": "tests",
}
CUDA_LIBRARIES = r"^nvidia/(cu\d+|cudnn|cusparselt)/"


class Chosen(NamedTuple):
    """Relative paths to take, and versions of the distributions they belong to."""

    paths: list[str]
    packages: dict[str, str]


class Refused(ValueError):
    """A site-packages of which no bundle can be made; the text has every reason."""


def normalised(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _editable(item: metadata.Distribution) -> bool:
    text = item.read_text("direct_url.json")
    info = json.loads(text).get("dir_info", {}) if text else {}
    return bool(info.get("editable"))


def choose(
    site: Path, keep: Collection[str] = (), *, cuda_libraries: bool = True
) -> Chosen:
    """What to take of `site`; `keep` names distributions to take all the same.

    Raises Refused if a distribution is installed as a link to somewhere else, if pip is
    missing, which installs the wheels on the other side, or for an unknown name.
    """
    reasons = [
        f"found --keep {name}; expected one of {', '.join(sorted(LEFT_OUT))}"
        for name in keep
        if normalised(name) not in LEFT_OUT
    ]
    dropped = set(LEFT_OUT) - {normalised(name) for name in keep} | {OWN}
    gone: set[str] = set()
    packages = {}
    for item in metadata.distributions(path=[str(site)]):
        name = normalised(item.metadata["Name"] or "")
        if name in dropped:
            gone |= {str(path) for path in item.files or ()}
        elif _editable(item):
            reasons.append(
                f"found {name} installed in editable mode; expected its files in "
                f"{site}; fix: pip install --no-deps {name}=={item.version}"
            )
        else:
            packages[name] = item.version
    if "pip" not in packages:
        reasons.append(
            f"found no pip in {site}; expected it (it installs the wheels on the other "
            "side); fix: python -m ensurepip"
        )
    if reasons:
        raise Refused("\n".join(f"  - {reason}" for reason in reasons))
    patterns = [*LEFT_OUT_PATHS, r"^__editable__"]
    patterns += [] if cuda_libraries else [CUDA_LIBRARIES]
    wrong = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    paths = [p for p in _files(site) if p not in gone and not wrong.search(p)]
    return Chosen(paths, packages)


def _files(site: Path) -> Iterator[str]:
    for path in sorted(site.rglob("*")):
        if path.is_file():
            yield path.relative_to(site).as_posix()
