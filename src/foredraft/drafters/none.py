"""Plain decoding: the loop with a drafter that proposes nothing."""

from __future__ import annotations

from foredraft.drafters.base import Drafter, DraftRequest
from foredraft.tree import TokenTree


class NoDrafter(Drafter):
    name = "none"
    summary = "proposes nothing: plain decoding through the same loop"

    def draft(self, request: DraftRequest) -> TokenTree:
        return TokenTree.root(request.roots())
