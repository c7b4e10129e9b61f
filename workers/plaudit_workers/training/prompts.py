"""Turn the rows of a job's data into prompts: messages rendered by the chat template, token ids, lengths.

The trainer and ``plaudit validate`` render through ``PromptRenderer``, so one knows what the other will meet.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tokenizers
from numpy.typing import NDArray

from plaudit_job.data_row import IMAGES_COLUMN, DataRow
from plaudit_job.spec.algorithm import AlgorithmSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.rollout import PassRateSpec
from plaudit_wire.errors import RefusedError, described
from plaudit_wire.printable import shown
from plaudit_workers.data_files import NumberedRow, RowError
from plaudit_workers.files import whole_file
from plaudit_workers.images import ImageError, ImageProcessor, row_files, with_parts
from plaudit_workers.tokenizer import ChatTemplate

_AT_A_TIME = 64
_TOKENIZED_AT_ONCE = 128
_CUT_CHARACTERS = 1 << 16
_CUT_CHARACTERS_A_TOKEN = 16
_NOT_TOKENIZED = np.empty(0, np.int32)
_DIGEST_BYTES = 16
_COUNTED_ROWS = 10_000
"""So many rows are tokenized even if all fit for certain: people are told their lengths."""
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_DIVIDING = ("ByteLevel", "Split", "Digits", "Punctuation")
"""Pre-tokenizers that only divide a text."""
_THREADS = 4
"""Each image is flushed to the disk: one thread would wait for the disk most of the time."""


class RenderedRow(NamedTuple):
    """Hold a row as the model gets it."""

    numbered: NumberedRow
    text: str
    """Chat template applied."""
    ids: NDArray[np.int32]
    """int32[P]; an image has a single token. Of a prompt that is many times too long, those of its start. Empty for one
    that is not tokenized, because ``PromptLengths`` knows enough of its length."""
    images: tuple[str, ...]
    """Digests of its images."""
    length: int
    """Tokens as the model sees them: each image counts as its patches do. Estimated where ``ids`` are of the start."""
    is_bound: bool = False
    """``length`` is the most that it can be."""


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

    def rendered(self, rows: Iterable[NumberedRow], lengths: PromptLengths | None = None) -> Iterator[RenderedRow]:
        """Store the images of rows and yield them rendered, in order; raise ``RowError`` for the first wrong one.

        Args:
            lengths: what is known of lengths, so that those rows are not tokenized; it learns the others. None: all
                rows are tokenized, as those with images always are, whose tokens are checked.
        """
        lengths = lengths if self._images is None else None
        rows = iter(rows)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="images") as threads:
            while part := list(islice(rows, _TOKENIZED_AT_ONCE if self._images is None else _AT_A_TIME)):
                found = [()] * len(part) if self._images is None else list(threads.map(self._stored_images, part))
                texts = [self.text(row, has_images=bool(own)) for row, own in zip(part, found, strict=True)]
                if lengths is None:
                    yield from self._tokenized(part, texts, found)
                else:
                    yield from self._measured(part, texts, lengths)

    def _tokenized(
        self, rows: list[NumberedRow], texts: list[str], images: Sequence[tuple[str, ...]]
    ) -> Iterator[RenderedRow]:
        all_ids = self._token_ids(rows, [text[: self._cut] for text in texts])
        for row, text, ids, own in zip(rows, texts, all_ids, images, strict=True):
            yield self._rendered(row, text, ids, own)

    def _measured(self, rows: list[NumberedRow], texts: list[str], lengths: PromptLengths) -> Iterator[RenderedRow]:
        """Yield rows, tokenized where nothing is known of their lengths."""
        plain = [self._is_untemplated(row.row) for row in rows]
        known = lengths.known(texts, plain)
        unknown = [number for number, length in enumerate(known) if length is None]
        made = self._tokenized(
            [rows[number] for number in unknown], [texts[number] for number in unknown], [()] * len(unknown)
        )
        found = [
            next(made) if length is None else RenderedRow(row, text, _NOT_TOKENIZED, (), abs(length), length < 0)
            for row, text, length in zip(rows, texts, known, strict=True)
        ]
        lengths.learn(texts, plain, [-each.length if each.is_bound else each.length for each in found])
        yield from found

    def token_ids(self, text: str, *, templated: bool) -> NDArray[np.int32]:
        """Return the token ids of one rendered prompt, whose text a chat template wrote or not."""
        special = not templated or self.template.tokenizer.chat_template is None
        [ids] = self._encoded([text], special=special)
        return ids

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
        found: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * len(rows)
        for special in (True, False):
            numbers = [number for number, row in enumerate(rows) if self._is_untemplated(row.row) is special]
            if not numbers:
                continue
            try:
                ids = self._encoded([texts[number] for number in numbers], special=special)
            except Exception as error:  # of the tokenizer's own code
                complaint = f"rows {rows[0].number} to {rows[-1].number}: the tokenizer refuses one"
                remedy = "Mend the texts, or name another tokenizer"
                raise RowError(rows[0].path, f"{complaint} ({described(error)})", remedy) from error
            for number, each in zip(numbers, ids, strict=True):
                found[number] = each
        return found

    def _encoded(self, texts: list[str], *, special: bool) -> list[NDArray[np.int32]]:
        tokenizer = self.template.tokenizer
        encoded = tokenizer(texts, add_special_tokens=special)["input_ids"]
        ids = [np.array(each, dtype=np.int32) for each in encoded]
        return [_with_one_start(each, tokenizer.bos_token_id) for each in ids] if special else ids

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


class PromptLengths:
    """Know the lengths of prompts without their tokens, which take nearly all of the time in which rows are read.

    A text of so few bytes that it fits for certain needs no tokens (``_is_bytewise``), beyond the first rows, whose
    lengths are told to people. Lengths found by an earlier start of the run are read from a file: a restarted or
    resumed trainer tokenizes what changed. Texts are compared as rendered, so a changed row, template or tool is found.

    Args:
        template: whose tokenizer counts.
        max_length: tokens of the longest prompt that is used.
        file: of the lengths. None: none are kept.
    """

    def __init__(self, template: ChatTemplate, max_length: int, file: Path | None) -> None:
        self._max_length = max_length
        self._file = file
        tokenizer = template.tokenizer
        # Code of a model's own may do more than the backend says.
        own_code = not type(tokenizer).__module__.startswith("transformers.")
        backend = None if own_code else getattr(tokenizer, "backend_tokenizer", None)
        self._bytewise = backend is not None and _is_bytewise(backend)
        self._normalizes = backend is not None and bool(_steps(backend.normalizer))
        self._further = 0 if backend is None else backend.num_special_tokens_to_add(False)
        self._tokenizer = ""
        if backend is not None and file is not None:
            settings = f"{tokenizers.__version__} {type(tokenizer)} {tokenizer.bos_token_id} {max_length} "
            self._tokenizer = _digest(settings, backend.to_str()).hex()
        self._kept = self._read()
        self._learned: dict[bytes, array[int]] = {}
        self._num_rows = 0

    def known(self, texts: Sequence[str], plain: Sequence[bool]) -> Sequence[int | None]:
        """Return the length of each text; the negative of a bound where that is enough; None where nothing is known.

        Args:
            plain: whether the tokenizer writes its special tokens, not the template.
        """
        kept = self._kept.get(self._key(texts, plain))
        if kept is not None and len(kept) == len(texts):
            return kept
        counted = self._num_rows < _COUNTED_ROWS or not self._bytewise
        return [None] * len(texts) if counted else [self._bound(*each) for each in zip(texts, plain, strict=True)]

    def learn(self, texts: Sequence[str], plain: Sequence[bool], lengths: Sequence[int]) -> None:
        """Note the lengths of texts, in the form of ``known``."""
        self._num_rows += len(texts)
        self._learned[self._key(texts, plain)] = array("i", lengths)

    def keep(self) -> None:
        """Write all lengths learned; without a file, or room for it, they are found again at the next start."""
        if self._file is None or not self._tokenizer or self._learned.keys() <= self._kept.keys():
            return
        with suppress(OSError, RefusedError), whole_file(self._file) as path, path.open("wb") as file:
            for key, lengths in self._learned.items():
                file.write(key + len(lengths).to_bytes(4, "little"))
                lengths.tofile(file)

    def _read(self) -> dict[bytes, array[int]]:
        kept: dict[bytes, array[int]] = {}
        if self._file is None or not self._tokenizer:
            return kept
        with suppress(OSError, EOFError), self._file.open("rb") as file:
            while key := file.read(_DIGEST_BYTES):
                lengths = array("i")
                lengths.fromfile(file, int.from_bytes(file.read(4), "little"))
                kept[key] = lengths
        return kept

    def _key(self, texts: Sequence[str], plain: Sequence[bool]) -> bytes:
        each = (f"{len(text)} {own} {text}" for text, own in zip(texts, plain, strict=True))
        return _digest(self._tokenizer, *each)

    def _bound(self, text: str, plain: bool) -> int | None:
        """Return the negative of the most tokens that a text can have, if it fits for certain."""
        if not any("!" <= character <= "~" for character in text) or (self._normalizes and not text.isascii()):
            return None
        bound = len(text.encode("utf-8", "surrogatepass")) + (self._further if plain else 0)
        return -bound if bound <= self._max_length else None


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b("".join(parts).encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def _is_bytewise(backend: tokenizers.Tokenizer) -> bool:
    """Return True if an ASCII text, or any that is not normalized, has no more tokens than bytes.

    So it is for byte-level BPE that adds no space before a text: its tokens divide the bytes, and Unicode's normal
    forms of ASCII characters are the characters themselves. It removes nothing and knows every visible ASCII character,
    so a text with one of them has a token.
    """
    divisions = _steps(backend.pre_tokenizer)
    return (
        isinstance(backend.model, tokenizers.models.BPE)
        and any(each["type"] == "ByteLevel" for each in divisions)
        and all(each["type"] in _NORMAL_FORMS for each in _steps(backend.normalizer))
        and not any(
            each["type"] not in _DIVIDING or each.get("add_prefix_space") or "Removed" in each.values()
            for each in divisions
        )
        and all(backend.token_to_id(chr(byte)) is not None for byte in range(ord("!"), ord("~") + 1))
    )


def _steps(step: Any) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer, or those that it consists of, as plain data."""
    found, waiting = list[dict[str, Any]](), [] if step is None else [json.loads(step.__getstate__())]
    while waiting:
        one = waiting.pop()
        inner = one.get("normalizers", one.get("pretokenizers"))
        found += [one] if inner is None else []
        waiting += inner or []
    return found


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
