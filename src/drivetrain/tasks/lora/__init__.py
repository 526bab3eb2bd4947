"""Fine-tuning of language models by low-rank adapters (LoRA).

`lora.py` is the task. `base_model.py` finds the frozen model, `adapted_model.py` adds adapters to it; `fused_linear.py`,
`head_loss.py` and `loss_kernel.py` make it fast. `documents.py` reads texts, `text.py` tokenises and packs them, `cache.py`
holds what is made once, and `output_files.py` writes what other programs read.
"""
