"""Kubernetes: each run is a PyTorchJob (Kubeflow's training operator) or a TrainJob (Kubeflow Trainer), made through the user's kubectl.

Knowledge: `settings.py`, `names.py`, `pod_template.py`, `jobs.py`, `specs.py`, `rendering.py` make the objects; `failures.py` and `states.py` read what a
cluster answers. Action: `kubectl.py` is the only module that starts kubectl; `target.py` uses it, with `creating.py` (all objects of a run, or none),
`ended.py` (how a job ended), `pods.py` (commands and files in pods), `gpus.py` and `checks.py` (doctor, down). `pod.py` and `restarts.py` run inside the pods.
"""
