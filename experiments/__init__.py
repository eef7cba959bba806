"""Experiments behind the tables of the documentation, and a network that the recipes need."""
