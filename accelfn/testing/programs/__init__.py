"""Training programs by the thousand: drawn, run in every layout, compared with one process, and shrunk."""

from accelfn.testing.programs.campaigns import Report, Shrunk, campaign, finding_of, shrink, simpler
from accelfn.testing.programs.draft import Draft
from accelfn.testing.programs.drawing import Finding, cover, draw, is_known, layouts_of, needs
from accelfn.testing.programs.grammar import Choice, Feature, Grammar, Program, Rule, feature, together
from accelfn.testing.programs.run import Outcome, RankLog, run_programs
from accelfn.testing.programs.scripts import script
from accelfn.testing.programs.training import training_programs
from accelfn.testing.programs.verdict import Reference, Verdict, check_programs, compare, reference_of

__all__ = (
    "Choice",
    "Draft",
    "Feature",
    "Finding",
    "Grammar",
    "Outcome",
    "Program",
    "RankLog",
    "Reference",
    "Report",
    "Rule",
    "Shrunk",
    "Verdict",
    "campaign",
    "check_programs",
    "compare",
    "cover",
    "draw",
    "feature",
    "finding_of",
    "is_known",
    "layouts_of",
    "needs",
    "reference_of",
    "run_programs",
    "script",
    "shrink",
    "simpler",
    "together",
    "training_programs",
)
