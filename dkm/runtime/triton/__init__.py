"""Products with packed weights on an NVIDIA GPU: `product.py` on the host, `device/` compiled by Triton."""
