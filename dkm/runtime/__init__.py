"""Running a compressed model from its codes: nothing of it is decoded for longer than a layer needs it."""
