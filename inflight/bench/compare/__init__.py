"""The `inflight compare` command: the same requests under several scheduling policies, with figures and pictures."""
