"""The two ways a run ends badly. Both carry one complete message: value, rule, way out."""


class UserError(ValueError):
    """The user's input breaks a rule; the command line prints the message and exits with 2."""


class RunError(RuntimeError):
    """A part of the run failed (an engine died, a check did not hold); printed without a trace, exit code 1."""
