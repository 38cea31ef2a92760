"""A trajectory as one JSON line of rollouts/step_N.jsonl."""

from rollout import Context, Sample, Trajectory, Turn
from tasks.format import Format


def record(trajectory: Trajectory, chat: Format, step: int, split: str) -> dict:
    """The line of one trajectory; `split` is "train" or "eval"."""
    sample = trajectory.contexts[0].sample
    return {
        "step": step,
        "split": split,
        "question_id": trajectory.question.id,
        "question": trajectory.question.text,
        "gold": list(trajectory.question.golden_answers),
        "trajectory": trajectory.attempt,
        "answer": trajectory.answer,
        "ended": trajectory.ended,
        "reward": trajectory.reward,
        "advantage": sample.advantage,
        "trained": bool(sample.copies),
        "segments": segments(sample, chat),
        "turns": [turn_record(turn, chat) for turn in trajectory.turns],
    }


def segments(sample: Sample, chat: Format) -> list[dict]:
    """A sample's text, cut where it changes between given and sampled."""
    cut = []
    start = 0
    for end in range(1, len(sample.tokens) + 1):
        if end == len(sample.tokens) or sample.mask[end] != sample.mask[start]:
            text = chat.text(sample.tokens[start:end])
            cut.append({"text": text, "trained": sample.mask[start]})
            start = end
    return cut


def turn_record(turn: Turn, chat: Format) -> dict:
    """One turn, with the contexts that it opened."""
    documents = zip(turn.documents, turn.lengths)
    return {
        "text": chat.text(turn.sampled),
        "call": turn.action.call and vars(turn.action.call),
        "answer": turn.action.answer,
        "error": turn.problem,
        "seconds_tool": round(turn.seconds, 4),
        "documents": [{**vars(document), "tokens": length} for document, length in documents],
        "chunks": [reader_record(reader, chat) for reader in turn.readers],
    }


def reader_record(reader: Context, chat: Format) -> dict:
    """A context that a turn opened: what it was given and wrote, and its turns if any."""
    sample = reader.sample
    prompt = [*sample.mask, True].index(True)  # a reader whose server was lost wrote nothing
    made = {
        "role": reader.role,
        "prompt": chat.text(sample.tokens[:prompt]),
        "note": chat.text(sample.tokens[prompt:]),
        "note_tokens": len(sample.tokens) - prompt,
        "advantage": sample.advantage,
        "drawn": sample.copies,
    }
    if reader.chunk:
        made |= vars(reader.chunk)
    if reader.turns:
        made["turns"] = [turn_record(turn, chat) for turn in reader.turns]
    return made
