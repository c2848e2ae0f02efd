"""One adapter per method of the speed suite, each run by ``serve.py`` in a process of its own, in that method's environment.

An adapter needs the standard library and its own packages, nothing of Foredraft's (but Foredraft's own). It is a module with a class
``Engine``; see ``serve.py`` for what the methods take and return.
"""
