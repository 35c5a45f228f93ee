"""Engines on the machines of a Ray cluster. This is the only package that imports Ray, and only when it is used."""
