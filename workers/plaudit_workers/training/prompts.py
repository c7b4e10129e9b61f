"""Turn the rows of a job's data into prompts: messages rendered by the chat template, token ids, lengths.

The trainer and ``plaudit validate`` render through ``PromptRenderer``, so one knows what the other will meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from plaudit_job.data_row import IMAGES_COLUMN, DataRow
from plaudit_job.spec.algorithm import AlgorithmSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.rollout import PassRateSpec
from plaudit_wire.errors import described
from plaudit_wire.printable import shown
from plaudit_workers.data_files import NumberedRow, RowError
from plaudit_workers.images import ImageError, ImageProcessor, row_files, with_parts
from plaudit_workers.tokenizer import ChatTemplate

_AT_A_TIME = 64
_TOKENIZED_AT_ONCE = 128
_CUT_CHARACTERS = 1 << 16
_CUT_CHARACTERS_A_TOKEN = 16
_THREADS = 4
"""Each image is flushed to the disk: one thread would wait for the disk most of the time."""


class RenderedRow(NamedTuple):
    """Hold a row as the model gets it."""

    numbered: NumberedRow
    text: str
    """Chat template applied."""
    ids: NDArray[np.int32]
    """int32[P]; an image has a single token. Of a prompt that is many times too long, those of its start."""
    images: tuple[str, ...]
    """Digests of its images."""
    length: int
    """Tokens as the model sees them: each image counts as its patches do. Estimated where ``ids`` are of the start."""


class PromptRenderer:
    """Render rows with a job's chat template.

    Args:
        template: makes text of messages; without one their contents are joined by line ends.
        continues: a last message of the assistant is the beginning of the response; else such rows are refused, because
            agents begin with a turn of their own.
        max_length: tokens of the longest prompt that is used (``data.train.maxPromptLength``). Only the start of a
            prompt that is many times longer is tokenized: megabytes would take minutes. None: all prompts are whole.
    """

    def __init__(
        self,
        template: ChatTemplate,
        images: ImageProcessor | None = None,
        *,
        continues: bool = True,
        max_length: int | None = None,
    ) -> None:
        self.template = template
        self._images = images
        self._continues = continues
        self._max_length = max_length or 0
        cuts = max_length is not None and images is None
        self._cut = max(_CUT_CHARACTERS, _CUT_CHARACTERS_A_TOKEN * self._max_length) if cuts else None

    @classmethod
    def of_job(cls, job: RLJob, template: ChatTemplate, images: ImageProcessor | None) -> PromptRenderer:
        """Return what renders a job's data."""
        continues = job.spec.rollout.agent.kind == "singleTurn"
        return cls(template, images, continues=continues, max_length=job.spec.data.train.max_prompt_length)

    def rendered(self, rows: Iterable[NumberedRow]) -> Iterator[RenderedRow]:
        """Store the images of rows and yield them rendered, in order; raise ``RowError`` for the first wrong one."""
        rows = iter(rows)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="images") as threads:
            while part := list(islice(rows, _TOKENIZED_AT_ONCE if self._images is None else _AT_A_TIME)):
                found = [()] * len(part) if self._images is None else list(threads.map(self._stored_images, part))
                texts = [self.text(row, has_images=bool(own)) for row, own in zip(part, found, strict=True)]
                all_ids = self._token_ids(part, [text[: self._cut] for text in texts])
                for row, text, ids, own in zip(part, texts, all_ids, found, strict=True):
                    yield self._rendered(row, text, ids, own)

    def _rendered(self, row: NumberedRow, text: str, ids: NDArray[np.int32], images: tuple[str, ...]) -> RenderedRow:
        """Return a row from the token ids of its text, or of the start of a long one."""
        if self._cut is not None and len(text) > self._cut:
            if ids.size > 2 * self._max_length:  # too long, whatever follows
                return RenderedRow(row, text, ids, images, ids.size * len(text) // self._cut)
            [ids] = self._token_ids([row], [text])
        return RenderedRow(row, text, ids, images, self._length(row, ids, images))

    def text(self, row: NumberedRow, *, has_images: bool = False) -> str:
        """Return a row's prompt as text; raise ``RowError``."""
        prompt, template = row.row.prompt, self._template_of(row)
        if isinstance(prompt, str):
            return prompt
        if prompt[-1]["role"] == "assistant" and not self._continues:
            complaint = f"row {row.number}: the prompt ends with a message of the assistant, whose turn an agent begins"
            raise RowError(row.path, complaint, "Remove this message, or set rollout.agent.kind to singleTurn")
        if template.tokenizer.chat_template is None:
            return "\n".join(str(message["content"]) for message in prompt)
        try:
            return template.prompt(with_parts(prompt) if has_images else prompt)
        # Beside its own errors, a template raises those of its expressions, such as a TypeError for a content of parts.
        except Exception as error:
            complaint = f"row {row.number}: the chat template refuses these messages ({described(error)})"
            remedy = "Mend them, or name another template with model.chatTemplate"
            raise RowError(row.path, complaint, remedy) from error

    def _template_of(self, row: NumberedRow) -> ChatTemplate:
        try:
            return self.template.for_row(row.row.extra_info)
        except ValueError as error:
            remedy = "Name them, or leave it empty for all tools"
            raise RowError(row.path, f"row {row.number}: {error}", remedy) from error

    def _token_ids(self, rows: list[NumberedRow], texts: list[str]) -> list[NDArray[np.int32]]:
        """Return the ids of each text. A chat template writes its special tokens; other text gets the tokenizer's."""
        tokenizer = self.template.tokenizer
        found: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * len(rows)
        for special in (True, False):
            numbers = [number for number, row in enumerate(rows) if self._is_untemplated(row.row) is special]
            if not numbers:
                continue
            try:
                encoded = tokenizer([texts[number] for number in numbers], add_special_tokens=special)["input_ids"]
                ids = [np.array(each, dtype=np.int32) for each in encoded]
            except Exception as error:  # of the tokenizer's own code
                complaint = f"rows {rows[0].number} to {rows[-1].number}: the tokenizer refuses one"
                remedy = "Mend the texts, or name another tokenizer"
                raise RowError(rows[0].path, f"{complaint} ({described(error)})", remedy) from error
            for number, each in zip(numbers, ids, strict=True):
                found[number] = _with_one_start(each, tokenizer.bos_token_id) if special else each
        return found

    def _is_untemplated(self, row: DataRow) -> bool:
        return self.template.tokenizer.chat_template is None or isinstance(row.prompt, str)

    def _stored_images(self, row: NumberedRow) -> tuple[str, ...]:
        assert self._images is not None
        try:
            files = row_files(row.row.prompt, row.images, row.path.parent, self._images.settings.max_per_prompt)
            return tuple(self._images.add(content) for content in files)
        except ImageError as error:
            _refuse_images(row, error.complaint, error.remedy, error)
        except ValueError as error:  # of the processor, for sizes that it does not scale
            complaint = f"has an image that the model's processor refuses ({error})"
            _refuse_images(row, complaint, "Change its size, or remove the row", error)

    def _length(self, row: NumberedRow, ids: NDArray[np.int32], digests: tuple[str, ...]) -> int:
        if self._images is None:
            return int(ids.size)
        places = int((ids == self._images.token_id).sum())
        if places != len(digests):
            complaint = f"has {len(digests)} images, but the rendered prompt has {places} image tokens"
            remedy = "Use the model's own chat template (remove model.chatTemplate), and no special tokens in the texts"
            _refuse_images(row, complaint, remedy)
        return int(ids.size) + sum(self._images.num_tokens(digest) - 1 for digest in digests)


def _with_one_start(ids: NDArray[np.int32], start: Any) -> NDArray[np.int32]:
    """Return token ids without a second begin token: the text had one, and the tokenizer wrote its own before it."""
    return ids[1:] if ids.size > 1 and start is not None and ids[0] == ids[1] == start else ids


def _refuse_images(row: NumberedRow, complaint: str, remedy: str, cause: Exception | None = None) -> NoReturn:
    raise RowError(row.path, f"row {row.number}: column {IMAGES_COLUMN} {complaint}", remedy) from cause


class Selection:
    """Count the prompts that a run uses, and those that it leaves out.

    The choice depends on rows and job alone, so a resumed run has the same prompts at the same positions.

    Args:
        max_length: ``data.train.maxPromptLength``, in tokens.
        pass_rate: ``data.train.passRate``.
    """

    def __init__(self, max_length: int, pass_rate: PassRateSpec | None = None) -> None:
        self.max_length = max_length
        self._pass_rate = pass_rate
        self.used = 0
        self.empty = 0
        self.too_long = 0
        self.outside_pass_rate = 0

    @property
    def left_out(self) -> int:
        """Return the rows that are not used."""
        return self.empty + self.too_long + self.outside_pass_rate

    def wants(self, row: NumberedRow, length: int) -> bool:
        """Count a row; return True if the run uses it. Raise ``RowError`` for one without its pass rate."""
        chosen = self._pass_rate is None or _is_within(row, self._pass_rate)
        self.empty += length == 0
        self.too_long += length > self.max_length
        self.outside_pass_rate += 0 < length <= self.max_length and not chosen
        used = 0 < length <= self.max_length and chosen
        self.used += used
        return used

    def left_out_by(self) -> dict[str, int]:
        """Return why rows are left out, and how many."""
        reasons = {
            f"longer than maxPromptLength {self.max_length:,}": self.too_long,
            "without a token": self.empty,
            "outside passRate": self.outside_pass_rate,
        }
        return {reason: number for reason, number in reasons.items() if number}

    def in_words(self) -> str:
        """Return how many rows are used, and why others are not."""
        reasons = (
            f"; {number:,} {'is' if number == 1 else 'are'} {reason}" for reason, number in self.left_out_by().items()
        )
        return f"{self.used:,} of {self.used + self.left_out:,} rows are used{''.join(reasons)}"

    def visits(self, algorithm: AlgorithmSpec) -> str:
        """Return how often a run uses each prompt, for data that is no mixture."""
        times = algorithm.steps * algorithm.prompts_per_step / self.used
        often = f"{round(times, 1):,g}" if times >= 0.1 else "less than 0.1"
        return f"{algorithm.steps:,} steps use each {often} times"

    def refusal(self, lengths: NDArray[np.int32]) -> tuple[str, str]:
        """Return the complaint and the remedy of data of which no row is used."""
        reasons = "; ".join(f"{number:,} {reason}" for reason, number in self.left_out_by().items())
        remedies = ["Raise data.train.maxPromptLength"] * bool(self.too_long)
        remedies += ["Widen data.train.passRate"] * bool(self.outside_pass_rate)
        complaint = (
            f"none of its {self.left_out:,} prompts can be used: {reasons}. They have {lengths_in_words(lengths)}"
        )
        return complaint, ". ".join(remedies or ["Write prompts"])


def _is_within(row: NumberedRow, section: PassRateSpec) -> bool:
    value = row.row.extra_info.get(section.field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise RowError(
            row.path,
            f"row {row.number}: extra_info[{section.field!r}] is {shown(value)}; data.train.passRate requires a number "
            "from 0 to 1 in every row",
            "Write it, name another field, or remove passRate",
        )
    return section.min <= value <= section.max


def lengths_in_words(lengths: NDArray[np.int32]) -> str:
    """Return the distribution of prompt lengths in words."""
    if not lengths.size:
        return "no lengths"
    if lengths.min() == lengths.max():
        return f"{int(lengths.min()):,} tokens each"
    half, most = (int(np.quantile(lengths, share, method="higher")) for share in (0.5, 0.9))
    return f"{int(lengths.min()):,} to {int(lengths.max()):,} tokens (half at most {half:,}, 90 % at most {most:,})"
