"""Workers that measure one peer each, run by that peer's Python: `peer/bin/python -m benchmarks.peers.<name> job.json`.

A peer and its pins live in an environment of their own, which needs torch, torchvision, safetensors, scikit-learn and
the peer, not quark_fx. Worker and caller speak through files only; `job.py` says which.
"""
