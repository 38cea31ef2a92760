"""Training on packed samples. `import trainer` gives every function that the training loop calls.

loading.py     loads a model, and decides whether its samples can be packed
batches.py     packs samples into micro-batches
prefixes.py    prefix sharing: a prefix of several samples goes through the model once
exchange.py    moves samples between ranks, so that all ranks have equal work
attention.py   attention within each sample of a packed row
policy.py      the model with the objective as its forward pass; DDP, FSDP2; backward
lora.py        LoRA adapters beside frozen weights
checkpoint.py  states on disk
memory.py      the memory plan of a process
"""

from trainer.batches import MicroBatch, make_micro_batch, micro_batches
from trainer.checkpoint import (
    FROZEN,
    keep_frozen,
    link_checkpoint,
    load_optimizer,
    newest,
    newest_model,
    remove_states,
    save,
    write_model,
)
from trainer.exchange import even_out
from trainer.loading import check_positions, load_model, load_shape
from trainer.lora import add_adapters, read_adapters, reference
from trainer.memory import memory_plan
from trainer.policy import (
    Policy,
    backward,
    clip_gradient,
    compiler_of,
    logprob,
    make_optimizer,
    parallel,
    schedule,
    score,
    unwrap,
)
