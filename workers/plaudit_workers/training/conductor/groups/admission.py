"""Admit prompts: create groups, in the ledger and in Redis, as far as the schedule allows. Called by the conductor."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from functools import partial

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt
from plaudit_wire.records import Split
from plaudit_workers.stream.trainer.groups import Admission
from plaudit_workers.training.run.prompts import PromptSource
from plaudit_workers.training.run.schedule import GroupInFlight
from plaudit_workers.training.run.state import RunContext, RunState
from plaudit_workers.training.run.trainer_ledger import admissible

logger = get_logger(__name__)

_AT_ONCE = 64


class Admitter:
    """Create groups for positions; never waits for room."""

    def __init__(self, run: RunContext, state: RunState) -> None:
        self._run = run
        self._state = state
        self._lock = asyncio.Lock()
        self.pending: set[str] = set()
        """Groups in the ledger that Redis may not have yet."""

    async def admit_training(self) -> None:
        """Admit every training prompt that the schedule allows now."""
        async with self._lock:
            positions = self._state.ledger.train
            due = admissible(self._run.plan.schedule, self._state.version.number, positions)
            if self._run.clock.now() >= self._state.paused_until:
                await self._admit_in_turn("train", due)

    async def admit_validation(self, positions: Sequence[int]) -> None:
        """Admit these validation prompts, as far as there is room."""
        async with self._lock:
            await self._admit_in_turn("validation", positions)

    async def _admit_in_turn(self, split: Split, positions: Sequence[int]) -> None:
        for start in range(0, len(positions), _AT_ONCE):
            part = positions[start : start + _AT_ONCE]
            if not all(await asyncio.gather(*(self._admit(split, position) for position in part))):
                return

    async def _admit(self, split: Split, position: int) -> bool:
        prompt = self._prompt(split, position)
        flight = GroupInFlight(prompt.group, position, prompt.attempt, prompt.step, prompt.min_version.number)
        self._state.ledger.admit(split, flight)
        self.pending.add(prompt.group)
        try:
            outcome = await self._run.streams.admit(prompt)
        finally:
            self.pending.discard(prompt.group)
        if outcome in (Admission.admitted, Admission.duplicate):  # duplicate: a call that was repeated
            return True
        if self._state.ledger.find(prompt.group) is None:  # admitted by a call whose reply was lost, and ended since
            return True
        self._state.ledger.withdraw(prompt.group)
        fields = {"group": prompt.group, "outcome": outcome.name}
        logger.warning("prompt not admitted", **fields)
        return False

    def _prompt(self, split: Split, position: int) -> Prompt:
        plan, state = self._run.plan, self._state
        validation = plan.validation if split == "validation" else None
        row = self._source(split).prompt_at(position if split == "validation" else self._place(position))
        attempt = state.ledger.splits[split].attempt(position)
        return Prompt(
            group=f"{split[0]}-{position}-{state.incarnation}.{attempt}",
            position=position,
            split=split,
            step=state.version.number if validation else state.ledger.train.step_of(plan.schedule, position),
            n=validation.samples_per_prompt if validation else plan.samples_per_prompt,
            min_version=state.version,
            seed=sample_seed(plan.seed, split, position),
            sampling=validation.sampling if validation else plan.sampling,
            data_source=row.data_source,
            prompt=row.prompt_text,
            prompt_ids=row.prompt_ids,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
            messages=row.messages,
            attempt=attempt,
            images=list(row.images),
        )

    def _place(self, position: int) -> int:
        schedule, state = self._run.plan.schedule, self._state
        return state.order.place(position, partial(state.ledger.train.step_of, schedule), self._run.data)

    def _source(self, split: Split) -> PromptSource:
        source = self._run.data if split == "train" else self._run.validation_data
        assert source is not None
        return source


def sample_seed(run_seed: int, split: Split, position: int) -> int:
    """Return the seed of a position's first sample: below 2**62, far from those of other positions."""
    digest = hashlib.sha256(f"{run_seed} {split} {position}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2
