"""Several engines as one: requests are routed to replicas, and continue elsewhere when an engine dies."""
