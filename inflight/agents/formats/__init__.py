"""One file for each way in which models write tool calls."""
