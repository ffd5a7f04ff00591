"""Sets the variables of Ray, here and for child processes. Ray reads them as it is loaded, so import this first."""

import os

# Keeps Ray's servers on the loopback interface, as on a laptop; the user's environment may override it.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.update(
    {
        "RAY_AUTH_MODE": "token",
        # Ray's default of 15 gives actors a lower priority than the trainer.
        "RAY_worker_niceness": "0",
        # Disables the history of calls, which grows by 3 KB with each call.
        "RAY_task_events_report_interval_ms": "0",
        # Time before a failed call is retried.
        "RAY_task_retry_delay_ms": "1000",
        # Metrics would have ports of their own, which do not ask for the token.
        "RAY_enable_metrics_collection": "0",
        # Workers that Ray starts ahead of time serve no actor here, because every actor sets environment variables.
        "RAY_prestart_worker_first_driver": "0",
    }
)
