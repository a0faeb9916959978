# SPDX-License-Identifier: Apache-2.0
"""`python -m sglang_exact.launch_server <any SGLang flag>`: a drop-in launcher.

Checks what a plugin cannot check about itself (is it installed, importable and on
the host's list?), turns the overlay on, and starts the host's own launcher. The
server is called ready only when every rank has attested.

The host spawns its ranks, and each one imports this module again: keep it light.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from sglang_exact.plugins import GROUP, NAME, VALUE
from sglang_exact.reasons import Reason, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_exact.settings import Settings

HELP = """\
python -m sglang_exact.launch_server <any SGLang flag>

SGLang's own launcher with the overlay on. Fills in what exactness needs, keeps your
flags, and refuses with every reason at once what cannot be exact (status 3). The server
is called ready only when every rank has attested.

Flags of the overlay:
  --exact-check                 say whether this setup would be refused; start nothing
  --exact-allow-unpinned-host   start on a host, torch or kernels that do not match the
                                pins; numerics are attested as 'unverified'
  --exact-allow-plugin NAME     load another plugin of the host as well; numerics are
                                attested as 'unverified'

Flags of SGLang:

"""


def entry_point_reasons(environ: Mapping[str, str]) -> list[Reason]:
    """Reasons why the host's loader would leave the overlay out."""
    reasons = []
    found = [ep for ep in metadata.entry_points(group=GROUP) if ep.name == NAME]
    if [ep.value for ep in found[:1]] != [VALUE]:
        reasons.append(
            Reason(
                f"entry point {NAME} in group {GROUP}: "
                + (", ".join(ep.value for ep in found) or "missing"),
                VALUE,
                "install sglang-exact in the environment that runs the server",
            )
        )
    allowed = environ.get("SGLANG_PLUGINS", "").strip()
    names = [x.strip() for x in allowed.split(",") if x.strip()]
    if names and NAME not in names:
        reasons.append(
            Reason(
                f"SGLANG_PLUGINS={allowed}, which leaves {NAME} out",
                f"unset, or a list with {NAME}",
                f"export SGLANG_PLUGINS={allowed},{NAME}",
            )
        )
    return reasons


def split_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags and, untouched, the host's. Unknown --exact-* flags are refused."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_exact.launch_server",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--exact-check", action="store_true")
    parser.add_argument("--exact-allow-unpinned-host", action="store_true")
    parser.add_argument("--exact-allow-plugin", action="append", default=[])
    ours, rest = parser.parse_known_args(list(argv))
    unknown = [x for x in rest if x == "--exact" or x.startswith("--exact-")]
    if unknown:
        raise Refused(
            [
                Reason(
                    f"unknown flag {flag}",
                    "--exact-check, --exact-allow-unpinned-host or "
                    "--exact-allow-plugin",
                    "correct its spelling",
                )
                for flag in unknown
            ]
        )
    return ours, rest


def prepare(environ: dict[str, str], ours: argparse.Namespace) -> list[Reason]:
    """Turn the overlay on in the environment; reasons found without the host."""
    from sglang_exact import hooks, plugins, scope, settings
    from sglang_exact.host import compat

    environ["SGLANG_EXACT_ENABLE"] = "1"
    if ours.exact_allow_unpinned_host:
        environ["SGLANG_EXACT_ALLOW_UNPINNED_HOST"] = "1"
    if ours.exact_allow_plugin:
        environ["SGLANG_EXACT_ALLOW_PLUGINS"] = ",".join(ours.exact_allow_plugin)
    config, reasons = settings.read(environ)
    reasons += hooks.name_reasons(config)
    reasons += entry_point_reasons(environ)
    reasons += scope.environment_reasons(environ)
    reasons += plugins.reasons(environ, config.allow_plugins)
    reasons += compat.setup_reasons(hooks.pinned_names(), config)
    return reasons + _gpu_reasons(config)


def _gpu_reasons(config: Settings) -> list[Reason]:
    """Reasons in the GPU, before the host is imported: without one it may not be.

    A torch that does not import is left to the import of the host.
    """
    from sglang_exact import scope

    if config.rehearsal:
        return []
    try:
        import torch
    except ImportError:
        return []
    there = torch.cuda.is_available()
    return scope.gpu_reasons(torch.cuda.get_device_capability() if there else None)


def show_help() -> None:
    """Our flags, then the host's; no hook is loaded for it.

    Where the host does not import, its part is one line with the reason.
    """
    from sglang_exact import gate

    sys.stdout.write(HELP)
    sys.stdout.flush()
    try:
        from sglang.srt.server_args import prepare_server_args

        prepare_server_args(["--help"])
    except (ImportError, OSError, RuntimeError) as error:
        sys.stdout.write(f"{gate.import_reason('sglang.srt.server_args', error)}\n")


def serve(argv: list[str], check_only: bool) -> None:
    """Load the plugins, resolve the arguments, and run the host's server."""
    from sglang_exact import caches, gate, hooks
    from sglang_exact.hooks import registered

    try:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.launch_server import run_server
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree
    except ImportError as error:
        raise Refused([gate.import_reason("sglang.launch_server", error)]) from error
    if hooks.MAIN not in registered.roles():
        raise Refused(
            [
                Reason(
                    "the host's plugin loader did not run sglang_exact",
                    "a registered overlay (the host logs the error above)",
                    "reinstall sglang-exact; see `sglang-exact doctor`",
                )
            ]
        )
    server_args = prepare_server_args(argv)
    if check_only:
        server_args.resolve_once()
        server_args.check_server_args()
        sys.stdout.write("sglang_exact: this setup can be served exactly\n")
        return
    text = caches.notice(os.environ)
    if text and not registered.read().settings.rehearsal:
        sys.stderr.write(f"{text}\n")
    try:
        run_server(server_args)
    except Refused as refusal:
        gate.leave(refusal)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; returns 3 when the set-up is refused."""
    try:
        ours, rest = split_flags(sys.argv[1:] if argv is None else argv)
        if {"-h", "--help"} & set(rest):
            show_help()
            return 0
        reasons = prepare(os.environ, ours)  # type: ignore[arg-type]
        if reasons:
            raise Refused(reasons)
        serve(rest, ours.exact_check)
    except Refused as refusal:
        sys.stderr.write(f"{refusal}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
