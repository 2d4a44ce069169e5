"""The worker process: one engine behind HTTP, with the protocol of vLLM and OpenAI and a small one for training."""
