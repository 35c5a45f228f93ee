"""What people type from habit: flags and variables of vLLM, as data, and what becomes of them here."""
