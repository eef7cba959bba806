"""Experiments behind the tables of the documentation."""
