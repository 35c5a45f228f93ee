"""One model on several ranks, each a process: shared memory, collectives, processes and runners."""
