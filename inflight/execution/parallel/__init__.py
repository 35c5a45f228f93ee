"""One model on several ranks, each a process: what they share, how they are started and watched, and their runner."""
