"""How many connections the limit on open files leaves room for."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

OWN = 128  # files, sockets and pipes that the server has open beside its connections


def connections_that_fit(wanted: int) -> int:
    """As many as wanted, or as the process may have open. Raises its limit as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OWN
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (ValueError, OSError):  # the system has a limit of its own
        limit = soft
    fitting = max(1, min(wanted, limit - OWN))
    if fitting < wanted:
        logger.warning(
            "--max-connections %d needs %d open files, but the limit is %d (ulimit -n): it is %d connections now",
            *(wanted, needed, limit, fitting),
        )
    return fitting
