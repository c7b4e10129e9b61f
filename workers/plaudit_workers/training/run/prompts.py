"""Where prompts come from, as the conductor sees it: ``data.PromptData``, or anything else that counts positions."""

from __future__ import annotations

from typing import Any, Protocol


class PromptRow(Protocol):
    """One prompt, ready for the model."""

    @property
    def data_source(self) -> str:
        """Where the prompt comes from."""
        ...

    @property
    def prompt_text(self) -> str:
        """Text as the model sees it."""
        ...

    @property
    def prompt_ids(self) -> bytes:
        """int32[num_prompt_tokens]."""
        ...

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Chat messages; empty where the data holds text."""
        ...

    @property
    def ground_truth(self) -> Any:
        """What scorers compare with."""
        ...

    @property
    def extra_info(self) -> dict[str, Any]:
        """Further columns for scorers."""
        ...


class PromptSource(Protocol):
    """An endless row of prompts, addressed by one number."""

    def __len__(self) -> int:
        """Prompts of one epoch."""
        ...

    def prompt_at(self, position: int) -> PromptRow:
        """The prompt that is admitted as number ``position`` (from 0)."""
        ...
