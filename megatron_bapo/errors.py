"""The ways a run ends badly. All carry one complete message: value, rule, way out."""


class UserError(ValueError):
    """The user's input breaks a rule; the command line prints the message and exits with 2."""


class RunError(RuntimeError):
    """A part of the run failed (an engine died, a check did not hold); printed without a trace, exit code 1."""


class ProbeFailed(RunError):
    """An engine does not give the trainer's log-probs; it seldom would after a restart, so none is tried."""


class FunctionFailed(UserError):
    """A function raised, answered nonsense or ended its process on one prompt's answer; others may still go well."""
