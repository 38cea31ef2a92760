"""Chat templates as models bring them, and a tokenizer trained on a few lines; no download."""

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import mars
from tasks.chat import ChatFormat
from tools import KNOWN, Tool

TOOLS = [Tool(name, *KNOWN[name], call=None) for name in KNOWN]

CHATML_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
LLAMA_MARKS = ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

QWEN25 = """{%- if messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Thoughts of the steps before the last user message are dropped; a step's own thoughts stay
# while its tool calls go on; the last step gets an empty thought.
QWEN3 = """{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n')
    if '</think>' in m.content else '' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}<|im_start|>assistant
{% if loop.index0 > ns.last and (thought or loop.last) %}<think>
{{ thought }}
</think>

{% endif %}{{ said }}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

ALWAYS_THINKING = QWEN25.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")

LLAMA = """<|begin|>{%- for m in messages %}<|start_header_id|>{{
    'ipython' if m.role == 'tool' else m.role }}\
<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{%- endfor %}{%- if add_generation_prompt %}<|start_header_id|>\
assistant\
<|end_header_id|>

{% endif %}"""

# Gemma-like: neither system nor tool role, strict alternation.
STRICT = """{%- for m in messages %}{%- if m.role != ['user', 'assistant'][loop.index0 % 2] %}\
{{ raise_exception('roles must alternate user/assistant') }}{%- endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CORPUS = [
    "Who founded the company that ada baker joined in 1968?",
    "the results of a tool call for a researcher",
    '{"name": "search", "arguments": {"query": "acro corp"}, "purpose": "birth year"}',
    "a b c 1 2 3 . , ? ! 4.5",
]


def tokenizer(template, marks=tuple(CHATML_MARKS), tags=tuple(TAGS), eos="<|endoftext|>", bos=None):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, show_progress=False)
    bpe.train_from_iterator(CORPUS * 4, trainer)
    bpe.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    if bos:  # Llama's puts one before whatever it encodes
        bpe.post_processor = processors.TemplateProcessing(
            f"{bos} $A", special_tokens=[(bos, bpe.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template, eos_token=eos)


def random_model(folder) -> None:
    """A chat model of 400 words whose weights are random."""
    words = tokenizer(QWEN25, eos="<|im_end|>")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape, **heads))
    for part in (model, words):
        part.save_pretrained(folder)


def chat_format(tokenizer, tools=TOOLS, **options):
    """The format as MARS words it; options are MARS's."""
    config = mars.MarsConfig(**{"question_in_system1": True, **options})
    return ChatFormat(tokenizer, mars.words(config, tools), tools)
