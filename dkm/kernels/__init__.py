"""How the clustering loop is computed: the only place that knows devices.

Siblings with the same two functions, so that one can be swapped for another:

    forward(W, C, tau, eps, max_iter, metric, reduce=None)                        -> (W_tilde, iterations, trail)
    backward(G, W, trail, iterations, tau, metric, gradient="unrolled", reduce=None, centroids=True)    -> (dW, dC)

`W` is flat, `(N,)`; its vectors are `C.shape[1]` consecutive values, the last one zero-padded.
`trail` is `(max_iter + 1, k, d + 1)`: row t holds the centroids after t iterations and, in the
last column, the attention mass that made them.  With W, it is all that `backward` needs.
The last row is row `iterations` again, where the next step starts from; the others past it are undefined.

`gradient` says what `backward` differentiates, and whose gradient dC is:

    "unrolled"    every iteration                        the first centroids, row 0
    "last"        W_tilde = A C alone                    the last ones used, row iterations - 1
    "implicit"    the centroids as a fixed point         the same, through the linear system of `implicit.py`

Where nobody asks for the gradient of the `centroids`, as in a training, dC is None, and there is less to compute.

`reduce` adds up, over the processes that hold a shard of W each, what their vectors contribute to the
centroids: it is given, and returns, a `(k, d + 1)` or `(k, d)` tensor.

`reference.py` is different on purpose: it materialises the attention and leaves the gradient to
autograd.  It is the definition of correct.
"""
