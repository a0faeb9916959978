# SPDX-License-Identifier: Apache-2.0
"""One run from end to end: connect, plan, reference, arms, record."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from sglang_exact import __version__
from sglang_exact.client import facts as server_facts
from sglang_exact.client.answer import Case, ServerInfo
from sglang_exact.client.http import Failed
from sglang_exact.verify import arms as arm_table
from sglang_exact.verify import plan as planning
from sglang_exact.verify import record
from sglang_exact.verify.arms import REFERENCE
from sglang_exact.verify.model import NOT_REACHED, CheckResult, Reference
from sglang_exact.verify.plan import Plan, Settings
from sglang_exact.verify.replay import check_answers, given_reference
from sglang_exact.verify.runner import Runner, RunOptions
from sglang_exact.verify.servers import Address, Servers, connect
from sglang_exact.verify.summary import Run
from sglang_exact.view.console import Display
from sglang_exact.view.output import now

DisplayFactory = Callable[[int], AbstractContextManager[Display]]


class Inputs(NamedTuple):
    """What a run is made from. `command` must hold no secret; times in seconds."""

    addresses: list[Address]
    settings: Settings
    options: RunOptions
    output: Path
    command: str
    reference_file: Path | None = None
    resume: bool = False
    vocab_size: int | None = None
    by_ids: bool = False
    timeout: float = 1800.0


async def verify(inputs: Inputs, display: DisplayFactory) -> Run:
    """Run every arm and return what a report is made from.

    Raises Failed if a server cannot be reached or is not what its role says, ValueError
    (also PromptError, RecordError) if the inputs do not fit together.
    """
    async with AsyncExitStack() as stack:
        servers = await connect(
            stack,
            inputs.addresses,
            timeout=inputs.timeout,
            vocab_size=inputs.vocab_size,
        )
        _check_reference(servers)
        given = given_reference(inputs.reference_file)
        plan = _plan(inputs, servers, given)
        _check_roles(inputs, plan)
        header = _header(inputs, plan, servers)
        if given is not None:
            header["reference_digest"] = _reference_digest(plan, given.references)
        earlier = _resume(inputs, header, servers)
        references = dict(given.references) if given else {}
        references |= earlier.references if earlier else {}
        check_answers(plan, references)
        done = {r.name: r for r in earlier.results} if earlier else {}
        infos = [server.info for server in servers.all]
        if given is not None:
            infos += [s for s in given.servers if s.label == REFERENCE][-1:]
        options = _options(inputs, servers, given, infos)
        writer = stack.enter_context(
            record.Writer(inputs.output, append=earlier is not None)
        )
        writer.header(header)
        infos = [_taken_over(earlier, info) for info in infos]
        for info in infos:
            writer.server(info)
        if given is not None:
            # The report has to show them when the other record is elsewhere.
            known = earlier.references if earlier else {}
            for key in plan.cases():
                if key in references and key not in known:
                    writer.reference(references[key])
        shown = stack.enter_context(display(_tokens(plan, references, done, given)))
        refusals = given.refusals if given else {}
        runner = Runner(
            plan, servers, writer, shown, options, references, refusals, done
        )
        await runner.run()
        finished = now()
        if not runner.broken:
            writer.end(_end(finished, servers, interrupted=runner.interrupted))
        probes = (earlier.probes if earlier else []) + runner.probes
        return Run(
            earlier.header if earlier else header,
            _every_server(earlier, infos),
            runner.references.answers,
            runner.results,
            probes,
            runner.interrupted,
            finished,
            runner.broken,
        )


def _taken_over(earlier: record.Contents | None, info: ServerInfo) -> ServerInfo:
    """The server with a note if another address answered before it."""
    before = (
        {s.url for s in earlier.servers if s.label == info.label} if earlier else {}
    )
    if not before or info.url in before:
        return info
    note = f"took over when the run was resumed; before it {', '.join(before)} answered"
    return info._replace(notes=(*info.notes, note))


def _every_server(
    earlier: record.Contents | None, infos: list[ServerInfo]
) -> list[ServerInfo]:
    """Also those that answered before the run was resumed."""
    found = [*(earlier.servers if earlier else []), *infos]
    return list({(info.label, info.url): info for info in found}.values())


def _changed(servers: Servers) -> list[str]:
    return servers.reference.changed if servers.reference else []


def _end(finished: str, servers: Servers, *, interrupted: bool) -> dict[str, Any]:
    """The last line of a record; with `changed` its answers are no reference."""
    row = {"finished": finished, "interrupted": interrupted}
    return {**row, "changed": _changed(servers)} if _changed(servers) else row


def _options(
    inputs: Inputs,
    servers: Servers,
    given: record.Contents | None,
    infos: list[ServerInfo],
) -> RunOptions:
    return inputs.options._replace(
        self_reference=given is None and servers.reference is None,
        frozen_reference=given is not None,
        hooks_off=tuple(filter(None, map(server_facts.hooks_off, infos))),
    )


async def record_reference(inputs: Inputs, display: DisplayFactory) -> list[str]:
    """Record a plain server's answers for later; returns what could not be recorded.

    A case that the server refuses with a 4xx is recorded as refused.
    """
    async with AsyncExitStack() as stack:
        servers = await connect(
            stack,
            inputs.addresses,
            timeout=inputs.timeout,
            vocab_size=inputs.vocab_size,
        )
        _check_reference(servers)
        plan = _plan(inputs, servers, None)
        header = _header(inputs, plan, servers)
        earlier = _resume(inputs, header, servers)
        references = dict(earlier.references) if earlier else {}
        check_answers(plan, references)
        writer = stack.enter_context(
            record.Writer(inputs.output, append=earlier is not None)
        )
        writer.header(header)
        for server in servers.all:
            writer.server(server.info)
        missing = _missing(plan.cases(), references)
        shown = stack.enter_context(display(missing))
        runner = Runner(plan, servers, writer, shown, inputs.options, references)
        await runner.record_references()
        writer.end(_end(now(), servers, interrupted=False))
        # Arms of one kind are refused for one reason.
        problems = list(dict.fromkeys(p.refusal for p in plan.arms if p.refusal))
        problems += [
            f"the server came back with another set-up: {c}" for c in _changed(servers)
        ]
        return problems + [
            f"{key}: {text}"
            for key, text in runner.references.errors.items()
            if key not in runner.references.refused
        ]


def load_run(path: Path) -> Run:
    """A run as its record tells it. Raises RecordError."""
    contents = record.read(path)
    if not contents.results:
        raise record.RecordError(
            f"{path}: holds reference answers and no arm; expected a record of "
            "sglang-exact verify that reached its first arm"
        )
    end = contents.end or {}
    return Run(
        contents.header,
        contents.servers,
        contents.references,
        _all_arms(contents),
        contents.probes,
        bool(end.get("interrupted", True)),
        str(end.get("finished", "")),
    )


def _all_arms(contents: record.Contents) -> list[CheckResult]:
    """The arms of the record, and as "not reached" those that it should hold."""
    names = [str(name) for name in contents.header.get("arms") or ()]
    chosen = (
        arm_table.by_name(names)
        if names
        else arm_table.of_suite(str(contents.header.get("suite")))
    )
    missing = {
        arm.name: CheckResult(arm.name, arm.title, NOT_REACHED) for arm in chosen
    }
    return list((missing | {r.name: r for r in contents.results}).values())


def _check_roles(inputs: Inputs, plan: Plan) -> None:
    """Raise ValueError for a server that nothing would be asked of."""
    given = {a.role for a in inputs.addresses if a.role in arm_table.EXTRA_ROLES}
    if inputs.options.restart_command is not None:
        given.add(arm_table.RESTARTED)
    idle = given - {planned.arm.role for planned in plan.arms}
    names = [arm.name for arm in arm_table.ARMS if arm.role in idle]
    if names:
        raise ValueError(
            f"--server or --restart-command is for arms that are not in this run: "
            f"{', '.join(names)}; pass --suite full, or name them in --arms"
        )


def _check_reference(servers: Servers) -> None:
    reference = servers.reference
    if reference is not None and reference.info.speculative():
        algorithm = reference.info.fields["speculative_algorithm"]
        raise Failed(
            f"the reference server speculates: found speculative_algorithm "
            f"{algorithm!r}, expected none; start it without --speculative-*"
        )


def _plan(inputs: Inputs, servers: Servers, given: record.Contents | None) -> Plan:
    infos = [server.info for server in servers.all]
    needs_ids = inputs.by_ids or any(i.fields.get("skip_tokenizer_init") for i in infos)
    sizes = [i.vocab_size for i in infos if i.vocab_size is not None]
    vocab_size = min(sizes, default=None)
    if given is not None:
        # The prompts must be those of the recording, whatever this server could take.
        vocab_size = given.header.get("vocab_size")
        if needs_ids and not given.header.get("by_ids") and not inputs.settings.prompts:
            raise record.RecordError(
                f"{inputs.reference_file}: was recorded with text prompts and a server "
                "has no tokenizer; record it again with --skip-tokenizer-init"
            )
        needs_ids = bool(given.header.get("by_ids"))
    return planning.build(inputs.settings, by_ids=needs_ids, vocab_size=vocab_size)


def _header(inputs: Inputs, plan: Plan, servers: Servers) -> dict[str, Any]:
    settings = inputs.settings
    return {
        "format": record.FORMAT,
        "tool_version": __version__,
        "command": inputs.command.encode("utf-8", "replace").decode(),
        "started": now(),
        "suite": settings.suite,
        "arms": list(settings.arms),
        "repeats": settings.repeats,
        "seed": settings.seed,
        "tokens": settings.tokens,
        "num_prompts": settings.num_prompts,
        "long_repeats": settings.long_repeats,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "prompts": _shown(settings.prompts),
        "reference": _shown(inputs.reference_file),
        "record": _shown(inputs.output),
        "plan": plan.digest(),
        "by_ids": plan.by_ids,
        "vocab_size": plan.vocab_size,
        "set_up": [server_facts.set_up_digest(s.info) for s in servers.all],
    }


def _reference_digest(plan: Plan, answers: dict[str, Reference]) -> str:
    """Hash over the reference answers that the plan needs."""
    digests = [
        [key, answers[key].answer.digest()] for key in plan.cases() if key in answers
    ]
    return hashlib.sha256(orjson.dumps(digests)).hexdigest()[:16]


def _shown(path: Path | None) -> str | None:
    return None if path is None else str(path).encode("utf-8", "replace").decode()


def _resume(
    inputs: Inputs, header: dict[str, Any], servers: Servers
) -> record.Contents | None:
    if not inputs.resume or not record.is_begun(inputs.output):
        return None
    earlier = record.read(inputs.output)
    reasons = [
        f"{what}: found {earlier.header.get(key)!r}, expected {header.get(key)!r}"
        for key, what in (
            ("plan", "another plan"),
            ("set_up", "servers of another set-up"),
            ("reference_digest", "another reference"),
            ("tool_version", "another version of this tool"),
        )
        if earlier.header.get(key) != header.get(key)
    ]
    before = {info.label: info for info in earlier.servers}
    reasons += [
        f"{server.label}: {change}"
        for server in servers.all
        if server.label in before
        for change in server_facts.changes(before[server.label], server.info)
    ]
    if reasons:
        raise record.RecordError(
            f"{inputs.output}: cannot be resumed: {'; '.join(reasons)}. Use the same "
            "options and servers, or another --output-file"
        )
    return earlier


def _missing(cases: dict[str, Case], references: dict[str, Any]) -> int:
    return sum(
        case.max_new_tokens * (1 + (case.temperature > 0))
        for key, case in cases.items()
        if key not in references
    )


def _tokens(
    plan: Plan,
    references: dict[str, Any],
    done: dict[str, CheckResult],
    given: record.Contents | None,
) -> int:
    total = 0 if given else _missing(plan.cases(), references)
    for planned in plan.arms:
        before = done.get(planned.arm.name)
        kept = len(before.outcomes) if before else 0
        share = max(len(planned.jobs) - kept, 0) / max(len(planned.jobs), 1)
        total += int(planned.tokens() * share)
    return total
