"""All that is alive in a run, and its rollouts."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from config import Config
from driver import Driver
from plumbing.files import Claim
from plumbing.tracker import Tracker
from rollout import Env, Method, Trajectory, ignore
from sampler import Sampler
from sampler.remote import Remote
from tasks.format import Format
from tasks.questions import Question
from tools import Tool


@dataclass
class Run:
    """All that is alive in a run. Ranks hold equal weights and share out the questions."""

    method: Method
    config: Config
    folder: Path
    device: torch.device
    rank: int
    ranks: int
    start: Path | str  # the model that it begins with
    tokenizer: object
    chat: Format
    driver: Driver
    sampler: Sampler | Remote  # plays every role whose weights are trained
    samplers: dict[str, Sampler | Remote]  # role -> who plays it
    grade: Callable[[Question, str], float]
    tools: list[Tool]
    eval_tools: list[Tool]  # the toy's held-out world has a corpus of its own
    # The i-th training question, for every i; None unless training.
    question: Callable[[int], Question] | None
    eval_questions: list[Question]
    # These three are there in training only; the reference only if there is a KL term.
    policy: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    reference: Callable | None = None  # what trainer.logprob takes
    skipped: int = 0  # updates in a row without a finite gradient
    tracker: Tracker | None = None  # on rank 0 of a run with --track
    claim: Claim | None = None  # keeps other processes out of the folder, to the end

    def rollouts(
        self,
        batch: list[tuple[int, Question]],
        attempts: int,
        *,
        step: int | str,
        tools: list[Tool],
        temperature: float = 1.0,
        top_p: float = 1.0,
        on_event: Callable[[str, str], None] = ignore,
    ) -> list[Trajectory]:
        """`attempts` trajectories for each (place, question), all in one running batch."""
        env = Env(
            driver=self.driver,
            samplers=self.samplers,
            chat=self.chat,
            tools={tool.name: tool.call for tool in tools},
            grade=self.grade,
            config=self.config,
            step=step,
            temperature=temperature,
            top_p=top_p,
            on_event=on_event,
        )
        episodes = [
            env.play(self.method, question, place, attempt)
            for place, question in batch
            for attempt in range(attempts)
        ]
        if self.rank or on_event is not ignore or not sys.stderr.isatty():
            return self.driver.run(episodes)
        bar = tqdm(total=len(episodes), desc=f"rollouts {step}", unit="trajectory", leave=False)
        with bar:
            return self.driver.run(episodes, self.show_progress(bar))

    def show_progress(self, bar: tqdm) -> Callable[[int], None]:
        """A function that shows on the bar how many episodes are done and what the sampler does."""
        stats = self.sampler.stats
        start = time.perf_counter()
        before = stats["decoded_tokens"]

        def show(done: int) -> None:
            rate = (stats["decoded_tokens"] - before) / (time.perf_counter() - start)
            shown = {name: stats[name] for name in ("running", "waiting", "pages_in_use")}
            bar.set_postfix({"tokens/s": f"{rate:.0f}", **shown}, refresh=False)
            bar.update(done - bar.n)

        return show
