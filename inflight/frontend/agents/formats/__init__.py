"""The formats in which models write tool calls, one file each, and the registries of formats."""
