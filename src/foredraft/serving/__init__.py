"""A server that speaks the OpenAI API, on one :class:`~foredraft.session.Session`."""
