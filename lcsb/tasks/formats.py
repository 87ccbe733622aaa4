"""A row of data as a text with target characters, or as a question with choices. No tokens here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lcsb.data import field_of, string_field


@dataclass(frozen=True)
class Passage:
    """A text and the characters of it that a model is to predict.

    targets: spans [start, end) of characters, in order and apart.
    templated: the text came from a chat template: it brings its own special tokens, none is added to it, and a
        special token's string in it is that token.
    """

    text: str
    targets: tuple[tuple[int, int], ...]
    templated: bool = False

    @classmethod
    def of(cls, prompt: str, completion: str) -> Passage:
        """prompt + completion as they stand, the completion the target."""
        return cls(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))

    @property
    def empty(self) -> bool:
        """Nothing but white space."""
        return not self.text.strip()


@dataclass(frozen=True)
class Question:
    """A prompt and its choices, one of which is right (an index from 0). A choice follows the prompt as it stands."""

    prompt: str
    choices: tuple[str, ...]
    right: int

    def passage(self, choice: int | None = None) -> Passage:
        """The prompt with one choice (the right one if None) as the target."""
        return Passage.of(self.prompt, self.choices[self.right if choice is None else choice])


def completion(row: Mapping[str, Any], where: str) -> Passage:
    """Fields prompt and completion, put together as they stand; the completion is the target."""
    return Passage.of(string_field(row, "prompt", where), string_field(row, "completion", where))


def gsm8k(row: Mapping[str, Any], where: str) -> Passage:
    """Fields question and answer: "Question: ...", a line "Answer: ...". The solution is the target, as it stands in
    the data, with its <<calculator>> notes and its last line "#### number".
    """
    question, answer = string_field(row, "question", where), string_field(row, "answer", where)
    return Passage.of(f"Question: {question.strip()}\nAnswer:", f" {answer.strip()}")


def arc_text(row: Mapping[str, Any], where: str) -> Question:
    """An ARC row by text scoring: the choices are not shown; each one's text is scored as the answer."""
    question, texts, _, right = _arc(row, where)
    return Question(f"Question: {question}\nAnswer:", tuple(f" {text}" for text in texts), right)


def arc_letter(row: Mapping[str, Any], where: str) -> Question:
    """An ARC row by letter scoring: the choices are shown after their labels (A-E or 1-4) and the labels are scored."""
    question, texts, labels, right = _arc(row, where)
    shown = "".join(f"{label}. {text}\n" for label, text in zip(labels, texts, strict=True))
    return Question(f"Question: {question}\n{shown}Answer:", tuple(f" {label}" for label in labels), right)


def _arc(row: Mapping[str, Any], where: str) -> tuple[str, list[str], list[str], int]:
    question, answer = string_field(row, "question", where).strip(), string_field(row, "answerKey", where)
    choices = field_of(row, "choices", where)
    if not isinstance(choices, Mapping):
        raise ValueError(
            f"{where}: field 'choices' is {type(choices).__name__}, expected an object with text and label"
        )
    columns = []
    for name in ("text", "label"):
        values = field_of(choices, name, f"{where}: field 'choices'")
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{where}: field 'choices.{name}' is not a list of strings")
        columns.append([value.strip() for value in values])
    texts, labels = columns
    if len(texts) != len(labels) or len(texts) < 2 or len(set(labels)) != len(labels):
        raise ValueError(
            f"{where}: {len(texts)} choices with labels {', '.join(labels) or '(none)'}, "
            "expected at least two, each with a label of its own"
        )
    if answer not in labels:
        raise ValueError(f"{where}: field 'answerKey' is {answer!r}, expected one of {', '.join(labels)}")
    return question, texts, labels, labels.index(answer)


def conversation(row: Mapping[str, Any], where: str, tokenizer: Any) -> Passage:
    """Field messages (a list of objects with role and content) through the tokenizer's chat template.

    The targets are the assistant's turns: what the template adds to the text when such a turn is added, after the
    words that open it (add_generation_prompt), so the mark that ends a turn is learned too.

    Raises:
        ValueError: no chat template; a turn that is not of this form; a template that rewrites earlier turns when one
            is added (then no span of the whole text is the turn).
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{where}: field 'messages' needs a chat template, and the model's tokenizer has none"
        )
    messages = _messages(row, where)
    text = _render(tokenizer, messages, where, prompt=False) if messages else ""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise ValueError(
                f"{where}: message 1 is the assistant's, expected one of a system or user before it"
            )
        opened = _render(tokenizer, messages[:index], where, prompt=True)
        closed = _render(tokenizer, messages[: index + 1], where, prompt=False)
        if not (text.startswith(closed) and closed.startswith(opened)):
            raise ValueError(
                f"{where}: the chat template writes message {index + 1} otherwise when more messages follow, "
                "so its tokens cannot be told apart; expected a template that only appends"
            )
        spans.append((len(opened), len(closed)))
    return Passage(text, tuple(spans), templated=True)


def _messages(row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    messages = field_of(row, "messages", where)
    if not isinstance(messages, list):
        raise ValueError(
            f"{where}: field 'messages' is {type(messages).__name__}, expected a list of messages"
        )
    for number, message in enumerate(messages, start=1):
        place = f"{where}: message {number}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{place} is {type(message).__name__}, expected an object with role and content")
        for name in ("role", "content"):
            string_field(message, name, place)
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _render(tokenizer: Any, messages: list[dict[str, str]], where: str, prompt: bool) -> str:
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except TemplateError as error:
        raise ValueError(f"{where}: the chat template refuses these messages: {error}") from None
    return text


def kind_of(row: Mapping[str, Any], where: str, text_field: str) -> str:
    """What a row of a user's own data is: "text", "messages" or "completion". A text field wins over the others.

    Raises:
        ValueError: none of their fields is there (names the nearest).
    """
    if text_field in row:
        return "text"
    if "messages" in row:
        return "messages"
    if "prompt" in row or "completion" in row:
        return "completion"
    import difflib

    wanted = (text_field, "messages", "prompt", "completion")
    pairs = itertools.product(row, wanted)
    near = max(pairs, key=lambda pair: difflib.SequenceMatcher(None, *pair).ratio(), default=None)
    hint = f"; nearest is {near[0]!r} to {near[1]!r}" if near else ""
    raise ValueError(
        f"{where}: no field {text_field!r}, no 'messages' and no 'prompt' with 'completion' among "
        f"{', '.join(map(repr, row)) or 'none'}{hint}"
    )
