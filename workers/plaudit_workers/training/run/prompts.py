"""The protocol of prompt sources: ``data.PromptData``, or anything else that is addressed by position."""

from __future__ import annotations

from typing import Any, Protocol


class PromptRow(Protocol):
    """One prompt, ready for the model."""

    @property
    def data_source(self) -> str:
        """Name of the prompt's data set."""
        ...

    @property
    def prompt_text(self) -> str:
        """Text with the chat template applied."""
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
        """Reference answer for scorers."""
        ...

    @property
    def extra_info(self) -> dict[str, Any]:
        """Further columns for scorers."""
        ...


class PromptSource(Protocol):
    """An endless sequence of prompts, addressed by one number."""

    def __len__(self) -> int:
        """Prompts of one epoch."""
        ...

    def prompt_at(self, position: int) -> PromptRow:
        """Return the prompt that is admitted as number ``position`` (from 0)."""
        ...
