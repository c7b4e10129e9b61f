"""Define the protocol of prompt sources: ``data.PromptData``, or anything else that is addressed by position."""

from __future__ import annotations

from typing import Any, Protocol


class PromptRow(Protocol):
    """Hold one prompt, ready for the model."""

    @property
    def data_source(self) -> str:
        """Return the name of the prompt's data set."""
        ...

    @property
    def prompt_text(self) -> str:
        """Return the text with the chat template applied."""
        ...

    @property
    def prompt_ids(self) -> bytes:
        """Return the token ids: int32[num_prompt_tokens]."""
        ...

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the chat messages; empty where the data holds text."""
        ...

    @property
    def ground_truth(self) -> Any:
        """Return the reference answer for scorers."""
        ...

    @property
    def images(self) -> tuple[str, ...]:
        """Return the digests of its images, for each of which ``prompt_ids`` has a single token."""
        ...

    @property
    def extra_info(self) -> dict[str, Any]:
        """Return the further columns for scorers."""
        ...


class PromptSource(Protocol):
    """Provide an endless sequence of prompts, addressed by one number."""

    def __len__(self) -> int:
        """Return the number of prompts of one epoch."""
        ...

    def prompt_at(self, position: int) -> PromptRow:
        """Return the prompt that is admitted as number ``position`` (from 0), if none is skipped."""
        ...

    def row_at(self, position: int) -> int:
        """Return a number of that prompt which is the same in every epoch."""
        ...
