"""Continue a conversation token by token.

The next prompt = previous ids + sampled ids + the suffix of the new messages. Nothing that the policy sampled is
tokenised again. The suffix is everything that the chat template writes after an assistant turn: the rest of its
closing, a separator, the new messages, and the opening of the next assistant turn. It is found by rendering a short
conversation in which a marker stands where the assistant's own text ends::

    render([user, assistant(marker), *new messages])  =  … marker <closing> <separator> <new messages> <opening>

and cutting behind the closing that the policy wrote itself: its end-of-turn token. The separator that follows it in
the template (often a line end) stays part of the suffix. The idea is that of TRL's ``_get_tool_suffix_ids``.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from plaudit_wire.errors import RefusedError
from plaudit_workers.tokenizer import engine_ends, turn_ends

if TYPE_CHECKING:
    from plaudit_workers.tokenizer import ChatTemplate

REWRITES = (
    "the chat template drops the reasoning of earlier turns; training keeps every sampled token, as the policy saw it. "
    "A server that renders the whole conversation anew shows the policy a different history"
)
_MARKER = "zq7mark"
_THOUGHT = "zq7thought"
_USER = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "b"}
CallMessage = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
"""Makes an assistant's message with these calls, the marker in the last one."""


class ChatSuffix:
    """Compute suffixes for one chat template: the tokenizer's, with the job's tools."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        tokenizer = template.tokenizer
        self._ends = turn_ends(tokenizer)
        self._special = self._ends | frozenset(tokenizer.added_tokens_decoder)
        self._form = _FORMS[0]
        """The form of calls that the template rendered last, tried first."""

    def after_calls(self, calls: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]], last: int) -> list[int]:
        """Return the tokens between a turn that called tools and the next; raise ``ValueError`` if there are none.

        Args:
            results: the messages with role ``tool``, one for each call.
        """
        for form in sorted(_FORMS, key=lambda each: each != self._form):
            found = self._suffix(form(calls), results, last)
            if found is not None:
                self._form = form
                return found
        raise ValueError("the chat template does not render tool results")

    @functools.cached_property
    def renders_parallel_calls(self) -> bool:
        """Return True if the template has a place for several calls in one turn; gpt-oss's has none."""
        calls = [tool_call("tool", {}, number) for number in range(2)]
        results = [tool_message("tool", text, number) for number, text in enumerate(("a1b", "c2d"))]
        try:
            self.after_calls(calls, results, -1)
        except ValueError:
            return False
        return True

    def after_answer(self, messages: Sequence[dict[str, Any]], last: int) -> list[int]:
        """Return the tokens between a turn without calls and the next; raise ``ValueError`` if there are none."""
        found = self._suffix({"role": "assistant", "content": _MARKER}, messages, last)
        if found is None:
            raise ValueError("the chat template does not render messages after an assistant turn")
        return found

    def _suffix(self, assistant: dict[str, Any], messages: Sequence[dict[str, Any]], last: int) -> list[int] | None:
        try:
            ended = self._after_marker([_USER, assistant], generate=False)
            continued = self._after_marker([_USER, assistant, *messages], generate=True)
        except (TemplateError, TypeError):  # a template that wants other arguments or contents concatenates None
            return None
        if ended is None or continued is None or not _shown(messages, continued):
            return None
        ids = self._template.encode(continued)
        closing = self._closing(self._template.encode(ended), ids)
        if closing is None and not assistant["content"]:
            return None
        if closing is None:
            # Without an end-of-turn token the next message's opening ends the turn, as GLM's <|observation|>. Where the
            # template only writes another one in history, as gpt-oss <|end|> for <|return|>, it counts as written.
            own = self._template.encode(ended)[:1]
            ends_otherwise = last in self._ends and self._ends.issuperset(own) and own != [] and ids[0] in self._special
            return ids[ids[:1] == [last] or ends_otherwise :]
        return ids[self._num_written(ids, closing, last) :]

    def _after_marker(self, messages: Sequence[dict[str, Any]], *, generate: bool) -> str | None:
        text = self._template.render(messages, generate=generate)
        _, marker, rest = text.partition(_MARKER)
        return rest if marker else None

    def _closing(self, ended: list[int], continued: list[int]) -> int | None:
        """Return the place of the template's end-of-turn token; None where it writes none."""
        places = [
            place
            for place, (own, other) in enumerate(zip(ended, continued, strict=False))
            if own == other and own in self._special
        ]
        return places[-1] if places else None

    def _num_written(self, continued: list[int], closing: int, last: int) -> int:
        """Return how many tokens of ``continued`` the policy has written itself."""
        # The token behind the closing is the policy's where it opens what follows: behind GLM's </tool_call> comes
        # <|observation|>, behind Gemma's <tool_call|> comes <|tool_response>, and both end the turn.
        if last in self._special and last in continued[: closing + 2]:
            return continued.index(last) + 1
        if last in self._ends:
            return closing + 1  # it ended with another token than the template writes, as Llama's eom for eot
        return closing  # it ended at a stop text: the suffix brings the end of the turn

    def check(self, tool_name: str, stop: Sequence[str | int] = ()) -> str:
        """Check that the template can continue a conversation; return remarks on it, or "".

        Args:
            tool_name: any tool of the job; empty: the policy's turns are answered by a user.
            stop: the job's stop texts, and the ids of its stop tokens.
        """
        try:
            if tool_name:
                self.after_calls([tool_call(tool_name, {}, 0)], [tool_message(tool_name, "a1b", 0)], -1)
            else:
                self.after_answer([{"role": "user", "content": "a1b"}], -1)
        except ValueError as error:
            raise RefusedError(
                f"model.chatTemplate: {error}, so rollout.agent cannot hold conversations with it. Name a template of "
                "the model that supports them"
            ) from error
        return self.remarks(stop)

    def remarks(self, stop: Sequence[str | int] = ()) -> str:
        """Return what a user should know of conversations with this template; empty if there is nothing."""
        return ". ".join(filter(None, [REWRITES if self.rewrites_history() else "", self.goes_on(stop)]))

    def goes_on(self, stop: Sequence[str | int]) -> str:
        """Return a remark if the engine does not end a turn where the template ends it."""
        tokenizer = self._template.tokenizer
        messages = [_USER, {"role": "assistant", "content": _MARKER}]
        with contextlib.suppress(Exception):  # a template is a program; what it cannot render is refused elsewhere
            ended = self._template.encode(self._after_marker(messages, generate=False) or "")
            continued = self._template.encode(self._after_marker([*messages, _USER], generate=True) or "")
            closing = self._closing(ended, continued)
            if closing is None or ended[closing] in engine_ends(tokenizer):
                return ""
            end = tokenizer.decode([ended[closing]])
            if end not in stop and ended[closing] not in stop:
                return (
                    f"the chat template ends a turn with {end!r}, which is no end of a sequence for the model: the "
                    "policy writes on behind it. Name it in rollout.sampling.stop, or in eos_token_id of the model's "
                    "generation_config.json"
                )
        return ""

    def rewrites_history(self) -> bool:
        """Return True if the template drops the reasoning of earlier turns once another message follows.

        Some templates open a thought for the policy (``<think>``) and leave the opening out of the history.
        """
        with contextlib.suppress(TemplateError):
            opened = self._template.render([_USER], generate=True)
            if not self._template.render([_USER, _ANSWER, _USER], generate=True).startswith(opened):
                return True
        for thought in (
            {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\nb"},
            {"role": "assistant", "content": "b", "reasoning_content": _THOUGHT},
        ):
            try:
                first = self._template.render([_USER, thought], generate=False)
                later = self._template.render([_USER, thought, _USER], generate=True)
            except TemplateError:
                continue
            if _THOUGHT in first and _THOUGHT not in later:
                return True
        return False


def tool_call(name: str, arguments: Any, number: int) -> dict[str, Any]:
    """Return a call as it stands in an assistant's message.

    Args:
        arguments: parsed; templates expect a dictionary.
        number: makes the id, in the nine letters and digits that Mistral's template wants.
    """
    return {"id": _call_id(number), "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_message(name: str, text: str, number: int) -> dict[str, Any]:
    """Return the message with a tool's result; see ``tool_call``."""
    return {"role": "tool", "name": name, "content": text, "tool_call_id": _call_id(number)}


def decoded_turn(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode a turn with its special tokens, which parsers look for, but without the end of the turn."""
    return str(tokenizer.decode(without_end(tokenizer, ids), skip_special_tokens=False))


def without_end(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return a turn's tokens without the one that ends it."""
    return list(ids[:-1] if ids and ids[-1] in turn_ends(tokenizer) else ids)


def _call_id(number: int) -> str:
    return f"call{number % 100_000:05d}"


def _with_calls(write: Callable[[Any], Any], content: str | None) -> CallMessage:
    def form(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        others = [_with_arguments(call, write(call["function"]["arguments"])) for call in calls[:-1]]
        marked = [*others, _with_arguments(calls[-1], write({"a": _MARKER}))]
        return {"role": "assistant", "content": content, "tool_calls": marked}

    return form


def _with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}


def _shown(messages: Sequence[dict[str, Any]], text: str) -> bool:
    """Return True if the text contains the contents. Templates may strip or escape them: the longest word is enough."""

    def longest_word(content: str) -> str:
        return max("".join(c if c.isalnum() and c.isascii() else " " for c in content).split(), key=len, default="")

    return all(longest_word(str(message["content"])) in text for message in messages)


_FORMS: tuple[CallMessage, ...] = (
    _with_calls(dict, ""),
    _with_calls(json.dumps, ""),
    _with_calls(dict, None),
    _with_calls(json.dumps, None),
    # Templates that know no tool calls still render tool messages behind a plain assistant turn.
    lambda calls: {"role": "assistant", "content": _MARKER},
)
"""The forms that templates expect: arguments parsed or as JSON text, contents empty or None."""
