"""The toy's little language: its vocabulary, and how both roles speak.

The language is word-level. System 2 speaks

    <s2> when was ada baker born ? <eot> <call> search ada baker <purpose> birth of ada baker <eot>
    <resp> ada baker born 1968 . none . <eot> <answer> 1968 <eot>

and System 1 sees `<s1> <doc> … <doc> … <purpose> birth of ada baker <eot>` and writes
`ada baker born 1968 . <eot>`, or `none . <eot>`.

`ToyFormat` is its tasks.format.Format; base_model.py makes the model that speaks it, imperfectly.
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
# The toy shows the question to System 2 only.
PROMPTS = {
    "sys2": "<s2> {question} <eot>",
    "sys1": "<s1> {chunk} <purpose> {purpose} <eot>",
}


def vocabulary() -> list[str]:
    """Every word of every world, after the control words. A word's place is its token id."""
    phrases = [*world.FILLER, *world.ASK.values(), *world.MENTIONS, world.AGE, world.EMPLOYER_OF]
    words = {word for phrase in phrases for word in phrase.split() if "{" not in word}
    words.update(world.FIRST_NAMES, world.LAST_NAMES, world.STEMS, world.SUFFIXES)
    words.update(world.CITIES, world.HOBBIES, world.PRODUCTS, world.TOPICS)
    words.update(world.YEARS, world.NUMBERS)
    words.update(world.VERBS.keys(), world.VERBS.values(), OWN_WORDS)
    return [*CONTROL, *sorted(words)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Lower-cases, splits at white space and punctuation, and looks each word up.

    A word outside the vocabulary becomes <unk>.
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
    """How the toy's roles speak. Every method gives token ids, or reads them."""

    def __init__(self, tokenizer, tools: Collection[str] = world.TOOLS):
        self.tokenizer = tokenizer
        self.tools = tuple(tools)
        self.control = {word: tokenizer.convert_tokens_to_ids(word) for word in CONTROL}
        self.eot = self.control["<eot>"]
        self.stop_ids = (self.eot,)
        # A cache, since attempts at one question find the same documents.
        self.document = functools.lru_cache(256)(self.document)

    # ---- text and ids

    def encode(self, text: str) -> list[int]:
        """The ids of text from outside; a control word in it becomes unknown words."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    # ---- what the roles are given

    def prompt(self, role: str, **slots: str | list[int]) -> list[int]:
        """A role's first context: its line of PROMPTS with the slots filled.

        A slot is text from outside or token ids; one that the role's line does not name is
        ignored. An empty purpose (--no-purpose) leaves its place empty.
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
        """`<resp> note note … <eot>`. `final` adds <answer>, so that only an answer can follow."""
        joined = [token for note in notes for token in note]
        wrapped = [self.control["<resp>"], *joined, self.eot]
        if final:
            wrapped.append(self.control["<answer>"])
        return wrapped

    def message(self, text: str) -> list[int]:
        """A note of ours: "none ." says that there are no results, "error" says all else."""
        return self.encode("none ." if text.startswith("no results") else "error")

    def close_step(self) -> list[int]:
        return [self.eot]

    # ---- what the roles say

    def parse(self, tokens: list[int], *, final: bool = False) -> Action:
        """One step of System 2. `final`: an answer was demanded, so <answer> was given already."""
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
        """What follows <answer>."""
        if not self.is_plain(words):
            return Action(error="the answer is empty or holds a control word")
        return Action(answer=" ".join(words))

    def read_call(self, words: list[str]) -> Action:
        """What follows <call>: a tool, its argument, and the purpose (Python needs none)."""
        if not words or words[0] not in self.tools:
            return Action(error=f"unknown tool; the tools are {', '.join(self.tools)}")
        tool, *rest = words
        split = rest.index("<purpose>") if "<purpose>" in rest else len(rest)
        argument, purpose = rest[:split], rest[split + 1 :]
        if not self.is_plain(argument):
            return Action(error="the query is empty or holds a control word")
        if tool != "python" and not self.is_plain(purpose):
            return Action(error="the purpose is missing or holds a control word")
        return Action(call=Call(tool, " ".join(argument), " ".join(purpose)))

    def is_plain(self, words: list[str]) -> bool:
        """Whether there are words, and none of them is a control word."""
        return bool(words) and not any(word in self.control for word in words)

    def note(self, tokens: list[int]) -> list[int]:
        """System 1's words without control words: it can neither speak for System 2 nor end it."""
        return [token for token in tokens if token not in self.control.values()]
