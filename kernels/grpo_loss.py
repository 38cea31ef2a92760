"""Token-level GRPO loss on given log-probs: the formula and its plain form are `grpo.grpo_loss`."""
import grpo

reference = grpo.grpo_loss


def grpo_loss(logprob, old_logprob, advantage, weight, **options):
    """See `reference`."""
    return reference(logprob, old_logprob, advantage, weight, **options)
