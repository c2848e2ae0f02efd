"""Whole drafts in one call, where the backend of a draft model or the kernels of a head can make them.

A draft loop makes what level-by-level drafting makes. It declines what it cannot make.
"""
