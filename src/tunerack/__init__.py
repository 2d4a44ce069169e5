"""tunerack: plan, train and serve many fine-tuned language models on a few shared GPUs."""

__version__ = "0.1.0"
