"""Kubernetes: each run is a PyTorchJob (Kubeflow's training operator) or a TrainJob (Kubeflow Trainer), made through the user's kubectl.

Knowledge: `settings.py`, `names.py`, `pod_template.py`, `jobs.py`, `rendering.py` make the objects; `failures.py` and `states.py` read what a
cluster answers. Action: `kubectl.py` is the only module that starts kubectl; `target.py` uses it. `pod.py` runs inside the pods.
"""
