"""How roles speak through a chat model's own template: prompts, calls, and the text between turns.

`ChatFormat` implements tasks.format.Format for any model with a chat template and a byte-level
tokenizer; the toy has its own format. A method brings the wording (`Words`). This file defines the
<answer> tag, the headers of documents and the blank line between two notes. A call is Qwen's
<tool_call> JSON with a third key, `purpose`, beside `name` and `arguments`; the key may also be
inside `arguments`. The method's system prompt describes the tools. The template's own `tools`
argument is not used, because templates then demand their own call syntax, without a purpose.

Ids are never re-encoded. The text around a tool result is found once, by comparing two renderings
of the template. After that a context only grows: prompt, sampled ids, observation, sampled ids. A
template that rewrites earlier turns is refused, except that it may drop or add <think> blocks.
Thoughts stay in the context of the role that had them and are removed from notes, both by id.

A step ends with the model's own end-of-turn token, which is sampled and trained like any other.
Nothing is cut off after a call, and a call with text after it is malformed.

Tests: pytest tests/test_chat.py
"""

import contextlib
import functools
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from config import UserError
from tasks.format import Action, Call
from tools import Document, Tool


@dataclass(frozen=True)
class Template:
    """A role's first messages. `user` contains {slot} for each slot."""

    system: str
    user: str
    # The keywords of ChatFormat.prompt -> the contents of the slots, as text or ids.
    fill: Callable[..., dict[str, str | list[int]]]


@dataclass(frozen=True)
class Words:
    """A method's wording. The first role of `prompts` acts in turns."""

    prompts: dict[str, Template]
    final: str  # the demand to answer now
    no_note: str  # the observation if no reader wrote a note
    purpose: bool = True  # whether a call must state its purpose


# --------------------------------------------------------------------------- from text to an action

OPEN = re.compile(r"<tool_call>\s*")
TAG = re.compile(r"</?tool_call>")
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def read_action(
    text: str, tools: Sequence[Tool], *, purpose: bool = True, final: bool = False
) -> Action:
    """Parses the text of one step, without thoughts. Any fault becomes Action.error."""
    calls, around = split_calls(text)
    answers = ANSWER.findall("".join(around))
    if len(calls) + len(answers) > 1:
        error = "The step holds more than one call or answer; give one, and end the step with it."
    elif calls and around[-1].strip():
        error = "There is text after the call; end the step with the call."
    elif calls and final:
        error = "No further call was possible; an answer was asked for."
    elif calls:
        return read_call(calls[0], tools, purpose)
    elif answers and answers[0].strip():
        return Action(answer=answers[0].strip())
    elif answers:
        error = "The answer is empty."
    elif "<tool_call>" in text or "<answer>" in text:
        error = "A <tool_call> or an <answer> was opened and not closed."
    else:
        error = "The step holds neither a call nor an answer; end it with one of them."
    return Action(error=error)


def split_calls(text: str) -> tuple[list[str], list[str]]:
    """(the text between each call's tags, the texts before, between and after the calls).

    A tag within a call's JSON is text. An opening tag before another opening tag is no call.
    """
    calls = []
    around = []
    rest = 0  # where the text around the calls continues
    start = 0  # where the next search begins
    while opening := OPEN.search(text, start):
        start = opening.end()
        if text.startswith("{", start):
            with contextlib.suppress(ValueError, RecursionError):  # read_call reports the error
                _, start = json.JSONDecoder(strict=False).raw_decode(text, start)
        following = TAG.search(text, start)
        if following and following[0] == "</tool_call>":
            calls.append(text[opening.end() : following.start()])
            start = following.end()
        if start > opening.end():  # it opens JSON or a call, so it is no text
            around.append(text[rest : opening.start()])
            rest = start
    return calls, [*around, text[rest:]]


def read_call(body: str, tools: Sequence[Tool], purpose: bool) -> Action:
    """Parses the JSON between the call tags. Its strings may hold raw line breaks, as code does."""
    try:
        call = json.loads(body, strict=False)
    except (ValueError, RecursionError) as error:
        return Action(error=f"The call is not valid JSON: {error}.")
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return Action(error='The call is no JSON object with "name" and an object "arguments".')
    name = call.get("name")
    tool = next((tool for tool in tools if tool.name == name), None)
    argument = call["arguments"].get(tool.argument) if tool else None
    stated = call.get("purpose", call["arguments"].get("purpose"))
    if tool is None:
        listed = ", ".join(tool.name for tool in tools)
        error = f"There is no tool named {json.dumps(name)[:100]}; the tools are: {listed}."
    elif not is_text(argument):
        error = f'The tool {name} needs the argument "{tool.argument}", a text that is not empty.'
    elif not purpose:
        return Action(call=Call(name, argument))
    elif is_text(stated):
        return Action(call=Call(name, argument, stated.strip()))
    else:
        error = 'The call needs a "purpose": a text that says what to find out from the result.'
    return Action(error=error)


def is_text(value) -> bool:
    """Whether a value is a text that is not blank and is valid in UTF-8 (no lone surrogates)."""
    return isinstance(value, str) and value.strip() and not re.search("[\ud800-\udfff]", value)


# --------------------------------------------------------------------------------------- the format

# The line before each document of a chunk, and the line after the last one.
DOCUMENT = "[document]"
END = "[end of the documents]"
FORGED = re.compile(r"\[(?=\s*(document|end\s+of\s+the\s+documents)\b)", re.IGNORECASE)


def defuse(line: str) -> str:
    """A document's line. One that imitates DOCUMENT or END gets another bracket.

    So no document can pass for two, and none can pretend that the documents have ended.
    """
    normal = unicodedata.normalize("NFKC", line)  # some tokenizers do the same
    return FORGED.sub("(", normal) if FORGED.search(normal) else line


# The contents of probe messages. The rendered template is split at them.
QUESTION, STEP_A, RESULT_A, STEP_B, RESULT_B = (f"slot-{n}-of-the-template" for n in range(1, 6))
SLOT = re.compile(r"\{(\w+)\}")
REWRITES = (
    "the model's chat template drops, repeats or rewrites what was said, so sampled tokens cannot "
    "be kept: use a template that only appends"
)
# A template may open a thought, or an empty one, before a step.
PREFILL = re.compile(r"<think>(\s*</think>)?\s*\Z")
# Templates that ask for today's date get this one. Otherwise a run that is resumed tomorrow would
# have other prompts.
FIXED_DATE = "{% macro strftime_now(format) %}01 Jan 2026{% endmacro %}"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # the model writes these itself


def is_mark(token: AddedToken) -> bool:
    """Whether an added token belongs to the template, so that no message may contain it."""
    special = token.special and token.content not in TAGS
    return special or bool(re.fullmatch(r"<\|.+\|>", token.content))


def render(messages: list[dict], tokenizer, prompt: bool) -> str:
    """The chat template's text. With `prompt` it ends where the assistant begins."""
    try:  # the template is a program, and it comes with the model
        template = FIXED_DATE + tokenizer.get_chat_template()
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
    except Exception as error:
        raise UserError(f"the model's chat template failed: {error}") from None


class ChatFormat:
    """The format of a chat model. `tokenizer`: a transformers tokenizer with a chat template.

    `ends`: the ids that the model's files declare as ends. Those of control tokens end a step too.
    Raises UserError if the template or the tokenizer does not allow a context that only grows.
    """

    def __init__(self, tokenizer, words: Words, tools: Sequence[Tool], ends: Collection = ()):
        fast = hasattr(tokenizer, "backend_tokenizer")  # from the tokenizers library
        if not fast or not getattr(tokenizer, "chat_template", None):
            raise UserError("the model has no fast tokenizer with a chat template: choose another")
        self.tokenizer = tokenizer
        self.words = words
        self.tools = tuple(tools)
        self._find_control_tokens()
        self._find_roles()
        self._find_turns(next(iter(words.prompts.values())), ends)
        self._frames = {role: self._find_frame(prompt) for role, prompt in words.prompts.items()}
        # The attempts at one question find the same documents, so they are cached.
        self.document = functools.lru_cache(256)(self.document)

    # ---- the template's structure, which is read once

    def _find_control_tokens(self) -> None:
        """Finds the ids of control tokens. No document and no note may contain one."""
        self._control = {
            token_id: token.content
            for token_id, token in self.tokenizer.added_tokens_decoder.items()
            if token.special or re.fullmatch(r"<.+>|\[.+\]", token.content)
        }
        tags = {text: token_id for token_id, text in self._control.items()}
        self._think_open = tags.get("<think>")
        self._think_close = tags.get("</think>")
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        # A training script may have saved these, and then every text would be cut or padded.
        state |= {"truncation": None, "padding": None}
        # The same tokenizer without marks: in text from outside a mark is ordinary text.
        self._plain = Tokenizer.from_str(json.dumps(state | {"added_tokens": []}))
        for token in state["added_tokens"]:
            token["special"] = is_mark(self.tokenizer.added_tokens_decoder[token["id"]])
        self._own = Tokenizer.from_str(json.dumps(state))
        self._own.encode_special_tokens = True  # as text

    def _find_roles(self) -> None:
        """Finds the roles that the template keeps word for word. The user speaks for the others."""
        content = 'a\n"probe"'  # Llama 3.1's template writes what a tool says as JSON

        def keeps(*messages) -> bool:
            try:
                return content in render(list(messages), self.tokenizer, True)
            except UserError:
                return False

        user = {"role": "user", "content": QUESTION}
        step = {"role": "assistant", "content": STEP_A}
        self._system_role = keeps({"role": "system", "content": content}, user)
        self._tool_role = keeps(user, step, {"role": "tool", "content": content})

    def _find_turns(self, prompt: Template, ends: Collection[int | None]) -> None:
        """Finds the ids between turns from two renderings: a question, and two tool rounds."""
        opening = self._open(prompt.system, SLOT.sub(QUESTION, prompt.user))
        before, after = self._render(opening, QUESTION)
        rounds = opening + self._round(STEP_A, RESULT_A) + self._round(STEP_B, RESULT_B)
        pieces = self._render(rounds, QUESTION, STEP_A, RESULT_A, STEP_B, RESULT_B)
        # A template may open a thought at the end of a piece, or not.
        steps = [PREFILL.sub("", piece) for piece in (after, pieces[1], pieces[3], pieces[5])]
        is_stable = before == pieces[0] and pieces[2] == pieces[4]
        if not is_stable or steps[0] != steps[1] or steps[2] != steps[3]:
            raise UserError(REWRITES)
        self._question_tail = self._template_ids(after)
        self._end, *self._result_head = self._template_ids(pieces[2])
        self._result_tail = self._template_ids(pieces[5])
        if self._end not in self._control or self._control.keys().isdisjoint(self._result_tail):
            raise UserError(
                "the model's chat template marks turns with plain text, so no step has an end and "
                "a document could speak for anybody: choose another model"
            )
        # A config may declare a default id, which in this tokenizer is an ordinary word.
        marks = [token_id for token_id in self._control if token_id in ends]
        stops = dict.fromkeys([self._end, self.tokenizer.eos_token_id, *marks])
        self.stop_ids = tuple(stop for stop in stops if stop is not None)

    def _find_frame(self, prompt: Template) -> tuple[list[str], list[list[int]]]:
        """The names of the slots in a role's prompt, and the pieces of ids around them."""
        names = SLOT.findall(prompt.user)
        probes = [f"slot-{name}-of-the-template" for name in names]
        user = SLOT.sub(r"slot-\1-of-the-template", prompt.user)
        pieces = self._render(self._open(prompt.system, user), *probes)
        return names, [self._template_ids(piece) for piece in pieces]

    def _open(self, system: str, user: str) -> list[dict]:
        if self._system_role:
            return [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return [{"role": "user", "content": f"{system}\n\n{user}"}]

    def _round(self, step: str, result: str) -> list[dict]:
        reply = {"role": "tool", "content": result}
        if not self._tool_role:
            reply = {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}
        return [{"role": "assistant", "content": step}, reply]

    def _render(self, messages: list[dict], *probes: str) -> list[str]:
        """The template's text, split at the probes."""
        text = render(messages, self.tokenizer, True)
        if any(text.count(probe) != 1 for probe in probes):
            raise UserError(REWRITES)
        return re.split("|".join(probes), text) if probes else [text]

    def _template_ids(self, text: str) -> list[int]:
        # The text already contains the special tokens.
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.text(ids) != text or self.text(self.encode("two words")) != "two words":
            raise UserError(
                "the model's tokenizer does not decode a text to what was encoded, so contexts "
                "cannot be joined from ids: choose a model with a byte-level tokenizer"
            )
        return ids

    # ---- text and ids

    def encode(self, text: str) -> list[int]:
        """The ids of a text from outside. A mark in it ("<|im_end|>" on a page) stays text."""
        text = text.encode("utf-8", "replace").decode("utf-8")  # pages may have lone surrogates
        # `encode_batch` frees Python's lock. With `encode`, long pages would block other threads.
        if len(text) < 2000:
            ids = self._plain.encode(text, add_special_tokens=False).ids
        else:
            ids = self._plain.encode_batch([text], add_special_tokens=False)[0].ids
        return [token_id for token_id in ids if token_id not in self._control]

    def encode_own(self, text: str) -> list[int]:
        """The ids of a text that the model itself says. Tags are tokens, and marks stay text."""
        return self._own.encode(text, add_special_tokens=False).ids

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _without_thoughts(self, tokens: list[int], opened: list[int]) -> list[int]:
        """`tokens` without thoughts. `opened`: the ids before them, which may open a thought."""
        speech = []
        thinking = False
        for position, token in enumerate([*opened, *tokens], -len(opened)):
            if token in (self._think_open, self._think_close):
                if token == self._think_close and not thinking:
                    speech = []  # the thought began before the tokens
                thinking = token == self._think_open
            elif not thinking and position >= 0:
                speech.append(token)
        return speech

    # ---- tasks.format.Format

    def prompt(self, role: str, **keywords) -> list[int]:
        """A role's first tokens. The keywords are those of its Template's `fill`."""
        contents = self.words.prompts[role].fill(**keywords)
        slots, (first, *pieces) = self._frames[role]
        ids = list(first)
        for slot, piece in zip(slots, pieces):
            content = contents[slot]
            ids += self.encode(content) if isinstance(content, str) else content
            ids += piece
        return ids

    def parse(self, tokens: list[int], *, final: bool = False) -> Action:
        """Parses a sampled step with or without stop token. `final`: an answer was demanded."""
        speech = self._without_thoughts(tokens, self._result_tail)
        while speech and speech[-1] in self.stop_ids:
            speech.pop()
        return read_action(self.text(speech), self.tools, purpose=self.words.purpose, final=final)

    def observation(self, notes: list[Sequence[int]], *, final: bool = False) -> list[int]:
        """The ids between a step's stop token and the next step: notes, as a tool result.

        `final` adds the demand to answer now. Without notes the result is the demand alone.
        """
        blocks = [note for note in notes if note]
        if final:
            blocks.append(self.encode(self.words.final))
        first, *others = blocks or [self.encode(self.words.no_note)]
        separator = self.encode("\n\n")
        joined = [token for block in others for token in (*separator, *block)]
        return [*self._result_head, *first, *joined, *self._result_tail]

    def message(self, text: str) -> list[int]:
        """A note in our own words: a correction, a tool's failure, "no results"."""
        return self.encode(text.strip())

    def close_step(self) -> list[int]:
        """The ids that end a step which was cut before its stop token. They carry no loss."""
        return [self._end]

    def document(self, document: Document) -> tuple[int, ...]:
        """One document as it is in a chunk: a header, the text, a blank line."""
        url = f"({document.url})" if document.url else ""
        header = " ".join(f"{DOCUMENT} {defuse(f'{document.title} {url}')}".split())
        lines = document.text.strip().splitlines()  # splits at every kind of line break
        text = "\n".join(map(defuse, lines))
        return tuple(self.encode(f"{header}\n{text}\n\n"))

    def note(self, tokens: list[int]) -> list[int]:
        """The sampled ids that other roles may read: no thoughts, no marks, no blank edges."""
        speech = self._without_thoughts(tokens, self._question_tail)
        note = [token for token in speech if token not in self._control]
        while note and not self.text(note[:1]).strip():
            note.pop(0)
        while note and not self.text(note[-1:]).strip():
            note.pop()
        return note
