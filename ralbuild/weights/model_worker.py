"""Loads a model with transformers: a program of its own, the builder's only door to torch and transformers.

`ralbuild.weights.child` starts it with an order on standard input; the answer is one JSON object on
standard output. Nothing is fetched, and no code of a model folder is run: ``trust_remote_code`` stays
off, only safetensors are read, and the folder was verified before.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Read the order, carry it out, answer."""
    order = json.load(sys.stdin.buffer)
    answer_to = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        answer = convert(**order) if order.pop("order") == "convert" else generate(**order)
    json.dump(answer, answer_to)


def convert(gguf: str, out: str) -> dict[str, Any]:
    """Dequantise a GGUF file to a folder of bfloat16 safetensors with tokenizer, template and config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(Path(gguf).parent), Path(gguf).name
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.name_or_path = ""  # where the file lay is nobody's business
    model.save_pretrained(out, max_shard_size="4GB")
    return {"parameters": model.num_parameters()}


def generate(folder: str, questions: list[str], texts: list[str], steps: int) -> dict[str, Any]:
    """Return greedy tokens in float32 for every prompt, and how clear each choice was."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, attn_implementation="eager"
    ).eval()
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if tokenizer.chat_template:
        for question in questions:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    runs = [_greedy(model, ids, steps) for ids in prompts]
    return {"transformers": transformers.__version__, "torch": torch.__version__, "runs": runs}


def _greedy(model: Any, prompt: list[int], steps: int) -> dict[str, Any]:
    import torch

    tokens: list[int] = []
    margins: list[float] = []
    inputs, cache = torch.tensor([prompt]), None
    for _ in range(steps):
        out = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 3))
        inputs = best.indices[:1].reshape(1, 1)
    return {"prompt": prompt, "tokens": tokens, "margins": margins}


if __name__ == "__main__":
    main()
