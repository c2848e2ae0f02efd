"""What a drafter learns while it serves: the texts that it learns from, the weights that come of them, and when there is time for it.

The server collects and swaps (:mod:`.serving`); another process learns (:mod:`foredraft.training.online`). They share a folder, and nothing
else: whatever becomes of one of them, the other goes on.
"""
