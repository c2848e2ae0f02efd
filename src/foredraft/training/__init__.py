"""Training of heads: data that the target writes itself, one trainer for every kind of head, and the measurements that end it.

``foredraft data generate`` and ``foredraft train`` are thin commands on top of this package.
"""
