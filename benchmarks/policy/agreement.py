"""The model against the kernel, as a part of the bench: how many cases, how many disagreements."""

from __future__ import annotations

import contextlib
import random
import time

from dsec_bench.bench import Context
from dsec_bench.policy import model

POLICIES = {True: 50, False: 200}  # quick, or not
SHOWN = 3


def measure(context: Context) -> None:
    """Compare under generated policies; another seed in each run, which the report has."""
    seed = time.time_ns() & 0xFFFFFFFF
    rng = random.Random(seed)
    policies = POLICIES[context.options.quick]
    context.steps.expect(policies)
    with contextlib.closing(model.Lab(rng)) as lab:
        result = model.run(lab, rng, policies, after=context.steps.done)
    for found in result.disagreements[:SHOWN]:
        context.steps.note(str(found))
    context.report.run(
        "model",
        seed=seed,
        policies=policies,
        compared=dict(result.compared),
        let_through=dict(result.allowed),
        disagreements=[str(found) for found in result.disagreements],
    )
    context.report.figure("model_cases", result.cases)
    context.report.figure("model_disagreements", len(result.disagreements))
