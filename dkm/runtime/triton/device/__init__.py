"""Device code only: everything here is compiled by Triton, for whom types are sizes, not annotations."""
