"""Fine-tuning of language models by low-rank adapters (LoRA).

`lora.py` is the task. `base_model.py` loads the frozen model, `adapted_model.py` adds adapters to it; `fused_linear.py`,
`head_loss.py` and `loss_kernel.py` make it fast. `documents.py` reads texts, `text.py` tokenises and packs them, `cache.py`
stores converted models and tokens, and `output_files.py` writes files for other programs.
"""
