"""A method of your own: a writer drafts, a critic reads the draft, the writer answers.

    python -m recipes.own_protocol

It has MARS's options and words, so it runs on the toy, whose model has never learned to draft.
"""

import dataclasses
import sys

import mars
import train
from rollout import Context, Env, Trajectory


async def draft_and_critique(env: Env, trajectory: Trajectory) -> None:
    """Three samples: a draft, a note on the draft, and an answer after reading the note."""
    question = trajectory.question.text
    async with Context(env, trajectory, "sys2") as writer:
        prompt = env.chat.prompt("sys2", question=question)
        turn = await mars.act(env, writer, mars.Prompt(prompt))
        async with Context(env, trajectory, "sys1") as critic:
            turn.readers.append(critic)
            draft = env.chat.note(turn.sampled)  # without the end-of-turn token
            task = "what is wrong with this draft"
            prompt = env.chat.prompt("sys1", chunk=draft, purpose=task, question=question)
            note = await critic.write(prompt, env.config.sys1_response)
        prompt = env.chat.observation([env.chat.note(note.tokens)], final=True)
        close = env.chat.close_step()
        if turn.sampled[-1:] != close:  # the draft was cut
            prompt = close + prompt
        last = await mars.act(env, writer, mars.Prompt(prompt, must_answer=True))
    trajectory.answer = last.action.answer
    trajectory.ended = "answer on demand" if last.action.answer else "no answer"


# Credit, loss, records and pages are those of MARS.
METHOD = dataclasses.replace(
    mars.METHOD,
    name="draft-and-critique",
    roles={"sys2": "Writer", "sys1": "Critic"},
    episode=draft_and_critique,
)

if __name__ == "__main__":
    sys.exit(train.main(METHOD, sys.argv[1:], __doc__))
