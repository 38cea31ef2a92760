"""New weights over NCCL: from rank 0's host memory into vLLM servers, without a disk.

NOT RUN: no machine at hand has a trainer and a server on GPUs. It is written against the interface
that vLLM 0.32 documents, and its calls are checked against that package with NCCL itself left out.
It needs vLLM in the trainer's environment, and servers with
--weight-transfer-config '{"backend": "nccl"}'.

Rank 0 keeps the weights until the next sync, so a server that was started anew gets them again.
Every transfer has a process group of its own, because such a server is in no older one.

Tests: pytest tests/test_remote.py -k nccl
"""

import importlib.util
import socket
import threading
import urllib.parse
from dataclasses import dataclass, field

import torch
from torch import Tensor

from config import UserError
from sampler.servers import VLLM
from tools.web import seconds_left
from trainer.lora import merged_weights

MEMORY = "the trainer's memory"  # in the place of a folder
SENDING = threading.Lock()  # one transfer at a time uses the GPU's links


@dataclass(eq=False)
class NCCL(VLLM):
    """weights: what a load from `MEMORY` brings. device: rank 0's GPU, which sends them."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    device: torch.device | None = None

    def change_weights(self, folder, version, deadline):
        if folder != MEMORY:
            super().change_weights(folder, version, deadline)
            return
        if not self.weights:
            raise ValueError("it was started anew, and only rank 0 can bring it the weights")
        # Not a requirement of ours, so it is imported where it is used.
        from vllm.distributed.weight_transfer import (
            HTTPVLLMWeightSyncClient,
            WeightTransferTrainerFactory,
        )
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        workers = self.get("/get_world_size", deadline)["world_size"]
        with SENDING, torch.cuda.device(self.device):
            address, port = meeting_point(self.url)
            place = NCCLTrainerInitInfo(
                master_address=address, master_port=port, world_size=1 + workers, rank=0
            )
            client = HTTPVLLMWeightSyncClient(self.url, seconds_left(deadline))
            source = Source(self.weights, self.device)
            sender = WeightTransferTrainerFactory.trainer_init(place, client=client, source=source)
            sender.send_weights()
            client.shutdown_weight_transfer_engine()
            sender.shutdown()


def check(cuda: bool) -> None:
    """UserError unless this process could send."""
    if not cuda or importlib.util.find_spec("vllm") is None:
        raise UserError(
            "--engine vllm_nccl needs a GPU and the package vllm beside the trainer: give --engine "
            "vllm, which brings the weights by disk"
        )


def keep(servers: list[NCCL], model, dtype: torch.dtype, device: torch.device) -> str:
    """Takes a copy of the weights for the servers' next load; every rank must call it."""
    weights = merged_weights(model)  # empty on the other ranks
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    for server in servers:
        server.weights = weights
        server.device = device
    return MEMORY


class Source:
    """The weights in the order of their names' dict, as vLLM's WeightSource wants them."""

    def __init__(self, weights: dict[str, Tensor], device: torch.device):
        self.weights = weights
        self.device = device

    def metadata(self) -> list:
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, w.dtype, tuple(w.shape)) for name, w in self.weights.items()]

    def __iter__(self):
        for name, weight in self.weights.items():
            yield name, weight.to(self.device)


def meeting_point(url: str) -> tuple[str, int]:
    """An address of this machine that the server at `url` can reach, and a free port there."""
    parts = urllib.parse.urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # chooses a route and sends nothing
        address = probe.getsockname()[0]
    with socket.socket() as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]
