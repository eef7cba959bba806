"""How the clustering loop is computed: the only place that knows devices.

Siblings with the same two functions, so that one can be swapped for another:

    forward(W, C, tau, eps, max_iter, metric)         -> (W_tilde, iterations, trail)
    backward(G, W, trail, iterations, tau, metric)    -> (dW, dC)

`W` is flat, `(N,)`; its vectors are `C.shape[1]` consecutive values, the last one zero-padded.
`trail` is `(max_iter + 1, k, d + 1)`: row t holds the centroids after t iterations and, in the
last column, the attention mass that made them.  With W, it is all that `backward` needs.
Rows past `iterations` are undefined; row `iterations` is where the next step starts from.

`reference.py` is different on purpose: it materialises the attention and leaves the gradient to
autograd.  It is the definition of correct.
"""
