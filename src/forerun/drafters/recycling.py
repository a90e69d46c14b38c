"""Token recycling: a table of the target's most likely tokens after every token.

Source: Token Recycling (2408.08696). At every verified row, of rejected nodes too, the target's
most likely next tokens are kept, by the token that was fed. Trees are paths through this table, so
there is nothing to train and drafting takes no model pass. A token of the prompt begins with its
successors there, for a prompt that is being read yields no logits.

The paper fills a fixed tree by rank. Here the probability of each rank is learned from the tokens
that are committed, and the best paths under them are taken; this is the same tree while the
probabilities stay the same.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from forerun.control.base import Plan, Tree
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.drafters.tree_growth import Candidates, Path, build_tree
from forerun.models.base import LanguageModel
from forerun.sampling.proposal import Proposal

NUM_KEPT = 8
PRIOR = (12.0, 3.6, 1.8, 1.2, 0.9, 0.6, 0.5, 0.4)
"""Hits of each rank before anything is known, of PRIOR_TOTAL tries."""
PRIOR_TOTAL = 30.0
MAX_SCOPES = 16
"""Tables kept for later requests; a table takes a list of eight ids per token that occurred."""

Table = dict[int, list[int]]


class RecyclingDrafter(Drafter):
    """Drafts trees from tables of the target's most likely tokens, one table per scope."""

    method = "recycling"
    required_top_k = NUM_KEPT
    max_width = NUM_KEPT

    def __init__(self) -> None:
        self._hits = [*PRIOR]
        self._tries = PRIOR_TOTAL
        self._own: dict[str, Table] = {}
        self._shared: OrderedDict[str, Table] = OrderedDict()

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Return the most likely paths after each request's last token; None if it is unseen."""
        log_probs = [math.log(hits / self._tries) for hits in self._hits]
        proposals: list[Proposal | None] = []
        for request, plan in zip(requests, plans, strict=True):
            table, last, shape = self._table(request), request.ids[-1], plan.shape
            width = shape.width if isinstance(shape, Tree) else 1

            def expand(path: Path, table: Table = table, last: int = last) -> Candidates | None:
                tokens = table.get(path[-1] if path else last)
                return None if tokens is None else (tokens, log_probs[: len(tokens)])

            tree = Tree(num_nodes=shape.num_nodes, depth=shape.depth, width=width)
            built = build_tree(expand, tree)
            proposals.append(built.proposal("budget", is_assured=True) if built.tokens else None)
        return proposals

    def _table(self, request: DraftRequest) -> Table:
        if request.scope is None:
            return self._own.setdefault(request.request_id, {})
        table = self._shared.setdefault(request.scope, {})
        self._shared.move_to_end(request.scope)
        if len(self._shared) > MAX_SCOPES:
            self._shared.popitem(last=False)
        return table

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Count the ranks of committed tokens, and update the table from verified rows."""
        for outcome in outcomes:
            table, ids = self._table(outcome.request), outcome.request.ids
            if outcome.verdict is None:
                end = outcome.first_row + outcome.num_rows
                for at in range(max(1, outcome.first_row), min(end + 1, len(ids))):
                    _put_first(table, ids[at - 1], ids[at])
                continue
            for at in range(len(ids) - len(outcome.verdict.tokens), len(ids)):
                self._learn(table.get(ids[at - 1]), ids[at])
            table.update(outcome.top_tokens)

    def _learn(self, tokens: Sequence[int] | None, token: int) -> None:
        """Count the rank of a committed token in the table entry of the token before it."""
        if tokens is None:
            return
        self._tries += 1
        if token in tokens:
            self._hits[tokens.index(token)] += 1

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)


def _put_first(table: Table, token: int, successor: int) -> None:
    """Move a token that followed another to the front of the latter's table entry."""
    known = table.setdefault(token, [])
    if successor in known:
        known.remove(successor)
    known.insert(0, successor)
    del known[NUM_KEPT:]


def build_recycling(argument: str, target: LanguageModel) -> RecyclingDrafter:
    """Build `recycling`, which drafts from the target's own most likely tokens."""
    return RecyclingDrafter()
