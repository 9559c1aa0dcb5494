"""One run of llama.cpp (PyPI `xllamacpp`) on a memory-mapped GGUF file. Job on stdin, see `peer_common.py`."""

from typing import Any

from peer_common import Meter, PeerJob, serve


def run(job: PeerJob) -> dict[str, Any]:
    """Greedy tokens through the server object's streaming completions, in this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = job.path
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    params.n_ctx = job.context
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.threads
    params.fit_params = False
    params.warmup = False  # it would read the whole file before the clock starts, and no other peer does
    params.cache_ram_mib = 0
    params.verbosity = 0
    server = xllamacpp.Server(params)

    def generate(prompt: list[int], count: int, meter: Meter) -> None:
        def on_event(event: Any) -> bool:
            for part in event if isinstance(event, list) else [event]:
                if "error" in part:
                    raise RuntimeError(str(part["error"]))
                for choice in part.get("choices", []):
                    if logprobs := choice.get("logprobs"):
                        meter.token(*(entry["id"] for entry in logprobs["content"]))
            return False

        meter.start()
        request = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "logprobs": 1,  # the one place of a streamed event in which token ids stand
            "cache_prompt": False,
            "stream": True,
        }
        server.handle_completions(request, on_event)

    if job.warmup_tokens:
        generate(job.prompts[0], job.warmup_tokens, Meter())
    meter = Meter()
    for prompt in job.prompts:
        generate(prompt, job.max_new_tokens, meter)
    return meter.result()


if __name__ == "__main__":
    serve(run, ("xllamacpp",))
