"""The model families that the image's own engine serves: the builder refuses what could not start."""

SERVED_FAMILIES = {
    "gemma": "Gemma",
    "gpt2": "GPT2",
    "llama": "Llama",
    "mistral": "Mistral",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
"""``model_type`` to the prefix of its Hugging Face classes."""
