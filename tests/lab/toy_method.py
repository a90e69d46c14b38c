"""A toy drafting method: it proposes the last token again, as often as the plan allows."""

from __future__ import annotations

import torch

from forerun.drafters.base import Drafter
from forerun.errors import InvalidRequest
from forerun.sampling.config import Choice
from forerun.sampling.proposal import Proposal
from forerun.theory.tree import TokenTree


class RepeatingDrafter(Drafter):
    method = "toy"

    def __init__(self, most: int) -> None:
        self.most = most

    def propose(self, requests, plans):
        return [
            self.chain(request.ids[-1], min(self.most, plan.num_speculative_tokens))
            for request, plan in zip(requests, plans, strict=True)
        ]

    def chain(self, token, length):
        tokens = torch.full((length,), token)
        return Proposal(tokens=tokens, tree=TokenTree.chain(length), choice=Choice.DETERMINISTIC)


def check_toy(argument, num_target_layers):
    if not argument.isdigit():
        raise InvalidRequest(f"toy:{argument}: give the most tokens, as in toy:3")


def build_toy(argument, target):
    return RepeatingDrafter(int(argument))
