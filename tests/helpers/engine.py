"""A stand-in for a vLLM server: our own Sampler behind its protocol, over loopback.

It takes seeds, so its draws are those of a Sampler in the process.
"""

import threading

import torch
from loopback import Loopback, says
from transformers import AutoModelForCausalLM

from sampler import Sampler


class Engine(Loopback):
    """faults: a function of (handler, answer) or None, each used up by one request for a sample."""

    request_queue_size = 512
    lock = threading.Lock()  # of all engines: transformers loads one model at a time

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.sampler = Sampler(self.model, max_tokens=32768)
        self.version = "default"
        self.loaded = []  # the folders of all reloads
        self.faults = []
        super().__init__()

    @property
    def seen(self) -> list[tuple[str, dict]]:
        """(path, body) of every request."""
        return [(path.partition("?")[0], body) for _, path, _, body in self.requests]

    def load(self, folder: str):
        with self.lock:
            self.model = AutoModelForCausalLM.from_pretrained(folder)
            self.sampler.load_weights(self.model)
            self.loaded.append(folder)

    def sample(self, ids: list[int], **options):
        with self.lock:
            talk = self.sampler.open()
            request = self.sampler.submit(talk, ids, **options)
            while not request.done:
                self.sampler.step()
            self.sampler.close(talk)
        return request.completion

    @torch.no_grad()
    def score(self, ids: list[int]) -> list:
        """vLLM's prompt_logprobs."""
        with self.lock:
            logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        after = [{str(t): {"logprob": float(logprobs[i, t])}} for i, t in enumerate(ids[1:])]
        return [None, *after]

    def answer(self, handler, number, body):
        path = handler.path.partition("?")[0]
        answer = {"status": "done"}
        if path == "/v1/completions":
            answer = self.completions(body)
            with self.lock:
                probed = "prompt_logprobs" in body
                fault = self.faults.pop(0) if self.faults and not probed else None
            if fault:
                return fault(handler, answer)
        elif path == "/v1/models":
            answer = {"data": [{"id": "toy", "max_model_len": 512}]}
        elif path == "/weight_info":
            answer = {"weight_version": self.version}
        elif path == "/collective_rpc":
            self.load(body["kwargs"]["weights_path"])
            answer = {"results": [None]}
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        says(answer)(handler)

    def completions(self, body: dict) -> dict:
        """What vLLM answers to a prompt of token ids."""
        echo = {"prompt_token_ids": body["prompt"]}
        if "prompt_logprobs" in body:
            echo["prompt_logprobs"] = self.score(body["prompt"])
        completion = self.sample(
            body["prompt"],
            max_new_tokens=body["max_tokens"],
            stop_ids=body.get("stop_token_ids", ()),
            temperature=body["temperature"],
            top_p=body.get("top_p", 1.0),
            seed=body.get("seed", 0),
        )
        logprobs = {"token_logprobs": completion.logprobs}
        return {"choices": [{"token_ids": completion.tokens, "logprobs": logprobs} | echo]}
