"""What an audit says: findings, each of a kind, in the order of their weight."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

Kind = Literal[
    "fails",  # raises, returns other shapes, is not differentiable
    "not finite",
    "wrong wiring",
    "worse than its algorithm allows",
    "not reproducible",
    "as accurate as its algorithm allows, which is poor here",
    "not taken",  # arguments that the target does not have: no fault
    "trustworthy",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
# How a cause begins where the same attention, asked for otherwise, is another.
DEPENDS = "result depends on the"
# The probe that hides keys by their lengths.
HIDDEN_BY_LENGTHS = "padded keys"
# Causes of NaN and infinities: of any logits that are large, and at the last key alone.
EXTREME, PAST_THE_LAST = "not finite at extreme logits", "what lies past the last key"
ON_WHAT_ALL_SHARE = "result depends on what all keys share"
NOT_THE_LOGITS = "LSE does not follow the logits"
# A mask is applied, and what it hides is seen where it is large; how the names of the
# probes begin that show it, before the mask's.
HIDDEN_KEYS, LARGE_HIDDEN = "result depends on hidden keys", "large hidden keys, "
# The mask is not, or not all, applied.
HIDDEN_PAIRS = "hidden pairs carry weight"
# Of P alone: the attention is the one asked for, and other faults show beside them.
ROWS_NOT_ONE, P_CLIPPED = "rows do not sum to one", "P clipped"
# Values are not finite in rows that see no key, and in no others.
SEES_NO_KEY = "rows that see no key"
# They are no zeros.
BLIND_WEIGHTS = "queries that see no key"
# Where it was found that parts do not merge.
MERGE = "merge"
# Of an LSE that is right but for its last bits.
ROUNDED_LSE = "LSE rounded to BF16", "LSE rounded to FP16"
# Of every result that is made of logits.
ROUNDED_QUERY = "query rounded after scaling"
# Nobody need act on these.
HARMLESS: tuple[Kind, ...] = ("not taken", "trustworthy")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of a verdict.

    Attributes:
      kind: one of `KINDS`.
      cause: what is wrong, a short name that stays the same in all reports, such as
        "GQA heads grouped wrongly" or "delta"; "" if it has none.
      says: one sentence for a person, with figures, that names what to do where that
        is known.
      tensors: the results concerned, names of `problem.TENSORS`.
      where: the problems it was found in, in words, or a probe's name.
      evidence: figures by name, for the report.
    """

    kind: Kind
    cause: str
    says: str
    tensors: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    evidence: Mapping[str, float | str] = dataclasses.field(default_factory=dict)

    @property
    def is_other_attention(self) -> bool:
        """Whether it says that something else was computed, on which results that are
        made of it depend."""
        return self.kind == "wrong wiring" and self.cause != ROWS_NOT_ONE

    @property
    def line(self) -> str:
        """Kind, cause and what it says, none of which the next begins with."""
        line = self.says
        for before in (self.cause, self.kind):
            line = line if line.startswith(before) else f"{before}: {line}"
        return line


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Most serious first; of a kind, in the order given."""
    return sorted(findings, key=lambda finding: KINDS.index(finding.kind))


def is_trustworthy(findings: Iterable[Finding]) -> bool:
    return all(finding.kind in HARMLESS for finding in findings)
