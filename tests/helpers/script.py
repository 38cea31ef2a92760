"""A script in a sampler's place."""

from collections.abc import Callable
from types import SimpleNamespace

from driver import Driver
from rollout import Env, Trajectory
from sampler import Completion, Request
from tasks.format import Format
from tasks.grading import grader


class Script:
    """Stands in for a sampler: `say(tokens, seed)` is the text that follows these tokens."""

    busy = property(lambda self: bool(self.queue))

    def __init__(self, chat: Format, say: Callable[[list[int], int], str]):
        self.chat = chat
        self.say = say
        self.queue = []
        self.asked = []  # (the tokens that were given, limit, seed)
        self.opened = 0

    def play(self, method, config, question, tools, grade=None, attempt=0, **drawn) -> Trajectory:
        """One episode in which all roles speak by this script."""
        driver = Driver([self], deterministic=True)
        samplers = dict.fromkeys(method.roles, self)
        grade = grade or grader("em")
        env = Env(driver, samplers, self.chat, tools, grade, config, step=0, **drawn)
        try:
            (trajectory,) = driver.run([env.play(method, question, 0, attempt)])
        finally:
            assert self.opened == 0, "every context gives its pages back"
        return trajectory

    def open(self):
        self.opened += 1
        return SimpleNamespace(tokens=[])

    def close(self, conversation):
        self.opened -= 1

    def submit(self, conversation, tokens, *, max_new_tokens, seed, **options):
        conversation.tokens += tokens
        self.asked.append((list(tokens), max_new_tokens, seed))
        self.options = options
        text = self.say(conversation.tokens, seed)
        new = self.chat.tokenizer.encode(text, add_special_tokens=False)[:max_new_tokens]
        conversation.tokens += new
        finish = "stop" if new[-1] in self.chat.stop_ids else "length"
        logprobs = [-(index + 1) / 10 for index in range(len(new))]
        completion = Completion(new, logprobs, finish)
        self.queue.append(Request(conversation, tokens, max_new_tokens, completion=completion))
        return self.queue[-1]

    def step(self):
        done = self.queue
        self.queue = []
        return done
