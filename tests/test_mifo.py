"""MIFO: frozen entries stay, SFT learns from hard tokens, and from what rollouts missed."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.launch import launch
from helpers.samples import prepared, stock_scores
from helpers.tiny import OBJECTIVE
from safetensors.torch import load_file
from test_mars import metrics

import trainer
from config import UserError
from rollout import Trajectory
from siblings import mifo, mifo_toy, solo
from siblings.bvpo import BvpoConfig
from siblings.hanabi import HanabiConfig
from siblings.marsrl import MarsrlConfig
from siblings.matpo import MatpoConfig
from siblings.mifo import MifoConfig

TOKENIZER = mifo_toy.language.make_tokenizer()
CHAT = solo.Language(TOKENIZER)
TASKS = [mifo_toy.question("test", 0, i) for i in range(8)]


def test_the_teacher_gives_the_right_answer():
    for task in TASKS:
        action = CHAT.parse(TOKENIZER.convert_tokens_to_ids(task.solution.split()))
        assert action.answer == task.golden_answers[0]


def test_sft_is_the_mean_log_likelihood_of_the_hard_tokens():
    """A random model with the toy's words, as far as a phase of SFT needs a run."""
    torch.manual_seed(0)
    policy = trainer.Policy(mifo_toy.base_model.new_model(len(TOKENIZER)), bf16=False)
    config = MifoConfig(questions=8)
    run = SimpleNamespace(policy=policy, config=config, chat=CHAT, rank=0, ranks=1)
    solutions = [solo.written(CHAT, t, 0, 0, t.solution, 1.0).samples()[0] for t in TASKS]
    trajectories = mifo.taught(run, 3, TASKS)
    (samples,) = mifo.credit(config, trajectories, step=config.rl_steps).values()
    _, (batch,) = prepared(config, {solo.ROLE: samples}, policy)
    (stats,) = trainer.backward(policy, [batch], **OBJECTIVE)
    gap = (stats["logprob"] - batch.behaviour_logprob).abs()
    assert gap.max() < 1e-4, "the trainer's own log-probs are the old ones: rho is 1"
    found = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()

    scores = [stock_scores(policy, sample) for sample in solutions]
    logprobs, entropies = map(torch.cat, zip(*scores))
    (-logprobs[mifo.hardest(entropies, config.hard)].mean()).backward()
    for gradient, parameter in zip(found, policy.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)


def test_the_hardest_tokens_have_the_highest_entropy():
    entropy = torch.tensor([0.1, 3.0, 0.2, 2.0, 0.0])
    assert mifo.hardest(entropy, 0.4).tolist() == [False, True, False, True, False]
    assert mifo.hardest(entropy, 0.41).sum() == 3
    assert mifo.hardest(entropy, 1.0).all()


@pytest.mark.parametrize("threshold, places", [(0.0, [1]), (0.5, [0, 1]), (1.0, [0, 1, 2])])
def test_sft_shows_the_questions_that_rollouts_missed(threshold, places):
    """An attempt without a reward says nothing about its question."""
    rewards = {0: [0, 1], 1: [0, 0], 2: [1, 1]}
    played = [
        Trajectory(TASKS[place], place, attempt, reward=float(rewards[place][attempt]))
        for attempt in (0, 1)
        for place in rewards
    ]
    played += [Trajectory(TASKS[place], place, 2) for place in (0, 3)]
    assert mifo.missed(played, threshold) == [TASKS[place] for place in places]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.37, 1.0])
def test_the_frozen_parameters_are_the_share_that_moved_most(share):
    importance = torch.rand(1001, generator=torch.Generator().manual_seed(0))
    count = math.ceil(share * 1001)
    chosen, by_chance, none = (
        mifo.chosen_to_stay(importance, MifoConfig(freeze=how, frozen_share=share), seed=0)
        for how in ("moved", "random", "none")
    )
    assert chosen.sum() == by_chance.sum() == count and not none.any()
    if 0 < count < 1001:
        assert importance[chosen].min() >= importance[~chosen].max()
        assert not torch.equal(by_chance, chosen)


SMALL = "--steps 7 --rl_steps 2 --sft_steps 2 --questions 4 --group 2 --eval_questions 8"
SMALL += " --eval_every 4 --threshold 1 --lr 1e-2"


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Two runs: freeze -> (the run's folder, parameters and Phases at the start of each step)."""
    folder = tmp_path_factory.mktemp("mifo")
    seen = {}
    plain, attempts = mifo.rollouts, mifo.train.play_groups

    def rewarded(run, step):
        """The model is never right, so each second attempt gets the reward."""
        trajectories = attempts(run, step)
        for trajectory in trajectories:
            trajectory.reward = trajectory.samples()[0].reward = float(trajectory.attempt)
        return trajectories

    def noted(run, step, phases):
        trajectories = plain(run, step, phases)
        now = {"values": mifo.values(run.policy), "moments": bool(run.optimizer.state)}
        kept = SimpleNamespace(**vars(phases), **now)
        seen[run.config.freeze][1].append(kept)
        return trajectories

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(mifo_toy.build.keywords, "steps", (1, 1))  # it has hardly learned anything
        patch.setattr(mifo, "rollouts", noted)
        patch.setattr(mifo.train, "play_groups", rewarded)
        for freeze in ("moved", "none"):
            seen[freeze] = folder / "runs" / freeze, []
            line = [*SMALL.split(), "--freeze", freeze, "--name", freeze]
            assert mifo.main([*line, "--cache", str(folder), "--runs", str(folder / "runs")]) == 0
    return seen


def test_frozen_entries_stay_bit_for_bit_and_all_others_move(played):
    for freeze in ("moved", "none"):
        _, steps = played[freeze]
        assert [step.moments for step in steps[:6]] == [False, True] * 3, "each phase begins anew"
        first, second, after = steps[2], steps[3], steps[4]
        frozen = first.frozen
        assert frozen.float().mean() == pytest.approx(0.5 * (freeze == "moved"), abs=1e-5)
        assert (second.values - first.values).abs().max() < 2e-3, "it is SFT's rate, not RL's"
        for later in (second, after):
            assert torch.equal(later.values[frozen], first.values[frozen])
            assert (later.values[~frozen] != first.values[~frozen]).float().mean() > 0.9
        assert after.frozen is None and not torch.equal(steps[5].values, after.values)
    # What phases of RL moved adds up: C_i = α C_{i−1} + |Δ_i|
    _, steps = played["moved"]
    first = (steps[2].values - steps[0].values).abs()
    assert torch.equal(steps[2].importance, first)
    second = (steps[6].values - steps[4].values).abs()
    torch.testing.assert_close(steps[6].importance, 0.5 * first + second)


def test_arms_are_equal_up_to_sft_and_are_tabulated(played, tmp_path, capsys):
    told = {freeze: metrics(folder) for freeze, (folder, _) in played.items()}
    assert told["moved"][:2] == told["none"][:2] and told["moved"][4:] != told["none"][4:]
    assert mifo.main(["table", *(str(folder) for folder, _ in played.values())]) == 0
    assert capsys.readouterr().out.count("→") == 2 * 2
    (tmp_path / "metrics.jsonl").write_text('3\n{"step": 0}\n{"st')
    assert mifo.main(["table", str(tmp_path)]) == 2
    assert "has no evaluation of both kinds" in capsys.readouterr().err


def test_two_ranks_show_and_score_what_one_process_does(played, tmp_path, monkeypatch):
    """No answer is right, so RL changes nothing, and SFT shows what any rank missed."""
    folder, _ = played["moved"]
    line = [*SMALL.split(), "--steps", 2, "--rl_steps", 1, "--eval_questions", 2]
    line += ["--cache", folder.parent.parent, "--runs", tmp_path, "--name"]
    assert launch(__file__, *line, "two", log=tmp_path / "log") == 0
    monkeypatch.setitem(mifo_toy.build.keywords, "steps", (1, 1))
    assert mifo.main([*map(str, line), "one"]) == 0
    one, two = (
        load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("one", "two")
    )
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=2e-4)


REFUSED = [{"resume": True}, {"data": "nq"}, {"loss_mean": "token"}, {"temperature": 2.0}]
REFUSED += [{"inner_steps": 2}, {"lora_rank": 1}]


REFUSED = [(MifoConfig, given) for given in REFUSED]
REFUSED += [(BvpoConfig, {"group": 4}), (BvpoConfig, {"advantage": "mean"})]
REFUSED += [(MatpoConfig, {"format_share": 0.1, "resample": 1})]
REFUSED += [(HanabiConfig, {"grader": "judge"}), (MarsrlConfig, {"tools": "search"})]


@pytest.mark.parametrize("config, given", REFUSED, ids=str)
def test_what_would_be_trained_wrongly_or_ignored_is_refused(config, given):
    with pytest.raises(UserError, match="this method needs|leave (--data|it) out") as refusal:
        config(**given).check(training=True)
    assert "False" not in str(refusal.value)  # --no-resume, not --resume False


@pytest.mark.parametrize("name", ["rl_steps", "sft_steps", "threshold", "history"])
def test_an_evaluation_takes_no_option_of_training(name, capsys):
    assert mifo.main(["eval", "runs/mifo", f"--{name}", "1"]) == 2
    assert f"does not read --{name}" in capsys.readouterr().err


if __name__ == "__main__":
    mifo_toy.build.keywords["steps"] = (1, 1)
    sys.exit(mifo.main(sys.argv[1:]))
