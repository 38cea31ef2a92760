"""A protocol of your own: System 2 drafts, System 1 reads the draft, System 2 answers.   python -m recipes.own_protocol"""
import sys

import mars
from plumbing.build import build
from config import from_command_line
from tasks.chat import Call, Step
from rollout import Sample, Trajectory, distil, reward, system2_step


async def draft_and_critique(setting, question, group, k):
    trajectory, talk = Trajectory(question, Sample("sys2", group, k)), setting.sampler.open()
    turn = await system2_step(setting, trajectory, talk, setting.format.system2_prompt(question.text), final=False)
    draft = setting.format.note(turn.sampled)               # its words, without the end-of-turn token
    turn.step, turn.lengths = Step(call=Call("critic", "", "what is wrong with this draft")), [len(draft)]
    notes = await distil(setting, trajectory, turn, [draft])
    end = await system2_step(setting, trajectory, talk, setting.format.observation(notes, final=True), final=True)
    setting.sampler.close(talk)
    trajectory.answer, trajectory.ended = end.step.answer, "answer"
    await reward(setting, trajectory)
    return trajectory


if __name__ == "__main__":
    run = build(from_command_line(sys.argv[1:]), training=True)
    run.episode = draft_and_critique                        # advantages, balance, loss and records stay as they are
    mars.train(run)
