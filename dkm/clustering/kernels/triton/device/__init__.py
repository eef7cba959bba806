"""Device code only: everything here is compiled by Triton, for whom types are sizes, not annotations.

    forward.py         the kernel of the forward pass
    backward.py        the kernels of the backward pass
    temperature.py     the kernel for the gradient of tau
    steps.py           what both share: phases, the words of `progress`, the barrier, sums over programs
    differences.py     one way to compute attention: distances as differences
    products.py        another way: matrix products on the tensor cores
    product_tables.py  the tables of centroids that `products` reads
    windows.py         a third way, for d = 1 and many centroids: only those near to a weight
    order.py           what `windows` needs: weights in order, and which centroids are near
    groups.py          groups of weights: what both passes share, and the kernel of the forward pass
    group_gradients.py the kernel of their backward pass
    value_kernels.py   d = 1 in 16 bit: counting, gathering and looking up values

The names of sizes and tensors are explained in the glossary of `..` (`triton/__init__.py`).
"""
