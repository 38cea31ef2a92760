"""The toy's small language: its vocabulary, and how both roles speak.

The language is word-level. System 2 speaks

    <s2> when was ada baker born ? <eot> <call> search ada baker <purpose> birth of ada baker <eot>
    <resp> ada baker born 1968 . none . <eot> <answer> 1968 <eot>

and System 1 sees `<s1> <doc> … <doc> … <purpose> birth of ada baker <eot>` and writes
`ada baker born 1968 . <eot>`, or `none . <eot>`.

`ToyFormat` is its tasks.format.Format. base_model.py makes the model that speaks it, with faults.
Tests: pytest tests/test_toy.py
"""

import functools
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tasks.format import Action, Call
from tools import Document
from toy import world

CONTROL = tuple("<pad> <unk> <eot> <s2> <s1> <call> <purpose> <resp> <answer> <doc>".split())
OWN_WORDS = "search scholar python - none . error anything about of".split()
# System 1 does not see the question.
PROMPTS = {
    "sys2": "<s2> {question} <eot>",
    "sys1": "<s1> {chunk} <purpose> {purpose} <eot>",
}


def vocabulary() -> list[str]:
    """The control words, then every word of every world. A word's index is its token id."""
    phrases = [*world.FILLER, *world.ASK.values(), *world.MENTIONS, world.AGE, world.EMPLOYER_OF]
    words = {word for phrase in phrases for word in phrase.split() if "{" not in word}
    words.update(world.FIRST_NAMES, world.LAST_NAMES, world.STEMS, world.SUFFIXES)
    words.update(world.CITIES, world.HOBBIES, world.PRODUCTS, world.TOPICS)
    words.update(world.YEARS, world.NUMBERS)
    words.update(world.VERBS.keys(), world.VERBS.values(), OWN_WORDS)
    return [*CONTROL, *sorted(words)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer: lower case, split at white space and punctuation, one id for each word.

    Words outside the vocabulary become <unk>.
    """
    ids = {word: index for index, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(CONTROL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eot>",
        clean_up_tokenization_spaces=False,
    )


class ToyFormat:
    """How the toy's roles speak. Every method returns token ids or reads them."""

    def __init__(self, tokenizer, tools: Collection[str] = world.TOOLS):
        self.tokenizer = tokenizer
        self.tools = tuple(tools)
        self.control = {word: tokenizer.convert_tokens_to_ids(word) for word in CONTROL}
        self.eot = self.control["<eot>"]
        self.stop_ids = (self.eot,)
        # Cached, since the attempts at one question find the same documents.
        self.document = functools.lru_cache(256)(self.document)

    # ---- text and ids

    def encode(self, text: str) -> list[int]:
        """The ids of text from outside. A control word in it becomes unknown words."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    # ---- what the roles read

    def prompt(self, role: str, **slots: str | list[int]) -> list[int]:
        """A role's first prompt: its line of PROMPTS with the slots filled.

        A slot is text from outside or token ids. Slots that the line does not name are ignored.
        With --no-purpose the purpose is empty.
        """
        tokens = []
        for word in PROMPTS[role].split():
            if word in self.control:
                tokens.append(self.control[word])
                continue
            value = slots[word.strip("{}")]
            tokens += self.encode(value) if isinstance(value, str) else value
        return tokens

    def document(self, document: Document) -> tuple[int, ...]:
        return self.control["<doc>"], *self.encode(document.text)

    def observation(self, notes: list[Sequence[int]], *, final: bool = False) -> list[int]:
        """`<resp> note note … <eot>`. `final` adds <answer>, after which only an answer fits."""
        ids = [token for note in notes for token in note]
        tokens = [self.control["<resp>"], *ids, self.eot]
        if final:
            tokens.append(self.control["<answer>"])
        return tokens

    def message(self, text: str) -> list[int]:
        """The program's own message: "none ." if there are no results, else "error"."""
        return self.encode("none ." if text.startswith("no results") else "error")

    def close_step(self) -> list[int]:
        return [self.eot]

    # ---- what the roles write

    def parse(self, tokens: list[int], *, final: bool = False) -> Action:
        """One step of System 2. `final`: its prompt ended with <answer>, to demand an answer."""
        words = self.text(tokens).removesuffix("<eot>").split()
        if final:
            words = ["<answer>", *words]
        kind, *rest = words or [""]
        if kind == "<answer>":
            return self.read_answer(rest)
        if kind == "<call>":
            return self.read_call(rest)
        return Action(error="a step starts with <call> or <answer>")

    def read_answer(self, words: list[str]) -> Action:
        """The words after <answer>."""
        if not self.is_plain(words):
            return Action(error="the answer is empty or has a control word")
        return Action(answer=" ".join(words))

    def read_call(self, words: list[str]) -> Action:
        """The words after <call>: a tool, its argument, and the purpose (not for Python)."""
        if not words or words[0] not in self.tools:
            return Action(error=f"unknown tool; the tools are {', '.join(self.tools)}")
        tool, *rest = words
        split = rest.index("<purpose>") if "<purpose>" in rest else len(rest)
        argument, purpose = rest[:split], rest[split + 1 :]
        if not self.is_plain(argument):
            return Action(error="the query is empty or has a control word")
        if tool != "python" and not self.is_plain(purpose):
            return Action(error="the purpose is missing or has a control word")
        return Action(call=Call(tool, " ".join(argument), " ".join(purpose)))

    def is_plain(self, words: list[str]) -> bool:
        """Whether there are words, none of which is a control word."""
        return bool(words) and not any(word in self.control for word in words)

    def note(self, tokens: list[int]) -> list[int]:
        """System 1's words without control words, so that it cannot speak for System 2."""
        return [token for token in tokens if token not in self.control.values()]
