"""Serves a model to many clients: continuous batching of independent streams over HTTP, with text streamed back.

    python examples/serve.py MODEL --rows 32 --prefix "You are a helpful assistant."
    curl -N localhost:8000 -d '{"prompt": "Once upon a time", "tokens": 100}'

    python examples/serve.py 16x2048:path-fox --load 1 8 32 64     # a load test, of random weights and tokens
    python examples/serve.py 16x2048:llama --load 1 8 32 64        # the same with a Llama in `transformers serve`

MODEL is a folder with a model and its tokenizer, or LAYERSxWIDTH:ENCODING. One thread owns the model: it admits
requests to free rows of the batch, decodes all rows together, and sends each stream its tokens. A row is free again
when its stream has ended. Waiting prompts are prefilled together, as one batch; or one after another with a shared
prefix, which is computed once and forked.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import deadreckon as dr
from deadreckon.models.streams import Streams, fork

END = -1  # after the last token of a stream
READ = 1 << 14  # tokens that are read at a time, at most, where there is more than one prompt: others wait for it


@dataclass(eq=False)
class Request:
    """A prompt, and a queue of generated tokens, `END` at last."""

    prompt: list[int]
    tokens: int
    answers: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    left: int = 0
    cancelled: bool = False

    def __iter__(self) -> Iterator[int]:
        return iter(self.answers.get, END)


class Server:
    """Decodes submitted requests in a thread of its own.

    Args:
        model: in evaluation mode.
        rows: number of streams decoded at a time; others wait.
        prefix: tokens that every prompt begins with, and that requests leave out.
        choose: logits (rows, vocabulary) -> tokens (rows,); greedy by default.
    """

    def __init__(
        self,
        model: dr.DeadReckonForCausalLM,
        rows: int,
        prefix: list[int] | None = None,
        choose: Callable[[Tensor], Tensor] = lambda logits: logits.argmax(-1),
    ) -> None:
        self.model, self.choose, self.streams = model, choose, Streams(model, rows)
        self.prefix = DynamicCache(config=model.config) if prefix else None
        if prefix and self.prefix is not None:
            self._logits(prefix, self.prefix)
        end = model.config.eos_token_id
        self.ends = set(end if isinstance(end, list) else [end])
        self.next = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self.running: dict[int, Request] = {}
        self.unfinished, self.ended = set[Request](), False
        self.waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def submit(self, prompt: list[int], tokens: int) -> Request:
        """Queues a request for at most so many tokens."""
        if not prompt or tokens < 1:
            raise ValueError(f"prompt, tokens: expected at least one token each, got {len(prompt)} and {tokens}")
        known = self.model.config.vocab_size
        if strangers := [token for token in prompt if not 0 <= token < known]:
            raise ValueError(f"prompt: expected tokens below {known}, the vocabulary's, got {strangers[0]}")
        request = Request(prompt, tokens, left=tokens)
        self.unfinished.add(request)
        self.waiting.put(request)
        if self.ended:  # closed, or the thread has failed
            request.answers.put(END)
        return request

    def close(self) -> None:
        """Ends all streams, and the thread."""
        self.waiting.put(None)
        self.thread.join()

    @torch.no_grad()
    def _logits(self, ids: list[int], cache: DynamicCache) -> Tensor:
        tokens = torch.tensor([ids], device=self.model.device)
        return self.model(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1]

    def _run(self) -> None:
        try:
            while (asked := self._asked()) is not None:
                while asked:
                    count = self._together(asked)
                    self._admit(asked[:count])
                    del asked[:count]
                if self.running:
                    self._step()
            for row in list(self.running):
                self._end(row)
        finally:  # whatever happened, nobody waits for ever
            self.ended = True
            for request in list(self.unfinished):
                request.answers.put(END)

    def _asked(self) -> list[Request] | None:
        """Requests for the free rows. Waits for one if nothing else is to be done; None when the server closes."""
        asked = list[Request]()
        while len(asked) < len(self.streams.free) and not (self.waiting.empty() and (asked or self.running)):
            request = self.waiting.get()
            if request is None:
                return None
            asked.append(request)
        return asked

    def _together(self, asked: list[Request]) -> int:
        """How many of them to prefill in one batch."""
        longest = 0
        for count, request in enumerate(asked):
            longest = max(longest, len(request.prompt))
            if count and (self.prefix is not None or (count + 1) * longest > READ):
                return count
        return len(asked)

    def _admit(self, requests: list[Request]) -> None:
        if self.prefix is None:
            rows, logits = self.streams.read([request.prompt for request in requests])
        else:
            cache = fork(self.prefix)
            logits = self._logits(requests[0].prompt, cache)
            rows = self.streams.admit(cache)
        first = self.choose(logits)
        self.next[rows] = first
        for row, request, token in zip(rows, requests, first.tolist(), strict=True):
            self.running[row] = request
            self._hand_over(row, token)

    @torch.no_grad()
    def _step(self) -> None:
        self.next.copy_(self.choose(self.streams.step(self.next)))
        tokens = self.next.tolist()
        for row in list(self.running):
            self._hand_over(row, tokens[row])

    def _hand_over(self, row: int, token: int) -> None:
        request = self.running[row]
        request.answers.put(token)
        request.left -= 1
        if token in self.ends or not request.left or request.cancelled:
            self._end(row)

    def _end(self, row: int) -> None:
        self.streams.drop(row)
        request = self.running.pop(row)
        self.unfinished.discard(request)
        request.answers.put(END)


class Rival:
    """Continuous batching of `transformers`, as in `transformers serve`, for models that are not ours.

    Args:
        model: in evaluation mode.
        tokens: capacity of its KV cache.
    """

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        sizes = ContinuousBatchingConfig(max_batch_tokens=min(tokens, READ // 2))
        page = getattr(sizes, "page_size", None) or sizes.block_size  # as older versions of transformers call it
        sizes.num_blocks = -(-tokens // page)
        self.manager = model.init_continuous_batching(GenerationConfig(do_sample=False, eos_token_id=-1), sizes)
        self.requests: dict[str, Request] = {}
        self.manager.start()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: list[int], tokens: int) -> Request:
        """Queues a request for so many tokens."""
        if not self.manager.is_running():
            raise RuntimeError("the thread that decodes has failed")
        request = Request(prompt, tokens, left=tokens)
        name = str(id(request))
        self.requests[name] = request
        self.manager.add_request(prompt, name, max_new_tokens=tokens, streaming=True)
        return request

    def close(self) -> None:
        """Ends the thread that decodes."""
        self.manager.stop(block=False)

    def _run(self) -> None:
        for result in self.manager:
            request = self.requests[result.request_id]
            for token in result.generated_tokens[request.tokens - request.left :]:
                request.answers.put(token)
                request.left -= 1
            if result.is_finished() or result.error is not None:
                request.answers.put(END)
        for request in list(self.requests.values()):  # nobody waits for ever
            request.answers.put(END)


def text_of(request: Request, tokenizer: Any) -> Iterator[str]:
    """The text of a stream as it comes; characters of several tokens come when they are whole."""
    tokens, sent = list[int](), ""
    for token in request:
        tokens.append(token)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}") and len(text) > len(sent):
            yield text[len(sent) :]
            sent = text


def serve(server: Server, tokenizer: Any, port: int) -> None:
    """POST {"prompt": text, "tokens": number} -> the text, streamed."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                request = server.submit(tokenizer(asked["prompt"])["input_ids"], int(asked.get("tokens", 256)))
            except (ValueError, KeyError, TypeError) as error:
                self.send_error(400, f"expected {{'prompt': text, 'tokens': number}}: {error}")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.end_headers()
            try:
                for text in text_of(request, tokenizer):
                    self.wfile.write(text.encode())
                    self.wfile.flush()
            except OSError:  # the client has left
                request.cancelled = True

    print(f"http://localhost:{port}", flush=True)
    ThreadingHTTPServer(("localhost", port), Handler).serve_forever()


def load_test(model: PreTrainedModel, clients: list[int], prompt: int, tokens: int) -> None:
    """Tokens per second and time to first token of clients with two requests each, against `generate()` one by one."""
    torch.manual_seed(0)

    def draw(count: int) -> list[list[int]]:
        return torch.randint(1, model.config.vocab_size, (count, prompt)).tolist()

    def generated(ids: list[int]) -> float:
        began = time.perf_counter()
        found = model.generate(
            torch.tensor([ids], device=model.device), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        found.tolist()
        return time.perf_counter() - began

    alone = min(generated(ids) for ids in draw(3))  # the first compiles
    print(f"generate() one by one: {tokens / alone:,.0f} tokens/s", flush=True)
    print("| clients | tokens/s | × | time to first token, median | worst |\n|---:|---:|---:|---:|---:|", flush=True)
    ours = isinstance(model, dr.DeadReckonForCausalLM)
    rival = None if ours else Rival(model, max(clients) * (prompt + tokens + 256))  # and what pages leave empty
    for count in clients:
        server = rival or Server(model, count)
        list(server.submit(*draw(1), 3))  # compiles and captures
        waits, asked = list[float](), draw(2 * count)  # new ones, for servers that remember prompts

        def client(number: int, server: Any = server, waits: list[float] = waits, asked: Any = asked) -> None:
            for ids in asked[2 * number : 2 * number + 2]:
                began = time.perf_counter()
                answers = iter(server.submit(ids, tokens))
                next(answers)
                waits.append(time.perf_counter() - began)
                assert sum(1 for _ in answers) == tokens - 1

        threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        speed = 2 * count * tokens / (time.perf_counter() - began)
        if server is not rival:
            server.close()
        median, worst = 1e3 * statistics.median(waits), 1e3 * max(waits)
        print(
            f"| {count} | {speed:,.0f} | {speed * alone / tokens:.2f} | {median:.0f} ms | {worst:.0f} ms |", flush=True
        )
    if rival is not None:
        rival.close()


def random_model(text: str, device: str) -> PreTrainedModel:
    """A random model LAYERSxWIDTH:ENCODING, or a Llama: heads of 64 channels, four query heads per key head (GQA)."""
    size, _, encoding = text.partition(":")
    layers, width = map(int, size.split("x"))
    heads = max(1, width // 64)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads // 4 or 1}
    config = dr.DeadReckonConfig(
        encoding=encoding if encoding != "llama" else "rope", num_hidden_layers=layers, hidden_size=width, **sizes
    )
    torch.manual_seed(0)
    with torch.device(device):
        if encoding != "llama":
            return dr.DeadReckonForCausalLM(config).eval()
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size, hidden_size=width, intermediate_size=config.intermediate_size,
                num_hidden_layers=layers, attn_implementation="sdpa", **sizes,
            )
        ).eval()  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or LAYERSxWIDTH:ENCODING for random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=32, help="streams at a time")
    parser.add_argument("--prefix", default="", help="text that every prompt begins with")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--load", type=int, nargs="+", help="a load test with so many clients, in place of a server")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt of the load test")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer of the load test")
    flags = parser.parse_args()
    made = ":" in flags.model
    model = random_model(flags.model, flags.device) if made else AutoModelForCausalLM.from_pretrained(flags.model)
    model = model.eval().to(flags.device, torch.bfloat16 if flags.device == "cuda" else torch.float32)
    if flags.load:
        load_test(model, flags.load, flags.prompt, flags.tokens)
        return
    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    prefix = tokenizer(flags.prefix)["input_ids"] if flags.prefix else None
    serve(Server(model, flags.rows, prefix), tokenizer, flags.port)


if __name__ == "__main__":
    main()
