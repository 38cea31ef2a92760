"""How both roles speak: from text to token ids and from System 2's sampled ids to a step."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One tool call of System 2: (t_i, p_i) of the paper. `purpose` is what System 1 is told to look for."""
    tool: str
    argument: str
    purpose: str = ""


@dataclass(frozen=True)
class Step:
    """What one sampled step of System 2 turned out to be; exactly one of the three is set. `error` is one sentence
    that says what was wrong: it goes back to System 2 as the observation, and the run counts it as malformed."""
    call: Call | None = None
    answer: str | None = None
    error: str | None = None

    def __post_init__(self):
        if sum(field is not None for field in (self.call, self.answer, self.error)) != 1:
            raise ValueError("a Step is exactly one of: a call, an answer, an error")
