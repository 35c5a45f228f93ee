"""What people type from habit: names of vLLM, as data, and what becomes of them here."""
