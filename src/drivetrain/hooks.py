"""The hooks of a task: the methods that a task's class may define. No setting may have the name of one."""

from __future__ import annotations

HOOKS = {
    "model": "the network",
    "train_data": "the training data",
    "eval_data": "the evaluation data",
    "collate": "makes a batch of samples",
    "loss": "the loss of a batch",
    "counts": "the counts of a loss with several parts",
    "metrics": "the metrics of a batch in evaluation",
    "summary": "metrics of all evaluation data",
    "resample_groups": "the groups of samples that the bootstrap draws",
    "remarks": "lines for the log and pictures, after an evaluation",
    "augment": "changes a training batch on the device",
    "optimizer": "an optimizer of the task's own",
    "schedule": "the factor of the peak learning rate at a step",
    "predict": "the model's output for an input",
    "exports": "the graphs that `export` writes",
    "summary_fields": "lines of `summary.txt`",
    "model_files": "writes the weights in a format of other programs",
}
TUNE_FACTS = {
    "search": "what `tune` searches: assign a dict to it without an annotation",
    "tune_metric": "the metric that `tune` judges trials by: assign it without an annotation",
    "tune_population": "the module that trains many trials at once: assign its name without an annotation",
}
"""Attributes of a class that `tune` reads."""
RESERVED = {
    "settings": "a method that returns the values of all settings",
    "chosen_settings": "a method that returns the settings whose values are not the defaults",
    **TUNE_FACTS,
    "run_folder": "the run's folder, which drivetrain sets",
    "task": "a key of recipes",
    "name": "a key of recipes: the run's name",
    "plan": "a key of recipes",
    "stages": "a key of recipes",
}
"""Names with another meaning: no setting may have them."""
