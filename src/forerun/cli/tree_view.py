"""Shows the draft tree of one step in a terminal, with probabilities and the accepted path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.text import Text
from rich.tree import Tree as RichTree

from forerun.engine.observing import ObservedStep
from forerun.engine.scheduler import ScheduledSequence
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.proposal import Proposal, Verdict
from forerun.sampling.tree_rules import expanded
from forerun.terminal_text import printable

__all__ = ["TreeView"]

ACCEPTED_STYLE = "bold green"
EMITTED_STYLE = "bold cyan"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftedTree:
    """The draft of one step and its outcome.

    Attributes:
        step: number of the step within the request.
        last_token: the last committed token before the step.
        proposal: what was drafted.
        verdict: what was accepted, and the token that followed.
        target_probs: of every node, the target's probability of its token after its path, before
            the request's sampling parameters are applied.
        draft_probs: of every node, the draft's; None where it has none.
    """

    step: int
    last_token: int
    proposal: Proposal
    verdict: Verdict
    target_probs: list[float]
    draft_probs: list[float] | None


class TreeView:
    """An observer that keeps the draft with the longest accepted path; of equals, the largest."""

    is_required = True
    wants_logits = True

    def __init__(self) -> None:
        self.kept: DraftedTree | None = None
        self._rank = (-1, 0)

    def observe(self, step: ObservedStep) -> None:
        """Keep a draft of this step if its accepted path is longer than that of the kept draft."""
        for entry, record in zip(step.emitting, step.records, strict=True):
            rank = record.num_accepted, record.num_drafted
            if record.num_drafted and rank > self._rank:
                self._rank = rank
                self.kept = drafted_tree(entry, record.step)

    def rendered(self, tokenizer: Tokenizer) -> RichTree | Text:
        """Return the kept draft as a tree for the terminal, or a sentence if no draft was kept."""
        kept = self.kept
        if kept is None:
            return Text("no step drafted a token, so there is no tree to show")

        def shown(token: int) -> str:
            return printable(repr(tokenizer.decode([token])))

        tree, verdict = kept.proposal.tree, kept.verdict
        title = (
            f"step {kept.step}: {len(tree.parents)} nodes, depth {max(tree.depths)}, "
            f"{verdict.num_accepted} accepted, after {shown(kept.last_token)}"
        )
        branches = {-1: RichTree(Text(title))}
        tokens = kept.proposal.tokens.tolist()
        for node, parent in enumerate(tree.parents):
            label = Text(shown(tokens[node]))
            label.append(f"  target {kept.target_probs[node]:.2f}", style="dim")
            if kept.draft_probs is not None:
                label.append(f"  draft {kept.draft_probs[node]:.2f}", style="dim")
            if node in verdict.path:
                label.stylize(ACCEPTED_STYLE)
                label.append("  accepted", style=ACCEPTED_STYLE)
            branches[node] = branches[parent].add(label)
        last = f"{shown(verdict.tokens[-1])}  {verdict.sources[-1]}"
        end = verdict.path[-1] if verdict.path else -1
        branches[end].add(Text(last, style=EMITTED_STYLE))
        return branches[-1]


def drafted_tree(entry: ScheduledSequence, step: int) -> DraftedTree:
    """Return the draft of a sequence and its outcome; the step must have kept its logits."""
    proposal, verdict, logits = entry.proposal, entry.verdict, entry.logits
    assert proposal is not None
    assert verdict is not None
    assert logits is not None
    parents = torch.tensor(proposal.tree.parents, device=logits.device)
    tokens = proposal.tokens.to(logits.device)
    probs = logits[parents + 1].float().softmax(-1).gather(-1, tokens[:, None])[:, 0]
    drafts = None
    if proposal.draft_probs is not None:
        rows = {node: row for row, node in enumerate(expanded(proposal.tree))}
        places = [rows[parent] for parent in proposal.tree.parents]
        of_nodes = proposal.draft_probs.to(logits.device)[places]
        drafts = of_nodes.gather(-1, tokens[:, None])[:, 0].tolist()
    return DraftedTree(
        step=step,
        last_token=entry.sequence.ids[-1 - entry.num_emitted],
        proposal=proposal,
        verdict=verdict,
        target_probs=probs.tolist(),
        draft_probs=drafts,
    )
