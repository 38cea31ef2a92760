"""How roles speak through a chat model's own template: prompts, calls, and what lies between turns.

`ChatFormat` is the form of tasks.format.Format for any model with a chat template and a byte-level
tokenizer; the toy has a format of its own. A method brings the wording (`Words`), this file the
form: the <answer> tag, the headers of documents, the blank line between two notes. The call is
Qwen's <tool_call> JSON with a third key, `purpose`, beside `name` and `arguments` (inside
`arguments` it is read too). The tools are described in the method's own system prompt and not
through the template's `tools` argument, because templates then demand their own call syntax,
without a purpose.

Ids are never re-encoded. The text around a tool result is found once, by comparing two
renderings of the model's template. After that a context only grows: prompt, sampled ids,
observation, sampled ids. A template that rewrites earlier turns is refused. The one thing that
it may do is to drop or add <think> blocks: thoughts stay in the context of the role that had
them, and are taken out of notes, both by id.

A step ends with the model's own end-of-turn token, sampled and trained like any other. Nothing
is cut off after a call, and a call with text after it is malformed.

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
    """A role's first messages; `user` names its slots as {slot}."""

    system: str
    user: str
    # The slots' contents, text or ids, from the keywords of ChatFormat.prompt.
    fill: Callable[..., dict[str, str | list[int]]]


@dataclass(frozen=True)
class Words:
    """A method's wording. The first role of `prompts` acts in turns."""

    prompts: dict[str, Template]
    final: str  # the demand to answer now
    no_note: str  # stands where the readers wrote nothing
    purpose: bool = True  # whether its calls must state one


# --------------------------------------------------------------------------- from text to an action

OPEN = re.compile(r"<tool_call>\s*")
TAG = re.compile(r"</?tool_call>")
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def read_action(
    text: str, tools: Sequence[Tool], *, purpose: bool = True, final: bool = False
) -> Action:
    """One step from its text, without thoughts. Whatever is wrong becomes Action.error."""
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
    """(what stands between each call's tags, the texts before, between and after the calls).

    A tag within a call's JSON is text. An opening tag with another one after it is only mentioned.
    """
    calls = []
    around = []
    rest = start = 0  # where the text around goes on, where the next tag is looked for
    while opening := OPEN.search(text, start):
        start = opening.end()
        if text.startswith("{", start):
            with contextlib.suppress(ValueError, RecursionError):  # read_call says what is wrong
                _, start = json.JSONDecoder(strict=False).raw_decode(text, start)
        following = TAG.search(text, start)
        if following and following[0] == "</tool_call>":
            calls.append(text[opening.end() : following.start()])
            start = following.end()
        if start > opening.end():
            around.append(text[rest : opening.start()])
            rest = start
    return calls, [*around, text[rest:]]


def read_call(body: str, tools: Sequence[Tool], purpose: bool) -> Action:
    """The JSON between the call tags. Its strings may hold raw line breaks: code often does."""
    try:
        call = json.loads(body, strict=False)
    except (ValueError, RecursionError) as error:
        return Action(error=f"The call is not valid JSON: {error}.")
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return Action(error='The call is no JSON object with "name" and an object "arguments".')
    name = call.get("name")
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        listed = ", ".join(tool.name for tool in tools)
        error = f"There is no tool named {json.dumps(name)[:100]}; the tools are: {listed}."
        return Action(error=error)
    argument = call["arguments"].get(tool.argument)
    why = call.get("purpose", call["arguments"].get("purpose"))
    if not is_text(argument):
        error = f'The tool {name} needs the argument "{tool.argument}", a text that is not empty.'
        return Action(error=error)
    if not purpose:
        return Action(call=Call(name, argument))
    if not is_text(why):
        error = 'The call needs a "purpose": a text that says what to find out from the result.'
        return Action(error=error)
    return Action(call=Call(name, argument, why.strip()))


def is_text(value) -> bool:
    """A text that says something, and that UTF-8 can send: JSON lets lone surrogates in."""
    if not isinstance(value, str) or not value.strip():
        return False
    return not re.search("[\ud800-\udfff]", value)


# --------------------------------------------------------------------------------------- the format

# A line before each document of a chunk, and one after the last. No document can write them.
DOCUMENT = "[document]"
END = "[end of the documents]"
FORGED = re.compile(r"\[(?=\s*(document|end\s+of\s+the\s+documents)\b)", re.IGNORECASE)


def unforged(line: str) -> str:
    """A stranger's line, in which what looks like a line of ours has another bracket.

    So no page can pass for two, or speak in the researcher's name.
    """
    normal = unicodedata.normalize("NFKC", line)  # as some tokenizers read it
    return FORGED.sub("(", normal) if FORGED.search(normal) else line


# Contents of probe messages. They are cut out of the rendered template again.
QUESTION, STEP_A, RESULT_A, STEP_B, RESULT_B = (f"slot-{n}-of-the-template" for n in range(1, 6))
SLOT = re.compile(r"\{(\w+)\}")
REWRITES = (
    "the model's chat template drops, repeats or rewrites what was said, so sampled tokens cannot "
    "be kept: use a template that only appends"
)
# How a template switches thinking before a step.
PREFILL = re.compile(r"<think>(\s*</think>)?\s*\Z")
# A template that asks for today's date gets this one, or a run that is resumed tomorrow would have
# other prompts.
FIXED_DATE = "{% macro strftime_now(format) %}01 Jan 2026{% endmacro %}"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # a model writes them itself


def is_mark(token: AddedToken) -> bool:
    """Whether a token beside the model's words is the template's: no message may bring it in."""
    special = token.special and token.content not in TAGS
    return special or bool(re.fullmatch(r"<\|.+\|>", token.content))


def rendered(messages: list[dict], tokenizer, prompt: bool) -> str:
    """The chat template's text; with `prompt` it ends where the assistant begins."""
    try:  # the template is a program from outside
        template = FIXED_DATE + tokenizer.get_chat_template()
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
    except Exception as error:
        raise UserError(f"the model's chat template failed: {error}") from None


class ChatFormat:
    """The format of a chat model. `tokenizer`: a transformers tokenizer with a chat template.

    `ends`: ids that the model's files declare as ends; those that are marks end a step as well.
    UserError when the template or the tokenizer cannot carry a context that only grows.
    """

    def __init__(self, tokenizer, words: Words, tools: Sequence[Tool], ends: Collection[int] = ()):
        fast = hasattr(tokenizer, "backend_tokenizer")  # of the tokenizers library
        if not fast or not getattr(tokenizer, "chat_template", None):
            raise UserError("the model has no fast tokenizer with a chat template: choose another")
        self.tokenizer = tokenizer
        self.words = words
        self.tools = tuple(tools)
        self._find_control_tokens(ends)
        self._find_roles()
        self._find_turns(next(iter(words.prompts.values())))
        self._frames = {role: self._find_frame(prompt) for role, prompt in words.prompts.items()}
        self._separator = self.encode("\n\n")
        self._final = self.encode(words.final)
        # A cache, since attempts at one question find the same documents.
        self.document = functools.lru_cache(256)(self.document)

    # ---- what the template does, found once

    def _find_control_tokens(self, ends: Collection[int]) -> None:
        """Ids that a template uses as marks: no document and no note may bring one in."""
        added = self.tokenizer.added_tokens_decoder
        # A config may hold the default of its kind, which is any word of this tokenizer.
        self._ends = [token_id for token_id in added if token_id in ends]
        self._control = {
            token_id: token.content
            for token_id, token in added.items()
            if token.special
            or token_id in self._ends
            or re.fullmatch(r"<.+>|\[.+\]", token.content)
        }
        self._marks = {token_id for token_id, token in added.items() if is_mark(token)}
        tags = {text: token_id for token_id, text in self._control.items()}
        self._think_open = tags.get("<think>")
        self._think_close = tags.get("</think>")
        whole = json.loads(self.tokenizer.backend_tokenizer.to_str())
        # Whoever trained with them may have saved them, and every text would be cut.
        whole |= {"truncation": None, "padding": None}
        # The same tokenizer without any mark: in text from outside a mark is a text like any other.
        self._plain = Tokenizer.from_str(json.dumps(whole | {"added_tokens": []}))
        for token in whole["added_tokens"]:
            token["special"] = is_mark(added[token["id"]])
        self._own = Tokenizer.from_str(json.dumps(whole))
        self._own.encode_special_tokens = True  # as text

    def _find_roles(self) -> None:
        """Lets the user speak for a role that the template refuses or whose words it changes."""
        said = f'{RESULT_A}\n"{RESULT_B}'  # Llama 3.1's writes a tool's as JSON

        def knows(*messages) -> bool:
            try:
                return said in rendered(list(messages), self.tokenizer, True)
            except UserError:
                return False

        user = {"role": "user", "content": QUESTION}
        step = {"role": "assistant", "content": STEP_A}
        self._system_role = knows({"role": "system", "content": said}, user)
        self._tool_role = knows(user, step, {"role": "tool", "content": said})

    def _find_turns(self, prompt: Template) -> None:
        """What lies between turns, from two renderings: a question, and two tool rounds."""
        opening = self._open(prompt.system, SLOT.sub(QUESTION, prompt.user))
        before, after = self._render(opening, QUESTION)
        rounds = opening + self._round(STEP_A, RESULT_A) + self._round(STEP_B, RESULT_B)
        pieces = self._render(rounds, QUESTION, STEP_A, RESULT_A, STEP_B, RESULT_B)
        # A template may open a thought at a piece's end, or leave that out.
        steps = [PREFILL.sub("", piece) for piece in (after, pieces[1], pieces[3], pieces[5])]
        same = before == pieces[0] and pieces[2] == pieces[4]
        if not same or steps[0] != steps[1] or steps[2] != steps[3]:
            raise UserError(REWRITES)
        self._question_tail = self._template_ids(after)
        self._end, *self._result_head = self._template_ids(pieces[2])
        self._result_tail = self._template_ids(pieces[5])
        if self._end not in self._control or self._control.keys().isdisjoint(self._result_tail):
            raise UserError(
                "the model's chat template marks turns with plain text, so no step has an end and "
                "a document could speak for anybody: choose another model"
            )
        stops = dict.fromkeys([self._end, self.tokenizer.eos_token_id, *self._ends])
        self.stop_ids = tuple(stop for stop in stops if stop is not None)

    def _find_frame(self, prompt: Template) -> tuple[list[str], list[list[int]]]:
        """The slots of a role's prompt, and the ids around them: one piece more than slots."""
        names = SLOT.findall(prompt.user)
        marks = [f"slot-{name}-of-the-template" for name in names]
        user = SLOT.sub(r"slot-\1-of-the-template", prompt.user)
        pieces = self._render(self._open(prompt.system, user), *marks)
        return names, [self._template_ids(piece) for piece in pieces]

    def _open(self, system: str, user: str) -> list[dict]:
        if self._system_role:
            return [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return [{"role": "user", "content": f"{system}\n\n{user}"}]

    def _round(self, step: str, result: str) -> list[dict]:
        reply = {"role": "tool", "content": result}
        if not self._tool_role:
            wrapped = f"<tool_response>\n{result}\n</tool_response>"
            reply = {"role": "user", "content": wrapped}
        return [{"role": "assistant", "content": step}, reply]

    def _render(self, messages: list[dict], *marks: str) -> list[str]:
        """The template's text, cut at the marks: one piece more than marks."""
        text = rendered(messages, self.tokenizer, True)
        if any(text.count(mark) != 1 for mark in marks):
            raise UserError(REWRITES)
        return re.split("|".join(marks), text) if marks else [text]

    def _template_ids(self, text: str) -> list[int]:
        # The template itself writes the special tokens.
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.text(ids) != text or self.text(self.encode("two words")) != "two words":
            raise UserError(
                "the model's tokenizer does not give back the text that it was given, so contexts "
                "cannot be joined from ids: choose a model with a byte-level tokenizer"
            )
        return ids

    # ---- text and ids

    def encode(self, text: str, *, own: bool = False) -> list[int]:
        """Text from outside to ids. A mark inside it ("<|im_end|>" on a web page) stays text.

        `own`: a text that the model itself is to say. Tags in it are tokens, where it has them.
        """
        coder = self._own if own else self._plain
        text = text.encode("utf-8", "replace").decode("utf-8")  # broken pages hold lone surrogates
        # `encode` holds Python's lock: with long pages others would wait for minutes a step.
        if len(text) < 2000:
            ids = coder.encode(text, add_special_tokens=False).ids
        else:
            ids = coder.encode_batch([text], add_special_tokens=False)[0].ids
        marks = self._marks if own else self._control
        return [token_id for token_id in ids if token_id not in marks]

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _without_thoughts(self, tokens: list[int], opened: list[int]) -> list[int]:
        """`tokens` without thoughts. `opened`: the ids before them, which may open one."""
        kept = []
        thinking = False
        for position, token in enumerate([*opened, *tokens], -len(opened)):
            if token in (self._think_open, self._think_close):
                if token == self._think_close and not thinking:
                    kept = []  # closed but never opened: all of it was thought
                thinking = token == self._think_open
            elif not thinking and position >= 0:
                kept.append(token)
        return kept

    # ---- tasks.format.Format

    def prompt(self, role: str, **keywords) -> list[int]:
        """A role's first tokens; the keywords are those of its Template's `fill`."""
        filled = self.words.prompts[role].fill(**keywords)
        slots, (first, *pieces) = self._frames[role]
        ids = list(first)
        for slot, piece in zip(slots, pieces):
            content = filled[slot]
            ids += self.encode(content) if isinstance(content, str) else content
            ids += piece
        return ids

    def parse(self, tokens: list[int], *, final: bool = False) -> Action:
        """One sampled step, stop token included or not. `final`: an answer had been demanded."""
        said = self._without_thoughts(tokens, self._result_tail)
        while said and said[-1] in self.stop_ids:
            said.pop()
        return read_action(self.text(said), self.tools, purpose=self.words.purpose, final=final)

    def observation(self, notes: list[Sequence[int]], *, final: bool = False) -> list[int]:
        """The ids between a step's stop token and the next step: notes, as a tool result.

        `final` adds the demand to answer now. Without any note it is the bare demand.
        """
        blocks = [note for note in notes if note]
        if final:
            blocks.append(self._final)
        first, *others = blocks or [self.encode(self.words.no_note)]
        joined = list(first)
        for block in others:
            joined += [*self._separator, *block]
        return self._result_head + joined + self._result_tail

    def message(self, text: str) -> list[int]:
        """A note in our own words: a correction, a tool's failure, "no results"."""
        return self.encode(text.strip())

    def close_step(self) -> list[int]:
        """The ids that end a step which was cut before its stop token: given, never trained."""
        return [self._end]

    def document(self, document: Document) -> tuple[int, ...]:
        """One document as it stands in a chunk: a header, the text, a blank line."""
        url = f"({document.url})" if document.url else ""
        header = " ".join(f"{DOCUMENT} {unforged(f'{document.title} {url}')}".split())
        lines = document.text.strip().splitlines()  # at every kind of line break
        text = "\n".join(map(unforged, lines))
        return tuple(self.encode(f"{header}\n{text}\n\n"))

    def note(self, tokens: list[int]) -> list[int]:
        """What others may read of sampled ids: all but thoughts, marks and blank edges."""
        said = self._without_thoughts(tokens, self._question_tail)
        note = [token for token in said if token not in self._control]
        while note and not self.text(note[:1]).strip():
            note.pop(0)
        while note and not self.text(note[-1:]).strip():
            note.pop()
        return note
