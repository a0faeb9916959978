# SPDX-License-Identifier: Apache-2.0
"""The cost model: formulas, inputs from records, predictions against measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_records as records
import pytest
from bench_runs import command, record

from sglang_exact.bench import runs as report_runs
from sglang_exact.bench.cost_model import inputs as cost_model_inputs
from sglang_exact.bench.cost_model import model as cost_model
from sglang_exact.bench.cost_model.model import Limit, Model, Step
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.memory import measure as memory

LIMIT = Limit(4.8e12, 50 * 2**30, "given")


def step(width: int, *, acceptance: float = 1.0, shift: float = 0.0) -> Step:
    time = records.step_ms(width) + shift
    return Step(width, time, acceptance, 1000 * acceptance / time, 1, f"w{width}")


def model(*widths: int) -> Model:
    return Model([step(1, shift=-1.0), *(step(w, acceptance=w / 2) for w in widths)])


def test_tokens_per_step_and_back() -> None:
    assert cost_model.tokens_per_step(0.0, 8) == 1
    assert cost_model.tokens_per_step(1.0, 8) == 8
    # By hand: 1 + p + p^2 for three tokens.
    assert cost_model.tokens_per_step(0.5, 3) == pytest.approx(1.75)
    for width in (2, 8, 16):
        for p in (0.0, 0.3, 0.887, 1.0):
            found = cost_model.tokens_per_step(p, width)
            assert cost_model.keep_rate(found, width) == pytest.approx(p, abs=1e-9)
    # The DFlash2 card's acceptance length.
    assert cost_model.keep_rate(5.46, 8) == pytest.approx(0.887, abs=1e-3)
    for wrong in (0.9, 8.1):
        with pytest.raises(ValueError, match="expected 1 to 8"):
            cost_model.keep_rate(wrong, 8)


def test_step_times_between_and_beyond() -> None:
    found = model(2, 4, 8)
    assert found.step_ms(4) == records.step_ms(4)
    for width in (3, 6, 12, 16):
        assert found.step_ms(width) == pytest.approx(records.step_ms(width))
    kinds = [found.known(w) for w in (4, 6, 16)]
    assert kinds == ["measured", "interpolated", "extrapolated"]
    assert found.tok_s(4, 8) == pytest.approx(1000 * 4 / records.step_ms(8))
    assert found.break_even(8) == pytest.approx(16 / 13.25)
    assert not found.notes
    alone = model(8)
    assert alone.step_ms(16) == alone.step_ms(8) and "flatters" in alone.notes[0]


def test_noise_makes_no_step_free() -> None:
    steep = Model([Step(4, 1.0, 2, 100), Step(8, 50.0, 4, 100)])
    assert steep.step_ms(2) == 0.5 and steep.step_ms(16) == pytest.approx(148)
    falling = Model([Step(4, 9.0, 2, 100), Step(8, 5.0, 4, 100)])
    assert falling.step_ms(16) == 5.0 and falling.step_ms(2) == 9.0


def test_in_flight_multiplies() -> None:
    steps = [s._replace(in_flight=8) for s in model(4, 8).steps]
    assert Model(steps).tok_s(4, 8) == pytest.approx(8 * model(4, 8).tok_s(4, 8))
    with pytest.raises(ValueError, match="in flight"):
        Model([*steps, step(2)])
    with pytest.raises(ValueError, match="0 measured widths"):
        Model([step(1)])


def test_limit_is_bandwidth_over_weights() -> None:
    assert LIMIT.tok_s(1.0) == pytest.approx(4.8e12 / (50 * 2**30))
    assert LIMIT.tok_s(3.0, 8) == pytest.approx(24 * LIMIT.tok_s(1.0))
    assert LIMIT.step_ms() == pytest.approx(1000 / LIMIT.tok_s(1.0))
    for row in cost_model.predictions(model(2, 8), (2, 8), (1, 2, 8), LIMIT):
        assert row["tok_s"] < row["limit_tok_s"]
        assert row["share_of_limit"] == row["tok_s"] / row["limit_tok_s"]
    rows = cost_model.predictions(model(2, 8), (2, 8), (1, 2, 8), None)
    places = [(r["width"], r["acceptance"]) for r in rows]
    assert places == [(2, 1), (2, 2), (8, 1), (8, 2), (8, 8)], "no more than the width"
    assert "limit_tok_s" not in rows[0]


def test_checks_leave_the_measurement_out() -> None:
    rows = cost_model.checks(model(2, 4, 8, 16))
    assert [row["width"] for row in rows] == [2, 4, 8, 16]
    assert all(abs(row["error"]) < 1e-9 for row in rows), "a line predicts a line"
    # Control: one width off the line must show as an error, there and nowhere hidden.
    off = [*model(2, 4, 16).steps, step(8, acceptance=4, shift=8.0)]
    errors = {row["width"]: row["error"] for row in cost_model.checks(Model(off))}
    assert errors[8] == pytest.approx((16 + 8) / 16 - 1)
    assert cost_model.checks(model(8)) == []
    (other,) = cost_model.checks_against(model(2, 8), [step(4, acceptance=2), step(1)])
    assert other["check"] == "other run" and abs(other["error"]) < 1e-9


def test_better_drafters_and_longer_blocks() -> None:
    rows = cost_model.drafters(model(2, 4, 8), (8, 16))
    by_place = {(r["fewer_errors"], r["width"]): r for r in rows}
    same = by_place[0.0, 8]
    assert same["acceptance"] == pytest.approx(4.0)
    assert same["against_best_measured"] == pytest.approx(1.0)
    assert by_place[0.5, 8]["acceptance"] > by_place[0.25, 8]["acceptance"] > 4
    assert by_place[0.0, 16]["step_time"] == "extrapolated"
    p = same["keep_rate"]
    assert by_place[0.5, 8]["keep_rate"] == pytest.approx(1 - (1 - p) / 2)


def loaded(path: Path, **runs: Any) -> list[report_runs.Loaded]:
    found, problems = report_runs.load_all(records.written(path, **runs).values())
    assert not problems
    return found


def test_steps_from_records(tmp_path: Path) -> None:
    found = cost_model_inputs.steps(loaded(tmp_path, lb=records.leaderboard()))
    name, steps = cost_model_inputs.choose(found)
    assert name == "prompt of 64 tokens"
    times = {s.width: s.step_ms for s in steps}
    assert times[1] == pytest.approx(13.0)
    for width in (2, 4, 8, 16):
        assert times[width] == pytest.approx(records.step_ms(width))
    found = cost_model_inputs.steps(loaded(tmp_path, acc=records.accept()))
    _, steps = cost_model_inputs.choose(found, in_flight=8)
    spec = next(s for s in steps if s.width == 8)
    assert spec.step_ms == pytest.approx(1000 * 8 * 5.3 / spec.tok_s)
    with pytest.raises(CannotRun, match="in-flight \\(1, 8\\)"):
        cost_model_inputs.choose(found, in_flight=3)


def test_decode_table_leaves_the_first_token_out(tmp_path: Path) -> None:
    got = {"macro": 5.0, "micro": 5.0, "requests": 2, "tokens": 102, "verify": 20}
    row = {
        "prompt_tokens": 2048,
        "server": "spec",
        "draft_tokens": 8,
        "acceptance": got,
        "decode_tok_s": records.spread(250.0),
    }
    run = records.sweep(rows=[row, {"odd": 1}, {}])
    run.verb = "decode-table"
    (found,) = cost_model_inputs.steps(loaded(tmp_path, dt=run))
    assert found.load == "prompt of 2048 tokens"
    assert found.step.acceptance == 5.0 and found.step.step_ms == 20.0


def test_two_servers_of_one_width_are_not_mixed(tmp_path: Path) -> None:
    run = records.accept()
    extra = {**run.rows[1], "server": "stock"}
    run.rows.append(extra)
    found = cost_model_inputs.steps(loaded(tmp_path, acc=run))
    with pytest.raises(CannotRun, match="width 8 on spec, stock.*--use"):
        cost_model_inputs.choose(found)
    _, steps = cost_model_inputs.choose(found, servers=["plain", "stock"])
    assert len(steps) == 2
    with pytest.raises(CannotRun, match="no steps of nobody"):
        cost_model_inputs.choose(found, servers=["nobody"])


def test_other_set_ups_are_refused(tmp_path: Path) -> None:
    other = records.accept(
        provenance=records.provenance(records.server("plain", dtype="float16"))
    )
    with pytest.raises(CannotRun, match="dtype: bfloat16 against float16"):
        cost_model_inputs.check_setups(
            loaded(tmp_path, a=records.leaderboard(), b=other)
        )


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    runs = {"lb": records.leaderboard(), "mem": records.memory()}
    cost_model_inputs.check_setups(loaded(tmp_path, **runs))
    runs["mem"].provenance = records.provenance(records.server("plain", model_path="Z"))
    with pytest.raises(CannotRun, match=r"model_path: Q against Z.*--weight-gib"):
        cost_model_inputs.check_setups(loaded(tmp_path, **runs))


def test_the_limit_is_that_of_the_measured_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = loaded(tmp_path, lb=records.leaderboard())
    for name, there in (("NVIDIA H200", True), ("NVIDIA L40S", False)):
        gpu = memory.Device(0, name, 1.0, 140.0, 4.8e12)
        monkeypatch.setattr(memory, "device", lambda index, gpu=gpu: gpu)
        limit, why = cost_model_inputs.limit(runs, None, 50.0, None)
        assert (limit is not None) is there
        assert ("found NVIDIA L40S here" in why) is not there


def test_steps_with_prefill_in_them_say_so(tmp_path: Path) -> None:
    runs = loaded(tmp_path, lb=records.leaderboard(), acc=records.accept())
    for found in cost_model_inputs.steps(runs):
        wall = "wall clock with prefill" in found.step.source
        assert wall is found.step.source.startswith("acc")
    # Nothing but wall time is known of it: no decode step can be told from that.
    unstreamed = records.leaderboard()
    for row in unstreamed.rows:
        row["decode_tok_s"] = None
    assert cost_model_inputs.steps(loaded(tmp_path, lb=unstreamed)) == []


def test_command(tmp_path: Path) -> None:
    paths = records.written(
        tmp_path,
        lb=records.leaderboard(),
        mem=records.memory(),
        other=records.accept("other"),
    )
    done = command(
        *("cost-model", str(paths["lb"]), str(paths["mem"]), "--bandwidth", "4800"),
        *("--check", str(paths["other"]), "--output-file", "cm.json"),
        *("--plot", "cm.svg", "--markdown", "cm.md"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    run = record(tmp_path / "cm.json")
    assert run["complete"] and run["settings"]["bandwidth_bytes_s"] == 4.8e12
    assert run["settings"]["weight_bytes"] == 50 * 2**30
    kinds = [row["table"] for row in run["rows"]]
    assert {"step", "check", "predicted", "drafter"} == set(kinds)
    assert "largest error" in done.stdout and "no step is shorter than" in done.stdout
    assert "<svg" in (tmp_path / "cm.svg").read_text()
    assert "largest error" in (tmp_path / "cm.md").read_text()


def test_command_says_what_is_missing(tmp_path: Path) -> None:
    paths = records.written(tmp_path, lb=records.leaderboard(), mem=records.memory())
    done = command("cost-model", str(paths["mem"]), cwd=tmp_path)
    assert done.returncode == 2 and "found no steps with drafts" in done.stderr
    done = command(
        "cost-model", str(paths["lb"]), "--output-file", "x.json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert any(
        "no weight-bandwidth limit" in n for n in record(tmp_path / "x.json")["notes"]
    )
    (tmp_path / "odd.json").write_text("{")
    done = command("cost-model", "odd.json", "none.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "odd.json: found no JSON" in done.stderr and "none.json" in done.stderr
    done = command("cost-model", str(paths["lb"]), "--widths", "1,x", cwd=tmp_path)
    assert done.returncode == 2 and "expected numbers from 2 on" in done.stderr
