"""Engines with planted faults of verification as endpoints of an audit, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from tests import tiny
from tests.automaton import Automaton
from tests.lab.engine import LabStepper
from tests.tabular import TabularModel, TokenStore
from torch import Tensor

from forerun.control.base import Plan
from forerun.doctor.audit.config import Kind
from forerun.doctor.audit.records import AuditAnswer, Question
from forerun.doctor.audit.reference import ReferenceModel
from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import RequestTerms
from forerun.engine.engine import Engine
from forerun.engine.results import RequestOutput
from forerun.engine.scheduler import ScheduledSequence
from forerun.sampling.config import TokenSource
from forerun.sampling.noise import Purpose, draw, step_key, uniform
from forerun.sampling.processors import pack_params, target_probs
from forerun.sampling.proposal import Verdict

CHARACTERS = "0123456789abcdef-"
VOCAB_SIZE = len(CHARACTERS)
NUM_SLOTS = 8
K = 3
GRAMMAR_LENGTH = 8
_DIGITS, _LETTERS = "0123456789", "abcdef"
_AUTOMATON = [
    {CHARACTERS.index(c): state + 1 for c in allowed}
    for state, allowed in enumerate([*[_DIGITS] * 3, "-", *[_LETTERS] * 4, "0"])
]


def pair(seed: int, *, scale: float = 0.7) -> tuple[TabularModel, TabularModel]:
    """A tabular target and a draft that resembles it."""
    target = tiny.tabular(seed, vocab_size=VOCAB_SIZE, num_slots=NUM_SLOTS)
    return target, tiny.cousin(target, seed + 1, scale=scale)


def _copy(model: TabularModel, store: TokenStore | None = None) -> TabularModel:
    store = store or TokenStore(NUM_SLOTS, model.max_context, max_staged_rows=300)
    return TabularModel(log_probs=model.log_probs, order=model.order, store=store)


def reference_of(target: TabularModel, draft: TabularModel | None) -> ReferenceModel:
    """The models of an audit, with stores of their own."""
    return ReferenceModel(
        model=_copy(target),
        tokenizer=None,
        eos_token_ids=frozenset(),
        draft=None if draft is None else _copy(draft),
    )


class TolerantAutomaton(Automaton):
    """Takes a token that it does not allow, and allows everything behind it."""

    def __init__(self, table: Any, vocab_size: int, state: int = 0) -> None:
        anything = dict.fromkeys(range(vocab_size), len(table))
        super().__init__([*table, anything] if len(table) == 9 else table, vocab_size, state)

    def fork(self) -> TolerantAutomaton:
        return TolerantAutomaton(self.table, self.vocab_size, self.state)

    def advance(self, token: int) -> None:
        self.state = self.table[self.state].get(token, len(self.table) - 1)


# ------------------------------------------------------------------------------------------- faults


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Verification of one drafted token after the other; each part may be at fault.

    Attributes:
        accepts: from the rows of target and draft, the token, and the number compared.
        recovered: weights of the token after a rejection.
        bonus: weights of the token after the last draft token.
        noise: of the comparison; by default of its own.
        without: parameters that the pass leaves out.
        ignores_mask: whether the pass leaves out the grammar.
        shift: by how many rows the pass is read too early.
        keeps: at temperature 0, how many of the most likely tokens pass.
    """

    accepts: Callable[[Tensor, Tensor, int, float], bool] = lambda p, q, x, u: (
        u * float(q[x]) < float(p[x])
    )
    recovered: Callable[[Tensor, Tensor], Tensor] = lambda p, q: (p - q).clamp(min=0)
    bonus: Callable[[Tensor], Tensor] = lambda p: p
    noise: Purpose = Purpose.ACCEPT
    without: Mapping[str, Any] | None = None
    ignores_mask: bool = False
    shift: int = 0
    keeps: int = 1

    def __call__(self, entry: ScheduledSequence, logits: Tensor) -> Verdict:
        verdict, proposal = entry.verdict, entry.proposal
        assert verdict is not None
        if proposal is None:
            return verdict
        drafted = proposal.tokens.tolist()
        rows = self._target_rows(entry, logits, drafted)
        sequence = entry.sequence
        tokens: list[int] = []
        for place, token in enumerate(drafted):
            p = rows[max(0, place - self.shift)]
            if proposal.draft_probs is None:
                passes = token in p.topk(self.keeps).indices.tolist()
                weights = torch.zeros_like(p)
                weights[p.argmax()] = 1.0
            else:
                q = proposal.draft_probs[place]
                key = step_key(sequence.noise_key, len(sequence.ids), place, self.noise)
                passes = self.accepts(p, q, token, float(uniform(torch.tensor([key]))[0]))
                weights = self.recovered(p, q)
            if not passes:
                return self._ended(entry, tokens, weights if weights.sum() > 0 else p, False)
            tokens.append(token)
        return self._ended(entry, tokens, self.bonus(rows[len(drafted) - self.shift]), True)

    def _target_rows(self, entry: ScheduledSequence, logits: Tensor, drafted: list[int]) -> Tensor:
        params = entry.sequence.params
        if self.without:
            params = replace(params, **self.without)
        histories = entry.row_histories(drafted, logits.shape[-1])
        if self.ignores_mask and not entry.sequence.params.needs_history:
            histories = []
        packed = pack_params([params], "cpu", [0] * len(logits))
        rows = target_probs(logits, packed, histories)
        return logits.float().softmax(-1) if params.greedy else rows

    def _ended(
        self, entry: ScheduledSequence, tokens: list[int], weights: Tensor, is_bonus: bool
    ) -> Verdict:
        source = TokenSource.BONUS if is_bonus else TokenSource.RECOVERED
        sequence = entry.sequence
        purpose = Purpose.BONUS if is_bonus else Purpose.RECOVERED
        key = step_key(sequence.noise_key, len(sequence.ids), 0, purpose)
        if sequence.params.greedy:
            weights = (weights == weights.max()).float()
        final = int(draw(weights[None], uniform(torch.tensor([key])))[0])
        return Verdict(
            path=tuple(range(len(tokens))),
            tokens=(*tokens, final),
            sources=(*[TokenSource.ACCEPTED] * len(tokens), source),
            expected_accepted=float(len(tokens)),
        )


def _tempered(q: Tensor, temperature: float) -> Tensor:
    raised = q.pow(1 / temperature)
    return raised / raised.sum()


def _argmax(weights: Tensor) -> Tensor:
    return (weights == weights.max()).float()


def _typical(p: Tensor, q: Tensor, x: int, u: float) -> bool:
    entropy = float(-(p * p.clamp(min=1e-30).log()).sum())
    return float(p[x]) > min(0.09, 0.3 * 2.718281828**-entropy)


class StaleStore(TokenStore):
    """After a rejection keeps the KV of the rejected token in place of the last accepted one."""

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        staged = self.tokens(slot, 1 << 30)[self.length(slot) :]
        super().commit(slot, rows)
        if 0 < len(rows) < len(staged):
            self._tokens[slot][self.length(slot) - 1] = staged[len(rows)]


class FeaturesOffByOne(TabularModel):
    """A draft that reads a context without its last token."""

    def state_of(self, ids: Sequence[int]) -> int:
        return super().state_of(ids[:-1])


def lenient(p: Tensor, q: Tensor, x: int, u: float) -> bool:
    """Compares with the half of the number."""
    return 0.5 * u * float(q[x]) < float(p[x])


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A published fault, the family that the audit should name, and how it is planted."""

    name: str
    family: str | None
    rule: Rule | None = None
    store: type[TokenStore] | None = None
    draft: type[TabularModel] = TabularModel
    shares_seeds: bool = False


FAULTS = (
    Fault(
        name="threshold u <= a with numbers of 4 bits",
        family="threshold",
        rule=Rule(accepts=lambda p, q, x, u: int(u * 16) / 16 * float(q[x]) <= float(p[x])),
    ),
    Fault(
        name="acceptance with the draft's temperature",
        family="acceptance",
        rule=Rule(accepts=lambda p, q, x, u: u * float(_tempered(q, 2.0)[x]) < float(p[x])),
    ),
    Fault(name="lenient acceptance", family="acceptance", rule=Rule(accepts=lenient)),
    Fault(
        name="residual not clipped",
        family="residual",
        rule=Rule(recovered=lambda p, q: (p - q).abs()),
    ),
    Fault(
        name="recovered token from the target's row",
        family="residual",
        rule=Rule(recovered=lambda p, q: p),
    ),
    Fault(name="draft noise reused", family="reused_noise", rule=Rule(noise=Purpose.DRAFT)),
    Fault(
        name="top-p on the draft alone",
        family="one_sided_filter",
        rule=Rule(without={"top_p": 1.0}),
    ),
    Fault(name="stale KV after a rejection", family="stale_state", store=StaleStore),
    Fault(
        name="typical acceptance",
        family="typical_acceptance",
        rule=Rule(accepts=_typical, recovered=lambda p, q: (p - q).clamp(min=0)),
    ),
    Fault(name="grammar mask on the draft alone", family="grammar", rule=Rule(ignores_mask=True)),
    Fault(
        name="penalties missing in the pass",
        family="missing_penalties",
        rule=Rule(without={"frequency_penalty": 0.0}),
    ),
    Fault(name="seeds shared by requests", family="shared_seeds", shares_seeds=True),
    Fault(
        name="argmax in the recovered and bonus slot",
        family="argmax_slot",
        rule=Rule(recovered=lambda p, q: _argmax(p - q), bonus=_argmax),
    ),
    Fault(name="pass read one row off", family="wrong_row", rule=Rule(shift=1)),
    Fault(name="two best tokens pass at T=0", family="relaxed_greedy", rule=Rule(keeps=2)),
    Fault(name="draft features off by one", family=None, draft=FeaturesOffByOne),
)
"""The last one lowers acceptance and keeps the distribution: an audit must not raise an alarm."""


def faulty_engine(
    target: TabularModel, draft: TabularModel, fault: Fault | None, k: int = K
) -> Engine:
    """An engine over copies of the pair; healthy without a fault."""
    fault = fault or Fault(name="healthy", family=None)
    store = (fault.store or TokenStore)(NUM_SLOTS, target.max_context, max_staged_rows=300)
    drafting = fault.draft(
        log_probs=draft.log_probs,
        order=draft.order,
        store=TokenStore(NUM_SLOTS, target.max_context, max_staged_rows=300),
    )
    engine = tiny.engine_over(
        _copy(target, store),
        DraftModel(drafting, VOCAB_SIZE),
        k=k,
        sharing="none",
        max_batch=NUM_SLOTS,
    )
    if fault.rule is not None:
        plant(engine, fault.rule)
    return engine


def plant(engine: Engine, rule: Rule) -> None:
    """Replace the verification of an engine."""
    engine.stepper = LabStepper(engine, rule)


class EngineEndpoint:
    """Answers the questions of an audit from an engine.

    Args:
        engine: that is audited.
        seed: of the run; every request has another, unless `shares_seeds`.
    """

    control = "off"
    name = "an engine in this process"

    def __init__(self, engine: Engine, seed: int, *, shares_seeds: bool = False) -> None:
        self.engine = engine
        self.shares_seeds = shares_seeds
        self._seed = seed << 24

    @property
    def max_context(self) -> int:
        return self.engine.config.max_context

    def ask(self, questions: Sequence[Question], kinds: Mapping[str, Kind]) -> list[AuditAnswer]:
        ids = [self._added(question, kinds[question.kind]) for question in questions]
        cut = [name for name, q in zip(ids, questions, strict=True) if q.cut_at is not None]
        for _ in range(CUT_AFTER_STEPS if cut else 0):
            self.engine.step()
        found = {name: self.engine.abort(name) for name in cut}
        while self.engine.has_unfinished:
            self.engine.step()
        outputs = [found.get(name) or self.engine.take_output(name) for name in ids]
        return [self.answer_of(q, output) for q, output in zip(questions, outputs, strict=True)]

    def answer_of(self, question: Question, output: RequestOutput) -> AuditAnswer:
        """The answer of a request that has ended; its text is cut at the stop string."""
        sample = output.completions[0]
        reason = None if sample.finish_reason == "abort" else sample.finish_reason
        text = "".join(CHARACTERS[token] for token in sample.token_ids)
        return AuditAnswer(
            token_ids=sample.token_ids,
            step_sizes=step_sizes(sample.sources),
            text=text.split(question.stop)[0] if question.stop else text,
            finish_reason=reason,
            num_charged=len(sample.token_ids),
            num_drafted=sample.acceptance.num_drafted,
        )

    def _added(self, question: Question, kind: Kind) -> str:
        self._seed += 1
        mask = TolerantAutomaton(_AUTOMATON, VOCAB_SIZE) if kind.has_grammar else None
        params = replace(
            kind.params_for(question),
            max_tokens=GRAMMAR_LENGTH if mask else question.num_tokens,
            seed=7 if self.shares_seeds else self._seed,
            verification="block" if kind.temperature > 0 else "auto",
            stop=(),
            ignore_eos=True,
        )
        assert not isinstance(question.prompt, str)
        terms = RequestTerms(plan=Plan()) if question.arm == "control" else None
        return self.engine.add_request(list(question.prompt), params, terms=terms, mask=mask)


CUT_AFTER_STEPS = 4


def step_sizes(sources: Sequence[TokenSource]) -> tuple[int, ...]:
    """Tokens of every step: all but its last one are accepted draft tokens."""
    ends = [i for i, source in enumerate(sources) if source is not TokenSource.ACCEPTED]
    return tuple(
        end - start for start, end in pairwise([-1, *ends, len(sources) - 1]) if end > start
    )
