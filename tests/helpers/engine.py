"""A stand-in for a serving engine: our own Sampler behind both engines' protocols, over loopback.

It takes seeds, so its draws are those of a Sampler in the process. As a program it can be killed:

    python tests/helpers/engine.py FOLDER PORT
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sampler import Sampler

LOADING = threading.Lock()  # transformers loads one model at a time


class Engine(ThreadingHTTPServer):
    """faults: a function of (handler, answer) or None, each used up by one request for a sample."""

    daemon_threads = True
    host = "127.0.0.1"
    request_queue_size = 512

    def __init__(self, folder, port: int = 0):
        self.folder = folder
        self.adapters = set()  # the names of those that are loaded
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.sampler = Sampler(self.model, max_tokens=32768)
        self.version = "default"
        self.loaded = []  # the folders of all reloads
        self.faults = []
        self.seen = []  # (path, body) of every request
        self.workers = []  # of a router: its servers
        self.lock = threading.Lock()
        self.resumed = threading.Event()
        self.resumed.set()
        super().__init__((self.host, port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        options = {"poll_interval": 0.01}
        threading.Thread(target=self.serve_forever, kwargs=options, daemon=True).start()

    def handle_error(self, *_):
        pass

    def stop(self):
        self.shutdown()
        self.server_close()

    def load(self, folder: str):
        with LOADING, self.lock:
            self.sampler.load_weights(AutoModelForCausalLM.from_pretrained(folder))
            self.loaded.append(folder)

    def load_adapters(self, name: str, folder: str):
        """Merges them into the model of the start, as PEFT defines them."""
        told = json.loads((Path(folder) / "adapter_config.json").read_text())
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        with LOADING, self.lock, torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(self.folder)
            for key, a in tensors.items():
                layer, which, _ = key.removeprefix("base_model.model.").rsplit(".", 2)
                if which == "lora_A":
                    b = tensors[key.replace("lora_A", "lora_B")]
                    scale = told["lora_alpha"] / told["r"]
                    model.get_submodule(layer).weight += scale * b @ a
            self.sampler.load_weights(model)
            self.adapters.add(name)
            self.loaded.append(folder)

    def sample(self, ids: list[int], **options):
        """Requests that are here at the same time share batches; a paused server keeps them."""
        self.resumed.wait()
        with self.lock:
            talk = self.sampler.open()
            request = self.sampler.submit(talk, ids, **options)
        while not request.done:
            with self.lock:
                self.sampler.step()
        with self.lock:
            self.sampler.close(talk)
        return request.completion


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        engine = self.server
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        path = self.path.partition("?")[0]
        engine.seen.append((path, body))
        adapter = body.get("lora_path", body.get("model", "toy"))
        if path in ("/v1/completions", "/generate") and adapter not in {"toy", *engine.adapters}:
            # vLLM's and SGLang's words for an adapter that they do not have
            return self.says({"error": "not found"}, 404 if "model" in body else 400)
        if path in ("/v1/completions", "/generate"):
            answer = self.completions(body) if path == "/v1/completions" else self.generate(body)
            with engine.lock:
                fault = engine.faults.pop(0) if engine.faults else None
            if fault:
                return fault(self, answer)
        elif path == "/workers" and engine.workers:
            answer = {"workers": [{"url": url} for url in engine.workers]}
        elif path == "/v1/models":
            answer = {"data": [{"id": "toy", "max_model_len": 512}]}
        elif path in ("/weight_info", "/model_info"):
            answer = {"weight_version": engine.version}
        elif path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            engine.load_adapters(body["lora_name"], body["lora_path"])
            return self.says("Success: it was added.")  # a sentence, no object
        elif path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            if body["lora_name"] not in engine.adapters:
                return self.says({"error": "not found"}, 404 if path.startswith("/v1") else 400)
            engine.adapters.remove(body["lora_name"])
            answer = {"success": True}
        elif path == "/collective_rpc":
            engine.load(body["kwargs"]["weights_path"])
            answer = {"results": [None]}
        elif path == "/update_weights_from_disk":
            engine.load(body["model_path"])
            engine.version = body["weight_version"]
            answer = {"success": True}
        elif path == "/update_weight_version":
            engine.version = body["new_version"]
            answer = {"success": True}
        elif path == "/get_world_size":
            answer = {"world_size": 2}
        elif path in ("/pause", "/resume"):
            change = engine.resumed.clear if path == "/pause" else engine.resumed.set
            change()
            answer = {"status": "done"}
        elif path in ("/reset_prefix_cache", "/flush_cache"):
            answer = {"success": True}
        else:
            return self.says({}, 404)
        self.says(answer)

    do_POST = do_GET

    def completions(self, body: dict) -> dict:
        """vLLM's."""
        names = ("temperature", "top_p", "seed")
        options = {name: body[name] for name in names}
        made = self.server.sample(
            body["prompt"],
            max_new_tokens=body["max_tokens"],
            stop_ids=body["stop_token_ids"],
            **options,
        )
        logprobs = {"token_logprobs": made.logprobs}
        choice = {"token_ids": made.tokens, "logprobs": logprobs}
        return {"choices": [choice | {"prompt_token_ids": body["prompt"]}]}

    def generate(self, body: dict) -> dict:
        """SGLang's."""
        given = body["sampling_params"]
        made = self.server.sample(
            body["input_ids"],
            max_new_tokens=given["max_new_tokens"],
            stop_ids=given["stop_token_ids"],
            temperature=given["temperature"],
            top_p=given["top_p"],
            seed=given["sampling_seed"],
        )
        drawn = [[logprob, token, None] for logprob, token in zip(made.logprobs, made.tokens)]
        about = {"output_token_logprobs": drawn, "weight_version": self.server.version}
        return {"meta_info": about | {"id": body["rid"]}}

    def says(self, answer: dict, status: int = 200, **headers):
        raw = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    Engine(sys.argv[1], int(sys.argv[2]))
    print("ready", flush=True)
    threading.Event().wait()
