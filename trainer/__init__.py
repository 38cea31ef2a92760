"""The trainer's room. `import trainer` gives all that the loop needs:

loading.py     a model, and whether its samples can be packed
batches.py     samples -> micro-batches
prefixes.py    what samples begin with alike, only once
exchange.py    samples -> the ranks that train on them
attention.py   attention within samples that lie end to end
policy.py      the model with the objective as its forward pass; DDP, FSDP2; backward
lora.py        adapters beside frozen weights
checkpoint.py  states on disk
memory.py      what a process will hold
"""

from trainer.batches import MicroBatch, make_micro_batch, micro_batches
from trainer.checkpoint import (
    FROZEN,
    keep_frozen,
    link_checkpoint,
    load_optimizer,
    newest,
    newest_model,
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
    gradient_norm,
    logprob,
    make_optimizer,
    parallel,
    schedule,
    score,
    unwrap,
)
