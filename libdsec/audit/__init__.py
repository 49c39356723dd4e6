"""What an agent could exploit in a sandbox: ``dsec audit``, and `audit` for programs.

>>> report = await audit(sandbox, Wanted(grader=("/workspace/tests",)))  # doctest: +SKIP
>>> print(report.policy)                                                 # doctest: +SKIP

The judgement is pure: `source` and `gitsource` read, the other modules look at what was read.
"""

from libdsec.audit.auditing import audit
from libdsec.audit.report import RISKS, Finding, Report, Risk, Wanted
from libdsec.audit.source import Bounds

__all__ = ["RISKS", "Bounds", "Finding", "Report", "Risk", "Wanted", "audit"]
