"""One torch thread: on tiny models, threads that wait for each other cost more than they compute.

Nothing is patched: a test that names no shape gets the planner, as users do, and asserts nothing that depends on time. Nothing is read from
or written to the user's cache.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["FOREDRAFT_CACHE"] = "off"

import torch

torch.set_num_threads(1)
