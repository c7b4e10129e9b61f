"""A run's folder with stored conversations: a calculator, prompts that recur in each step, and texts that attack."""

from __future__ import annotations

import random
from pathlib import Path

from builders import make_body, make_generation, make_prompt, make_sample
from plaudit_wire.records import (
    AgentReward,
    CallRecord,
    GroupRecord,
    Outcome,
    SandboxRecord,
    ScorerRecord,
    ScoringRecord,
    Stamps,
    TurnRecord,
)
from plaudit_workers.stored_samples import store_groups
from plaudit_workers.stream.groups import Group, GroupSample

STEPS, GROUPS, SIZE = 6, 4, 4
OPENED = 1_780_000_000.0
PROBLEMS = ((17, 23), (48, 19), (305, 12), (64, 64))
HOSTILE = (
    "<img src=x onerror=\"document.title='broken out'\"><script>document.title='broken out'</script> "
    "\x1b[2J\x1b]0;title\x07 abc\u202etxt.exe\u202c \u2067right\u2069 </pre></script>"
)
LONG = "long " * 200_000


def write_conversations(folder: Path) -> Path:
    """Store every step in ``folder/samples``; return the folder. The newest step also has the group ``hostile``."""
    draw = random.Random(11)
    (folder / "samples").mkdir(parents=True)
    for step in range(1, STEPS + 1):
        groups = [_conversations(draw, step, number) for number in range(GROUPS)]
        if step == STEPS:
            groups.append(_hostile(step))
        records = {group.id: _closed(group, step) for group in groups}
        store_groups(folder / "samples", step, 1, groups, records)
    return folder


def _closed(group: Group, step: int) -> GroupRecord:
    at = group.admitted + 9.0
    scored = sum(sample.scoring is not None and sample.scoring.value is not None for sample in group.samples)
    return GroupRecord(
        group.id, "train", step, "trained", len(group.samples), scored, group.admitted, at + 2, at, at, at + 1
    )


def _conversations(draw: random.Random, step: int, number: int) -> Group:
    one, other = PROBLEMS[number]
    question = f"What is {one} × {other}? Use the calculator."
    prompt = make_prompt(
        f"t-{step * GROUPS + number}-1.0",
        SIZE,
        step=step,
        data_source="products" if number % 2 else "sums",
        prompt=f"<|user|>{question}<|assistant|>",
        messages=[{"role": "system", "content": "You may call tools."}, {"role": "user", "content": question}],
        ground_truth=str(one * other),
        extra_info={"difficulty": number},
    )
    admitted = OPENED + 20 * step
    samples = []
    for index in range(SIZE):
        right = draw.random() < 0.15 * step
        failed = draw.random() < 0.1
        answer = str(one * other if right else one * other - draw.randint(1, 9))
        arguments = {"expression": f"{one} * {other}"}
        completion = [
            {
                "role": "assistant",
                "content": "I will compute this.",
                "tool_calls": [{"id": "1", "function": {"name": "calculator", "arguments": arguments}}],
            },
            {"role": "tool", "name": "calculator", "content": str(one * other)},
            {"role": "assistant", "content": f"The answer is {answer}."},
        ]
        took_s = 1.0 + draw.random()
        turns = [
            TurnRecord(0, 24, 0.0, took_s, calls=[CallRecord("calculator", "ok", took_s, 0.3)]),
            TurnRecord(31, 9, took_s + 0.3, 0.6),
        ]
        body = make_body(
            prompt,
            index,
            sample=make_sample(
                f"I will compute this. {one * other} The answer is {answer}.",
                index,
                group=prompt.group,
                data_source=prompt.data_source,
                prompt=prompt.prompt,
                messages=prompt.messages,
                completion=completion,
                turn_rewards=[0.0, float(right)],
                agent_reward=AgentReward("scored", float(right)),
            ),
            generation=make_generation(
                40,
                turns=turns,
                generate_s=took_s + 0.6,
                tool_s=0.3,
                version_min=step - 1,
                version_max=step - 1,
                sandbox=SandboxRecord(0.1, claim_s=0.05, exec_s=0.12, num_commands=1) if index == 2 else None,
            ),
        )
        samples.append(GroupSample(index, _stamps(admitted, took_s), body, scoring=_scoring(right, failed)))
    return Group(prompt.group, "ready", prompt, samples, 1, admitted)


def _stamps(admitted: float, took_s: float) -> Stamps:
    published = admitted + 1.2 + took_s
    return Stamps(admitted, admitted + 0.3, published, published + 0.2, published + 0.2, published + 2.0)


def _scoring(right: bool, failed: bool) -> ScoringRecord:
    exact = ScorerRecord("scored", float(right), call_s=0.004, extra={"acc": float(right)})
    outcome: Outcome = "timeout" if failed else "scored"
    value = None if failed else 0.5 + 0.5 * right
    reason = "no reply within 5 s" if failed else "The steps are shown; the result was compared."
    judge = ScorerRecord(
        outcome,
        value,
        reason,
        call_s=1.1,
        limiter_s=0.2,
        attempts=3 if failed else 1,
        extra={} if failed else {"verdict": "A" if right else "C", "completion_tokens": 87.0},
    )
    total = None if failed else 0.8 * right + 0.1
    scorers = {"exact-match": exact, "judge": judge}
    return ScoringRecord(outcome, total, reason if failed else None, False, scorers, 0.2, 0.0, 1.1, "reward-0")


def _hostile(step: int) -> Group:
    prompt = make_prompt("hostile", 2, step=step, data_source="hostile <b>", prompt=HOSTILE, ground_truth=HOSTILE)
    scoring = ScoringRecord(
        "data_error", None, HOSTILE, scorers={"judge": ScorerRecord("data_error", None, HOSTILE, extra={"x": HOSTILE})}
    )
    responses = (HOSTILE, LONG)
    samples = [
        GroupSample(
            index,
            _stamps(OPENED, 1.0),
            make_body(prompt, index, sample=make_sample(response, index, group="hostile", prompt=HOSTILE)),
            scoring=scoring,
        )
        for index, response in enumerate(responses)
    ]
    return Group("hostile", "ready", prompt, samples, 1, OPENED)
