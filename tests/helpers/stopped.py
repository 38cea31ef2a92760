"""A command up to the point where it would load a model."""

import pytest

import train
from plumbing import evaluation, models, outside


class Reached(Exception):
    """Raised there, with the command's options."""


def stop(*given, **more):
    (config,) = [x for x in given if hasattr(x, "bf16")]
    raise Reached(config)


def options_of(program, arguments: list[str]):
    """The options that reach that point. Nothing outside the process is used."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Reached) as reached:
        patch.setattr(train, "build", stop)
        patch.setattr(evaluation, "build", stop)
        patch.setattr(models, "find", lambda name, cache: name)
        patch.setattr(outside, "environment", lambda *given, **more: None)
        program(arguments)
    return reached.value.args[0]
