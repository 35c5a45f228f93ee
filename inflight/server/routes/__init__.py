"""The routes, one file a family."""
