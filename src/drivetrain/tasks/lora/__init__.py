"""Fine-tuning of language models by low-rank adapters."""
