"""Programs that the project runs for itself; none of them is installed with the package."""
