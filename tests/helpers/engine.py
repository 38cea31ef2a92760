"""A stand-in for a vLLM server: our own Sampler behind its protocol, over loopback.

It takes seeds, so its draws are those of a Sampler in the process.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM

from sampler import Sampler

LOADING = threading.Lock()  # transformers loads one model at a time


class Engine(ThreadingHTTPServer):
    """faults: a function of (handler, answer) or None, each used up by one request for a sample.

    odd: path -> what is said there instead of its answer, or the status of a refusal.
    """

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, folder):
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.sampler = Sampler(self.model, max_tokens=32768)
        self.version = "default"
        self.loaded = []  # the folders of all reloads
        self.faults = []
        self.odd = {}
        self.seen = []  # (path, body) of every request
        self.lock = threading.Lock()
        self.resumed = threading.Event()
        self.resumed.set()
        super().__init__(("127.0.0.1", 0), Handler)
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
            self.model = AutoModelForCausalLM.from_pretrained(folder)
            self.sampler.load_weights(self.model)
            self.loaded.append(folder)

    def start_anew(self):
        """It holds what it was started with, and nobody is told."""
        with LOADING, self.lock:
            self.sampler.load_weights(AutoModelForCausalLM.from_pretrained(self.folder))
            self.version = "default"

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

    @torch.no_grad()
    def score(self, ids: list[int]) -> list:
        """vLLM's prompt_logprobs."""
        with self.lock:
            logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        after = [{str(t): {"logprob": float(logprobs[i, t])}} for i, t in enumerate(ids[1:])]
        return [None, *after]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        engine = self.server
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        path = self.path.partition("?")[0]
        engine.seen.append((path, body))
        if path in engine.odd:
            said = engine.odd[path]
            return self.says({}, said) if isinstance(said, int) else self.says(said)
        answer = {"status": "done"}
        if path == "/v1/completions":
            answer = self.completions(body)
            with engine.lock:
                probed = "prompt_logprobs" in body
                fault = engine.faults.pop(0) if engine.faults and not probed else None
            if fault:
                return fault(self, answer)
        elif path == "/v1/models":
            answer = {"data": [{"id": "toy", "max_model_len": 512}]}
        elif path == "/weight_info":
            answer = {"weight_version": engine.version}
        elif path == "/collective_rpc":
            engine.load(body["kwargs"]["weights_path"])
            answer = {"results": [None]}
        elif path == "/update_weight_version":
            engine.version = body["new_version"]
        elif path == "/pause":
            engine.resumed.clear()
        elif path == "/resume":
            engine.resumed.set()
        elif path != "/reset_prefix_cache":
            return self.says({}, 404)
        self.says(answer)

    do_POST = do_GET

    def completions(self, body: dict) -> dict:
        """What vLLM answers to a prompt of token ids."""
        told = {"prompt_token_ids": body["prompt"]}
        if "prompt_logprobs" in body:
            told["prompt_logprobs"] = self.server.score(body["prompt"])
        made = self.server.sample(
            body["prompt"],
            max_new_tokens=body["max_tokens"],
            stop_ids=body.get("stop_token_ids", ()),
            temperature=body["temperature"],
            top_p=body.get("top_p", 1.0),
            seed=body.get("seed", 0),
        )
        drawn = {"token_ids": made.tokens, "logprobs": {"token_logprobs": made.logprobs}}
        return {"choices": [drawn | told]}

    def says(self, answer, status: int = 200):
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass
