"""The paper's tables as runnable recipes."""
