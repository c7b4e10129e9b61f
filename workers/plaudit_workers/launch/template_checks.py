"""Find out what a chat template makes of messages, before a run relies on it. Imports transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateSyntaxError

from plaudit_job.fields import is_hub_id
from plaudit_job.problem import Problem
from plaudit_job.spec.algorithm import ModelSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_wire.errors import described
from plaudit_workers.tokenizer import ChatTemplate, load_tokenizer

_USER = {"role": "user", "content": "What is 2 + 2?"}
_OTHER = {"role": "user", "content": "Name a colour."}


def load_template(model: ModelSpec, tools: list[dict[str, Any]]) -> ChatTemplate:
    """Load a job's template from files of this machine; nothing is downloaded. Raise ``RefusedError``."""
    tokenizer = load_tokenizer(model, only_here=is_hub_id(model.tokenizer or model.source))
    return ChatTemplate(tokenizer, tools, model.chat_template_arguments)


def template_problems(job: RLJob, template: ChatTemplate) -> tuple[list[Problem], list[Problem]]:
    """Return what is wrong with a template whatever the rows are, and what a user should know of it."""
    model, name = job.spec.model, _name(job)
    if template.tokenizer.chat_template is None:
        remedy = "Contents of messages are joined by line ends; set model.chatTemplate for another form"
        return [], [Problem(name, "the tokenizer has no chat template", remedy)]
    try:
        text = template.render([_USER], generate=True)
    except TemplateSyntaxError as error:
        return [Problem(name, f"the chat template is no Jinja (line {error.lineno}: {error.message})", "Mend it")], []
    except Exception as error:  # of the template's own expressions
        complaint = f"the chat template refuses a message of the user ({described(error)})"
        return [Problem(name, complaint, "Mend it, or give what it needs in model.chatTemplateArguments")], []
    problems = []
    if text == template.render([_OTHER], generate=True):
        complaint = "the chat template ignores messages: two prompts become the same text"
        problems.append(Problem(name, complaint, "Write their contents: {{ message['content'] }}"))
    elif template.tools and text == _without_tools(template, model):
        complaint = "the chat template has no place for tools, so the model would never see them"
        problems.append(Problem(name, complaint, "Name a template that writes tools", also=("spec.rollout.agent",)))
    return problems, [*_notes(job, template, text)]


def _name(job: RLJob) -> str:
    model = job.spec.model
    if model.chat_template:
        return "spec.model.chatTemplate"
    return "spec.model.tokenizer" if model.tokenizer else "spec.model.source"


def _without_tools(template: ChatTemplate, model: ModelSpec) -> str:
    return ChatTemplate(template.tokenizer, [], model.chat_template_arguments).render([_USER], generate=True)


def _notes(job: RLJob, template: ChatTemplate, text: str) -> Iterator[Problem]:
    if text == template.render([_USER], generate=False):
        complaint = "the chat template writes nothing for add_generation_prompt"
        yield Problem(_name(job), complaint, "The policy continues right after the last message")
    written = str(template.tokenizer.chat_template)
    for argument in job.spec.model.chat_template_arguments:
        if argument not in written:
            field = f"spec.model.chatTemplateArguments.{argument}"
            yield Problem(field, "is not read by the chat template", "Correct its name, or remove it")
