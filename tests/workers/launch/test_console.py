"""The lines of ``plaudit run``: a table for people, on a terminal or not, and JSON for programs."""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from plaudit_metrics.sources.steps import append_step
from plaudit_wire.records import StepRecord
from plaudit_workers.launch.run import StepLines, print_summary


def step(number: int, **statistics: float) -> StepRecord:
    return StepRecord(
        step=number,
        incarnation=1,
        opened=0.0,
        closed=1.0,
        num_samples=64,
        num_groups=8,
        statistics={"step_s": 1.23456789012345, **statistics},
        verdict="generation",
    )


def printed(file: Path, *, terminal: bool, **arguments: Any) -> list[str]:
    stream = io.StringIO()
    lines = StepLines(file, Console(file=stream, force_terminal=terminal, color_system=None), **arguments)
    append_step(file, step(1, **{"reward/mean": 0.05178, "reward_pipeline/masked_share": 0.4}))
    append_step(file, step(2))
    lines.print_new()
    lines.print_new()
    assert lines.closed == 2
    return stream.getvalue().splitlines()


def test_a_pipe_gets_the_same_rows_as_a_terminal(tmp_path: Path) -> None:
    in_pipe = printed(tmp_path / "a.jsonl", terminal=False)
    assert in_pipe == printed(tmp_path / "b.jsonl", terminal=True)
    assert [line.split() for line in in_pipe[1:]] == [
        ["1", "0.052", "40.0%", "-", "1.23", "-", "generation"],
        ["2", "-", "-", "-", "1.23", "-", "generation"],
    ]


def test_a_mean_of_normalised_rewards_has_no_sign(tmp_path: Path) -> None:
    """Within its group each sums up to 0, or to a rounding error below it."""
    append_step(file := tmp_path / "steps.jsonl", step(1, **{"reward/mean": -1e-17}))
    lines = StepLines(tmp_path / "new.jsonl", Console(file=(stream := io.StringIO()), color_system=None))
    (tmp_path / "new.jsonl").write_bytes(file.read_bytes())
    lines.print_new()
    print_summary(Console(file=stream, color_system=None), tmp_path, restarts={})
    assert stream.getvalue().splitlines()[1].split()[1] == "0.000"
    assert "mean reward: 0.000 at the first step, 0.000 over the last 1" in stream.getvalue()


def test_json_is_the_line_of_the_file_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(tmp_path / "steps.jsonl", terminal=False, as_json=True) == []
    lines = capsys.readouterr().out.splitlines()
    assert lines == (tmp_path / "steps.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["reward/mean"] == 0.05178


def test_validation_rewards_follow_their_step_by_data_source(tmp_path: Path) -> None:
    file, stream = tmp_path / "steps.jsonl", io.StringIO()
    lines = StepLines(file, Console(file=stream, color_system=None))
    rewards = {"val/openai/gsm8k/reward": 0.25, "val/openai/gsm8k/form": 1.0, "val/math/reward": 0.5}
    append_step(file, msgspec.structs.replace(step(0, **rewards), num_samples=0))
    append_step(file, step(1, **{"reward/mean": 0.1}))
    append_step(file, step(2, **{"reward/mean": 0.2, "val/math/reward": 0.75}))
    lines.print_new()
    printed_lines = stream.getvalue().splitlines()
    assert printed_lines[0].split(maxsplit=1) == ["0", "validation reward: math 0.500, openai/gsm8k 0.250"]
    assert [line.split()[0] for line in printed_lines[1:]] == ["step", "1", "2", "2"]
    assert printed_lines[4].split(maxsplit=1) == ["2", "validation reward: math 0.750"]


def test_failed_scores_are_counted_also_where_samples_have_a_reward(tmp_path: Path) -> None:
    file, stream = tmp_path / "steps.jsonl", io.StringIO()
    lines = StepLines(file, Console(file=stream, color_system=None, width=200))
    counts = {
        "mine/outcome/data_error": 20,
        "mine/outcome/timeout": 1,
        "mine/outcome/skipped": 3,
        "b/outcome/scored": 64,
    }
    outcomes = {f"reward_pipeline/scorer/{name}": float(count) for name, count in counts.items()}
    append_step(file, step(1, **{"reward_pipeline/masked_share": 0.0}, **outcomes))
    lines.print_new()
    assert stream.getvalue().splitlines()[1].endswith("generation · failed: mine 21")
